"""`scaleup compare`: every method, lag, replay and seed of a recipe on real engines, and one report.

    <out>/recipe.toml  results.parquet  summary.csv  report.html  figures/  cells/<run>/

Runs share the engines and are done one after another, the reference first within each seed. The same
command goes on with what is missing; settings.json says which run a folder holds.

final       mean reward over the last eighth of the steps
difference  final minus the reference's final, seed by seed, at the same lag and replay
interval    Student-t over seeds, 95 %. With few seeds it assumes that they are near Gaussian
verdict     "above" or "below" needs the exact interval of the median difference that holds for all
            comparisons of the table at once, and lies outside the placebo spread: simlab.summary. Below
            about 10 seeds it is infinite, and nothing is ranked
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

import polars as pl
import tomli_w
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from scaleup.figures import curves, forest, histograms
from scaleup.host import cluster
from scaleup.metrics import finished, read, record
from scaleup.recipe import Recipe, RunSpec
from simlab.config import RunError
from simlab.page import embed, write, write_page
from simlab.summary import paired, placebo_sentence, verdicts

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
    missing = [cell for cell in cells if not finished(out / "cells" / cell.name, cell)]
    held = recipe.model_dump(
        mode="json", exclude_none=True
    )  # `scaleup compare <out>/recipe.toml` is the same
    try:
        out.mkdir(parents=True, exist_ok=True)
        write(out / "recipe.toml", lambda part: part.write_text(tomli_w.dumps(held)))
        with ExitStack() as stack:
            shown = (*Progress.get_default_columns(), TimeElapsedColumn())
            bar = stack.enter_context(Progress(*shown, console=Console(stderr=True)))
            task = bar.add_task(f"scaleup compare {name}", total=len(cells) * recipe.training.steps)
            at = (len(cells) - len(missing)) * recipe.training.steps
            bar.update(task, completed=at)
            run = stack.enter_context(cluster(recipe.world)) if missing else None
            for cell in missing:
                folder = out / "cells" / cell.name
                for row in run(cell, folder):
                    bar.update(task, completed=at + row["step"] + 1)
                at += recipe.training.steps
        rows = pl.concat(
            [table(cell, out / "cells" / cell.name) for cell in cells], how="diagonal_relaxed"
        )
        per_run = runs(rows)
        summary = summarize(recipe, per_run)
        write(out / "results.parquet", rows.write_parquet)
        write(out / "summary.csv", summary.write_csv)
        sentences = findings(recipe, summary)
        report(recipe, name, out, rows, per_run, summary, sentences)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror or error})") from error
    return sentences


def table(cell: RunSpec, folder: Path) -> pl.DataFrame:
    """Rows of a finished run with what they belong to."""
    made = record(folder, cell)
    constant = {
        "arm": cell.arm.label,
        "method": cell.arm.name,
        "arguments": str(dict(cell.arm.arguments)),
        "lag": cell.lag,
        "replay": cell.replay,
        "seed": cell.seed,
        "commit": " ".join(made["commits"]),
        "version": made["version"],
    }
    rows = pl.DataFrame(read(folder / "metrics.jsonl"), infer_schema_length=None)
    return rows.select(*[pl.lit(v).alias(k) for k, v in constant.items()], pl.all())


def runs(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per run: rewards, the means of MEANS and the largest values."""
    last = rows["step"].max() + 1
    tail = pl.col("step") >= last - max(last // 8, 1)
    names = [x for x in MEANS if x in rows.columns]
    return rows.group_by("arm", "method", "lag", "replay", "seed", maintain_order=True).agg(
        pl.col("reward").filter(tail).mean().alias("final"),
        pl.col("reward").filter(pl.col("step") == 0).mean().alias("first"),
        pl.col("reward").max().alias("peak"),
        (~pl.col("updated")).sum().alias("skipped"),
        *[pl.col(x).filter(pl.col("step") >= last * 3 // 4).mean() for x in names],
        pl.col("d_max").max(),
        pl.col("age_max").max(),
        pl.col("seconds").max(),
    )


def summarize(recipe: Recipe, per_run: pl.DataFrame) -> pl.DataFrame:
    """One row per arm, lag and replay, from `runs`."""
    level = 1 - 0.05 / max((len(recipe.arms) - 1) * len(recipe.lags) * len(recipe.world.replay), 1)
    names = [x for x in (*MEANS, "seconds") if x in per_run.columns]
    found = []
    for lag in recipe.lags:
        for replay in recipe.world.replay:
            at = per_run.filter((pl.col("lag") == lag) & (pl.col("replay") == replay)).sort("seed")
            of = {arm.label: at.filter(pl.col("arm") == arm.label) for arm in recipe.arms}
            reference = of[recipe.reference]["final"].to_numpy()
            for arm in recipe.arms:
                mine = of[arm.label]
                final = mine["final"].to_numpy()
                row = {"arm": arm.label, "method": arm.name, "lag": lag, "replay": replay}
                row |= {"seeds": len(final), "first": mine["first"].mean()}
                row |= paired(final, reference, level)
                row |= {x: mine[x].mean() for x in names}
                row |= {x: mine[x].max() for x in ("d_max", "age_max", "skipped")}
                found.append(row)
    return verdicts(recipe, pl.DataFrame(found, infer_schema_length=None), "lag", "replay")


def findings(recipe: Recipe, summary: pl.DataFrame) -> list[str]:
    """What the intervals support, in sentences."""
    n, said = int(summary["seeds"].min()), []
    others = summary.filter(~pl.col("arm").is_in([recipe.reference, *recipe.placebos]))
    for verdict in ("above", "below"):
        for row in summary.filter(pl.col("verdict") == verdict).iter_rows(named=True):
            said.append(
                f"{row['arm']} at lag {row['lag']}, replay {row['replay']}: {verdict} {recipe.reference}, "
                f"by {row['diff']:+.3f} [{row['diff_low']:+.3f}, {row['diff_high']:+.3f}]."
            )
    if len(others) and not said:
        said.append(
            f"With {n} seeds no method is separated from {recipe.reference} by an interval that holds "
            "for the whole table; none is ranked."
        )
    if total := len(others):
        alone = others.filter((pl.col("diff_low") > 0) | (pl.col("diff_high") < 0))
        said.append(
            f"{len(alone)} of {total} differences have a Student-t interval of their own (95 %, not "
            f"corrected for {total} comparisons, {n} seeds) without 0; chance alone gives about {0.05 * total:.2g}."
        )
    if sentence := placebo_sentence(recipe, summary):
        said.append(sentence)
    for lag in recipe.lags:
        for replay in recipe.world.replay:
            at = summary.filter((pl.col("lag") == lag) & (pl.col("replay") == replay))
            if at["d_bar"].is_null().all() or at["final"].is_null().all():
                continue
            said.append(
                f"Lag {lag}, replay {replay}: mean rewards begin at {at['first'].mean():.3f} and end, by "
                f"method, at {at['final'].min():.3f} to {at['final'].max():.3f}; d_bar is "
                f"{at['d_bar'].min():.4f} to {at['d_bar'].max():.4f}, ages up to {at['age_max'].max()}."
            )
    return said


def report(recipe, name: str, out: Path, rows, per_run, summary, sentences: list[str]) -> None:
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
            curves(recipe, rows, "d_bar"),
            "mismatch",
            "Mean |log-ratio| between trainer and engine",
            "d-bar from token ratios, in nats, for every method.",
        ),
        (
            curves(recipe, rows, "cut"),
            "cut",
            "Share of tokens that a method cuts",
            "Tokens with an advantage and no gradient: clipped, masked or dropped.",
        ),
    ]
    if len(recipe.arms) > 1:
        differences = (
            forest(recipe, per_run, summary),
            "final_difference",
            "Final reward against the reference",
            "Paired differences, one dot a seed; bars are Student-t 95 % intervals over seeds, the grey band "
            "is the placebo spread.",
        )
        drawn.insert(1, differences)
    logs = [(cell.lag, out / "cells" / cell.name / "token_log") for cell in recipe.cells()]
    logs = [(lag, folder) for lag, folder in logs if folder.exists()]
    if logs:
        drawn.append(
            (
                histograms(logs),
                "age_and_mismatch",
                "Age of tokens, and mismatch at each lag",
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
        config=(out / "recipe.toml").read_text(),
        minutes=per_run["seconds"].sum() / 60,
    )


def _cell(x) -> str:
    if isinstance(x, float):
        return "" if math.isnan(x) else f"{x:.4g}"
    return "" if x is None else str(x)
