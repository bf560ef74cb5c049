"""`scaleup compare`: every method, lag, replay and seed of a recipe on real engines, and one report.

    <out>/recipe.toml  results.parquet  summary.csv  report.html  figures/  cells/<run>/

Runs share the engines and are done one after another, the reference first within each seed. A run that
is finished holds done.json with its settings; the same command goes on with the rest.

final       mean reward over the last eighth of the steps
difference  final minus the reference's final, seed by seed, at the same lag and replay
interval    Student-t over seeds, 95 %. With few seeds it assumes that they are near Gaussian
verdict     "above" or "below" needs the exact interval of the median difference that holds for all
            comparisons of the table at once. Below about 10 seeds it is infinite, and nothing is ranked
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import matplotlib

matplotlib.use("Agg", force=True)

import numpy as np
import polars as pl
import seaborn as sns
import tomli_w
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scaleup.host import cluster
from scaleup.metrics import read
from scaleup.recipe import Recipe, RunSpec
from simlab.config import RunError
from simlab.figures import STYLE
from simlab.intervals import mean_interval, median_interval
from simlab.page import commit, embed, write, write_page
from simlab.token_log import steps

matplotlib.rcParams.update(STYLE)
MEANS = (
    "d_bar",
    "d_policy",
    "d_engine",
    "kl_k3",
    "cut",
    "gate_rate",
    "radius_low",
    "radius_high",
    "age",
)


def compare(recipe: Recipe, name: str, out: Path) -> list[str]:
    """Run what is missing, write the folder, return what can be said. Raises RunError."""
    cells = recipe.cells()
    missing = [cell for cell in cells if not finished(cell, out / "cells" / cell.name)]
    held = {"recipe": name} | recipe.model_dump(mode="json", exclude_none=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write(out / "recipe.toml", lambda part: part.write_text(tomli_w.dumps(held)))
        with ExitStack() as stack:
            bar = stack.enter_context(_bar())
            task = bar.add_task(f"scaleup compare {name}", total=len(cells) * recipe.training.steps)
            bar.advance(task, (len(cells) - len(missing)) * recipe.training.steps)
            run = stack.enter_context(cluster(recipe.world)) if missing else None
            for cell in missing:
                folder = out / "cells" / cell.name
                for _ in run(cell, folder):
                    bar.advance(task)
                made = {"settings": plain(cell), "commit": commit(), "version": version("simlab")}
                write(folder / "done.json", lambda part, x=made: part.write_text(json.dumps(x)))
        rows = pl.concat(
            [table(cell, out / "cells" / cell.name) for cell in cells], how="diagonal_relaxed"
        )
        summary = summarize(recipe, rows)
        write(out / "results.parquet", rows.write_parquet)
        write(out / "summary.csv", summary.write_csv)
        sentences = findings(recipe, summary)
        report(recipe, name, out, rows, summary, sentences)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror or error})") from error
    return sentences


def plain(cell: RunSpec) -> dict:
    """The settings of a run as JSON gives them back."""
    return json.loads(json.dumps(cell.settings(), default=str))


def finished(cell: RunSpec, folder: Path) -> bool:
    """Whether the run is done. Raises RunError for a folder that holds another one."""
    if not (folder / "done.json").exists():
        return False
    held = json.loads((folder / "done.json").read_text())["settings"]
    if held != (wanted := plain(cell)):
        odd = next(k for k in wanted if held.get(k) != wanted[k])
        raise RunError(f"{folder}: holds a run with another {odd}; choose another --out")
    return True


def table(cell: RunSpec, folder: Path) -> pl.DataFrame:
    """Rows of a finished run with what they belong to."""
    made = json.loads((folder / "done.json").read_text())
    constant = {
        "arm": cell.arm.label,
        "method": cell.arm.name,
        "arguments": str(dict(cell.arm.arguments)),
        "lag": cell.lag,
        "replay": cell.replay,
        "seed": cell.seed,
        "commit": made["commit"],
        "version": made["version"],
    }
    rows = pl.DataFrame(read(folder / "metrics.jsonl"), infer_schema_length=None)
    rows = rows.with_columns(cut=1 - pl.col("active"))
    return rows.select(*[pl.lit(v).alias(k) for k, v in constant.items()], pl.all())


def summarize(recipe: Recipe, rows: pl.DataFrame) -> pl.DataFrame:
    """One row per arm, lag and replay."""
    last = rows["step"].max() + 1
    tail = pl.col("step") >= last - max(last // 8, 1)
    names = [x for x in MEANS if x in rows.columns]
    per_run = rows.group_by("arm", "method", "lag", "replay", "seed", maintain_order=True).agg(
        pl.col("reward").filter(tail).mean().alias("final"),
        pl.col("reward").filter(pl.col("step") == 0).mean().alias("first"),
        pl.col("reward").max().alias("peak"),
        (~pl.col("updated")).sum().alias("skipped"),
        *[pl.col(x).filter(pl.col("step") >= last * 3 // 4).mean() for x in names],
        pl.col("d_max").max(),
        pl.col("age_max").max(),
        pl.col("seconds").max(),
    )
    level = 1 - 0.05 / max((len(recipe.arms) - 1) * len(recipe.lags) * len(recipe.world.replay), 1)
    found = []
    for lag in recipe.lags:
        for replay in recipe.world.replay:
            at = per_run.filter((pl.col("lag") == lag) & (pl.col("replay") == replay))
            reference = (
                at.filter(pl.col("arm") == recipe.reference).sort("seed")["final"].to_numpy()
            )
            for arm in recipe.arms:
                mine = at.filter(pl.col("arm") == arm.label).sort("seed")
                final = mine["final"].to_numpy()
                row = {"arm": arm.label, "method": arm.name, "lag": lag, "replay": replay}
                row |= {"seeds": len(final), "first": mine["first"].mean()}
                row |= _interval("final", mean_interval(final))
                row |= _interval("diff", mean_interval(final - reference))
                row |= _interval("typical", median_interval(final - reference, level))
                row |= {x: mine[x].mean() for x in (*names, "seconds")}
                row |= {x: mine[x].max() for x in ("d_max", "age_max", "skipped")}
                above, below = row["typical_low"] > 0, row["typical_high"] < 0
                row["verdict"] = "above" if above else "below" if below else "not separated"
                if arm.label == recipe.reference:
                    row["verdict"] = "reference"
                found.append(row)
    return pl.DataFrame(found, infer_schema_length=None)


def findings(recipe: Recipe, summary: pl.DataFrame) -> list[str]:
    """What the intervals support, in sentences."""
    n = int(summary["seeds"].min())
    said = []
    for verdict in ("above", "below"):
        for row in summary.filter(pl.col("verdict") == verdict).iter_rows(named=True):
            said.append(
                f"{row['arm']} at lag {row['lag']}, replay {row['replay']}: {verdict} {recipe.reference}, "
                f"by {row['diff']:+.3f} [{row['diff_low']:+.3f}, {row['diff_high']:+.3f}]."
            )
    if not said:
        said.append(
            f"With {n} seeds no method is separated from {recipe.reference} by an interval that holds "
            "for the whole table; none is ranked."
        )
    alone = summary.filter(
        (pl.col("arm") != recipe.reference) & ((pl.col("diff_low") > 0) | (pl.col("diff_high") < 0))
    )
    total = len(summary.filter(pl.col("arm") != recipe.reference))
    said.append(
        f"{len(alone)} of {total} differences have a Student-t interval of their own (95 %, not "
        f"corrected for {total} comparisons, {n} seeds) without 0; chance alone gives about {0.05 * total:.0f}."
    )
    for lag in recipe.lags:
        for replay in recipe.world.replay:
            at = summary.filter((pl.col("lag") == lag) & (pl.col("replay") == replay))
            said.append(
                f"Lag {lag}, replay {replay}: rewards go from {at['first'].mean():.3f} to "
                f"{at['final'].min():.3f} to {at['final'].max():.3f} by method; d_bar is "
                f"{at['d_bar'].min():.4f} to {at['d_bar'].max():.4f}, ages up to {at['age_max'].max()}."
            )
    return said


def report(recipe, name: str, out: Path, rows, summary, sentences: list[str]) -> None:
    """report.html and figures/."""
    (out / "figures").mkdir(exist_ok=True)
    drawn = [
        (
            curves(recipe, rows, "reward"),
            "learning_curves",
            "Reward over optimizer steps",
            "Mean over seeds; the band is a Student-t 95 % interval.",
        ),
        (
            forest(recipe, rows),
            "final_difference",
            "Final reward against the reference",
            "Paired differences, one dot a seed; bars are Student-t 95 % intervals over seeds.",
        ),
        (
            curves(recipe, rows, "d_bar"),
            "mismatch",
            "Mean |log-ratio| between trainer and engine",
            "d-bar from token ratios, in nats, for every method.",
        ),
        (
            curves(recipe, rows, "cut"),
            "cut",
            "Share of tokens without a gradient",
            "What a method clips, masks or drops.",
        ),
    ]
    logs = [(cell.lag, out / "cells" / cell.name / "token_log") for cell in recipe.cells()]
    logs = [(lag, folder) for lag, folder in logs if folder.exists()]
    if logs:
        drawn.append(
            (
                histograms(logs),
                "age_and_mismatch",
                "Age of tokens, and mismatch at each age",
                "From the token logs. Left: share of tokens by age. Right: share of tokens with |d| above a value.",
            )
        )
    pictures = [
        embed(fig, out / "figures", file, title, guide) for fig, file, title, guide in drawn
    ]
    shown = summary.drop("typical", "typical_low", "typical_high")
    write_page(
        out / "report.html",
        Path(__file__).parent / "report.html",
        name=name,
        commits=sorted(set(rows["commit"])),
        version=rows["version"][0],
        findings=sentences,
        pictures=pictures,
        columns=shown.columns,
        table=[[_cell(x) for x in row] for row in shown.iter_rows()],
        recipe=(out / "recipe.toml").read_text(),
        minutes=rows.group_by("arm", "lag", "replay", "seed")
        .agg(pl.col("seconds").max())["seconds"]
        .sum()
        / 60,
    )


# ---------------------------------------------------------------- figures
def curves(recipe: Recipe, rows: pl.DataFrame, column: str) -> Figure:
    """A column over steps, a panel for each lag and replay."""
    panels = [(lag, replay) for replay in recipe.world.replay for lag in recipe.lags]
    across = len(recipe.lags)
    down = len(panels) // across
    fig = Figure(figsize=(4.6 * across + 1.4, 2.9 * down))
    axes = np.atleast_1d(fig.subplots(down, across, sharex=True, sharey=True)).ravel()
    colour = _colours(recipe)
    for ax, (lag, replay) in zip(axes, panels, strict=True):
        for arm in recipe.arms:
            at = rows.filter(
                (pl.col("arm") == arm.label) & (pl.col("lag") == lag) & (pl.col("replay") == replay)
            )
            wide = at.pivot("seed", index="step", values=column).sort("step")
            x = wide.drop("step").to_numpy()
            middle, low, high = np.array([mean_interval(values) for values in x]).T
            if column in ("reward", "cut"):  # shares
                low, high = low.clip(0, 1), high.clip(0, 1)
            ax.plot(wide["step"], middle, color=colour[arm.label], lw=1.3, label=arm.label)
            ax.fill_between(wide["step"], low, high, color=colour[arm.label], alpha=0.12, lw=0)
        ax.set_title(f"lag {lag}, replay {replay}")
        if column == "d_bar":
            ax.set_yscale("log")
    fig.supxlabel("optimizer step")
    fig.supylabel({"d_bar": "d-bar (nats)", "cut": "share of tokens"}.get(column, column))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return fig


def forest(recipe: Recipe, rows: pl.DataFrame) -> Figure:
    """Differences of final reward to the reference, seed by seed."""
    last = rows["step"].max() + 1
    final = rows.filter(pl.col("step") >= last - max(last // 8, 1))
    final = final.group_by("arm", "lag", "replay", "seed").agg(pl.col("reward").mean())
    panels = [(lag, replay) for replay in recipe.world.replay for lag in recipe.lags]
    fig = Figure(figsize=(3.1 * len(panels) + 1, 0.34 * len(recipe.arms) + 1.2))
    axes = np.atleast_1d(fig.subplots(1, len(panels), sharey=True))
    colour, labels = _colours(recipe), [a.label for a in recipe.arms if a.label != recipe.reference]
    for ax, (lag, replay) in zip(axes, panels, strict=True):
        at = final.filter((pl.col("lag") == lag) & (pl.col("replay") == replay))
        base = at.filter(pl.col("arm") == recipe.reference).sort("seed")["reward"].to_numpy()
        for place, label in enumerate(labels):
            x = at.filter(pl.col("arm") == label).sort("seed")["reward"].to_numpy() - base
            middle, low, high = mean_interval(x)
            ax.plot([low, high], [place, place], color=colour[label], lw=2)
            ax.plot(middle, place, "o", color=colour[label], ms=6)
            ax.plot(x, np.full(len(x), place + 0.22), ".", color=colour[label], ms=4, alpha=0.6)
        ax.axvline(0, color="0.6", lw=0.8)
        ax.set_title(f"lag {lag}, replay {replay}")
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].invert_yaxis()
    fig.supxlabel(f"final reward minus that of {recipe.reference}")
    return fig


def histograms(logs: list[tuple[str, Path]]) -> Figure:
    """Ages of tokens, and the tail of |d| by lag and age, pooled over the logs of a lag."""
    fig = Figure(figsize=(9.5, 3.4))
    left, right = fig.subplots(1, 2)
    lags = list(dict.fromkeys(lag for lag, _ in logs))
    colour = dict(zip(lags, sns.color_palette("husl", len(lags)), strict=True))
    for i, lag in enumerate(lags):
        mine = [path for found, folder in logs if found == lag for path in steps(folder)]
        held = pl.concat([tokens(path) for path in mine])
        ages = held["age"].value_counts(sort=False).sort("age")
        width = 0.8 / len(lags)
        share = ages["count"] / len(held)
        left.bar(
            ages["age"] + (i - len(lags) / 2 + 0.5) * width,
            share,
            width,
            color=colour[lag],
            label=f"lag {lag}",
        )
        d = np.sort(held["d"].to_numpy())
        right.plot(
            d, 1 - np.arange(len(d)) / len(d), color=colour[lag], label=f"lag {lag}: trainer now"
        )
        if "engine" in held.columns:
            e = np.sort(held["engine"].to_numpy())
            right.plot(
                e,
                1 - np.arange(len(e)) / len(e),
                color=colour[lag],
                ls=":",
                label=f"lag {lag}: engine alone",
            )
    left.set_xlabel("age (optimizer steps)")
    left.set_ylabel("share of tokens")
    left.legend(frameon=False)
    right.set(
        xscale="log",
        yscale="log",
        xlabel="|d| (nats)",
        ylabel="share of tokens above",
        xlim=(1e-5, None),
    )
    right.legend(frameon=False, fontsize=7)
    return fig


def tokens(path: Path) -> pl.DataFrame:
    """Age, |d| and, where known, |d| of the engine alone of the tokens of a log file."""
    rows = pl.read_parquet(path)
    names = ["loss_mask", "weight_versions", "trainer_logprobs", "rollout_logprobs"]
    before = "trainer_logprobs_before"
    names += [before] if before in rows.columns else []
    flat = rows.select("trainer_version", *names).explode(names).filter(pl.col("loss_mask") == 1)
    mu = pl.col("rollout_logprobs")
    more = [(pl.col(before) - mu).abs().alias("engine")] if before in rows.columns else []
    return flat.select(
        (pl.col("trainer_version") - pl.col("weight_versions")).alias("age"),
        (pl.col("trainer_logprobs") - mu).abs().alias("d"),
        *more,
    )


def _colours(recipe: Recipe) -> dict[str, object]:
    own = [a.label for a in recipe.arms if a.label != recipe.reference]
    return {recipe.reference: "black"} | dict(
        zip(own, sns.color_palette("husl", len(own)), strict=True)
    )


def _cell(x) -> str:
    if isinstance(x, float):
        return "" if math.isnan(x) else f"{x:.4g}"
    return "" if x is None else str(x)


def _interval(name: str, found: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
