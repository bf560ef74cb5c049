"""`scaleup compare`: every method, lag, replay and seed of a recipe on real engines, and one report.

    <out>/recipe.toml  results.parquet  runs.parquet  summary.csv  report.html  figures/  cells/<run>/

Runs share the engines and are done one after another, the reference first within each seed. The same
command goes on with what is missing; settings.json says which run a folder holds.

The score of a run is the reward of a step's batch; what is made of it, table, verdicts, collapse and
sentences, is simlab/study/verdicts.py, as in the simulator.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import polars as pl
import tomli_w
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from scaleup.compare.figures import curves, histograms
from scaleup.recipe import Recipe, RunSpec
from scaleup.run.cluster import cluster
from scaleup.run.metrics import FILES as RUN_FILES
from scaleup.run.metrics import finished, read, record
from simlab.study import findings as common
from simlab.study import verdicts
from simlab.study.files import write
from simlab.study.folder import claimed
from simlab.study.forest import level, profiles, risk
from simlab.study.page import NUMBER, PERCENT, embed, shown, write_page
from simlab.study.settings import RunError

MEANS = (
    *("first", "d_bar", "d_q50", "d_q90", "d_q99", "d_policy", "d_engine", "k3", "ess", "cut"),
    *("unlike_ppo", "flat_groups", "gate_rate", "radius_low", "radius_high", "age", "seconds"),
)

COLUMNS = {
    "first": ("first reward", NUMBER),
    "d_bar": ("mean |d|", NUMBER),
    "d_q99": ("99 % |d|", NUMBER),
    "d_max": ("largest |d|", NUMBER),
    "k3": ("k3", NUMBER),
    "ess": ("ESS", NUMBER),
    "cut": ("cut %", PERCENT),
    "unlike_ppo": ("unlike PPO %", PERCENT),
    "flat_groups": ("flat groups %", PERCENT),
    "age": ("age", NUMBER),
    "age_max": ("largest age", NUMBER),
    "skipped_steps": ("skipped", NUMBER),
    "diverged": ("diverged", NUMBER),
}
FILES = (
    *("recipe.toml", "results.parquet", "runs.parquet", "summary.csv", "report.html"),
    *("figures", "cells"),
)
DOWNLOADS = ("runs.parquet", "results.parquet", "summary.csv", "recipe.toml")


def compare(recipe: Recipe, name: str, out: Path) -> list[str]:
    """Run what is missing, write the folder, return what can be said. Raises RunError."""
    with claimed(out, FILES):
        return _compare(recipe, name, out)


def _compare(recipe: Recipe, name: str, out: Path) -> list[str]:
    cells = recipe.cells()
    missing = [cell for cell in cells if not finished(out / "cells" / cell.name, cell)]
    settings = recipe.model_dump(
        mode="json", exclude_none=True
    )  # `scaleup compare <out>/recipe.toml` is the same
    try:
        out.mkdir(parents=True, exist_ok=True)
        write(out / "recipe.toml", lambda part: part.write_text(tomli_w.dumps(settings)))
        with ExitStack() as stack:
            columns = (*Progress.get_default_columns(), TimeElapsedColumn())
            bar = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
            task = bar.add_task(f"scaleup compare {name}", total=len(cells) * recipe.training.steps)
            steps_done = (len(cells) - len(missing)) * recipe.training.steps
            bar.update(task, completed=steps_done)
            run = stack.enter_context(cluster(recipe.world)) if missing else None
            for cell in missing:
                folder = out / "cells" / cell.name
                with claimed(folder, RUN_FILES):
                    for row in run(cell, folder):
                        bar.update(task, completed=steps_done + row["step"] + 1)
                steps_done += recipe.training.steps
        rows = pl.concat(
            [table(cell, out / "cells" / cell.name) for cell in cells], how="diagonal_relaxed"
        )
        per_run = runs(recipe, rows)
        summary = summarize(recipe, per_run)
        write(out / "results.parquet", rows.write_parquet)
        write(out / "runs.parquet", per_run.write_parquet)
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


def runs(recipe: Recipe, rows: pl.DataFrame) -> pl.DataFrame:
    """One row per run: rewards, failure, collapse, means of MEANS over the steps, and the largest values.

    A run `diverged` if its last step had a gradient that was not finite.
    """
    averaged = [x for x in MEANS if x in rows.columns and x != "seconds"]
    per_run = verdicts.runs(
        rows,
        ("arm", "lag", "replay", "seed"),
        "reward",
        diverged=(~pl.col("updated") & (pl.col("step") == rows["step"].max())).any(),
        more=[
            pl.col("reward").filter(pl.col("step") == 0).mean().alias("first"),
            (~pl.col("updated")).sum().alias("skipped_steps"),
            *[pl.col(name).cast(pl.Float64).fill_nan(None).mean() for name in averaged],
            *[pl.col(name).max() for name in ("d_max", "age_max", "seconds")],
        ],
        smooth=True,
    )
    return verdicts.judged(recipe, per_run)


def summarize(recipe: Recipe, per_run: pl.DataFrame) -> pl.DataFrame:
    """One row per arm, lag and replay, from `runs`."""
    return verdicts.summarize(
        recipe,
        per_run,
        means=[x for x in MEANS if x in per_run.columns],
        largest=("d_max", "age_max"),
        totals=("skipped_steps",),
    )


def findings(recipe: Recipe, summary: pl.DataFrame) -> list[str]:
    """What the intervals support, and where rewards and mismatch were, in sentences."""
    said = common.findings(recipe, summary)
    for group in verdicts.groups(recipe):
        here = summary.filter(*[pl.col(name) == value for name, value in group.items()])
        if here["d_bar"].is_null().all() or here["final"].is_null().all():
            continue
        said.append(
            f"{common.place(group)}: mean rewards begin at {here['first'].mean():.3f} and end, by "
            f"method, at {here['final'].min():.3f} to {here['final'].max():.3f}; d_bar is "
            f"{here['d_bar'].min():.4f} to {here['d_bar'].max():.4f}, ages up to {here['age_max'].max()}."
        )
    return said


def report(recipe, name: str, out: Path, rows, per_run, summary, sentences: list[str]) -> None:
    """report.html and figures/."""
    (out / "figures").mkdir(exist_ok=True)
    drawn = [
        (
            partial(curves, recipe, rows, "reward"),
            "learning_curves",
            "Reward over optimizer steps",
            "Mean over seeds; the band is a Student-t 95 % interval.",
        ),
        (
            partial(curves, recipe, rows, "d_bar"),
            "mismatch",
            "Mean |log-ratio| between trainer and engine",
            "d-bar from token ratios, in nats, for every method.",
        ),
        (
            partial(curves, recipe, rows, "cut"),
            "cut",
            "Share of tokens that a method cuts",
            "Tokens with an advantage and no gradient: clipped, masked or dropped.",
        ),
    ]
    if len(recipe.arms) > 1:
        drawn[1:1] = [
            (
                partial(risk, recipe, summary),
                "risk",
                "Risk",
                "Share of runs that failed, with the exact 95 % interval; the grey line is the pooled reference. "
                "Filled dots have a verdict.",
            ),
            (
                partial(level, recipe, summary),
                "level",
                "Level",
                "Final reward minus that of the reference's draws where neither failed: mean (dot, thick) and "
                "median (tick, thin), with intervals that hold for the whole page. Filled marks have a verdict.",
            ),
            (
                partial(profiles, recipe, per_run, summary),
                "profiles",
                "Performance profiles",
                "Share of runs that end nearer to a reward of 1 than the value on the axis; the dotted line is the "
                "bar below which a run failed.",
            ),
        ]
    logs = [(cell.lag, out / "cells" / cell.name / "token_log") for cell in recipe.cells()]
    logs = [(lag, folder) for lag, folder in logs if folder.exists()]
    if logs:
        drawn.append(
            (
                partial(histograms, logs),
                "age_and_mismatch",
                "Age of tokens, and mismatch at each lag",
                "From the token logs. Left: share of tokens by age. Right: share of tokens with |d| above a value.",
            )
        )
    pictures = [
        embed(draw, out / "figures", file, title, guide) for draw, file, title, guide in drawn
    ]
    write_page(
        out / "report.html",
        Path(__file__).parent / "report.html",
        name=name,
        commits=sorted(set(rows["commit"])),
        version=rows["version"][0],
        findings=sentences,
        pictures=pictures,
        config=(out / "recipe.toml").read_text(),
        minutes=per_run["seconds"].sum() / 60,
        **shown(recipe, summary, COLUMNS, DOWNLOADS),
    )
