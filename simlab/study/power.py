"""How often the rules of verdicts are wrong, and what they see: measured on runs of the reference itself.

    python -m simlab.study.power reports/power/runs.parquet --out reports/power

Takes runs.parquet of a comparison in which every arm is a draw of the reference (at lag 0 too). A page
of 11 arms and 4 lags is made of them: seeds are drawn with replacement, within a seed the draws change
places, three are the pooled reference, and the arms get the others. In a page without effects every
verdict is false. In a page with effects each arm gets one, at one lag. Writes power.parquet and README.md.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from simlab.study import rules
from simlab.study.files import write
from simlab.study.intervals import median_interval
from simlab.study.verdicts import FAIL

SEEDS = (8, 12, 24, 48, 96)
LAGS = ("1", "4", "6", "8")
DRAWS = 3
ARMS = 11
FLIPS = 999
# what happens to an arm, how much of it, at which lag
EFFECTS = (
    ("shift", 0.001, "1"), ("shift", 0.003, "1"), ("shift", 0.01, "4"), ("shift", 0.03, "6"),
    ("shift", 0.1, "8"), ("rescue", 1.0, "4"), ("rescue", 1.0, "6"), ("rescue", 1.0, "8"),
    ("rescue", 0.5, "8"), ("break", 0.25, "1"), ("break", 0.5, "1"),
)  # fmt: skip


def page(finals: np.ndarray, seeds: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Arms `[S, L, ARMS + 2]`, the last two draws of the reference, and their pools `[S, L, ARMS + 2, DRAWS]`.

    `finals` are [all seeds, L, draws]. Every arm is a draw of the reference that is not in its pool.
    """
    chosen = finals[rng.integers(0, len(finals), seeds)]
    order = rng.permuted(np.broadcast_to(np.arange(finals.shape[2]), chosen.shape), axis=-1)
    chosen = np.take_along_axis(chosen, order, -1)
    picks = rng.integers(DRAWS, finals.shape[2], (*chosen.shape[:2], ARMS))
    arms = np.concatenate([np.take_along_axis(chosen, picks, -1), chosen[..., 1:DRAWS]], -1)
    pools = np.repeat(chosen[..., None, :DRAWS], ARMS + DRAWS - 1, -2)
    for draw in range(1, DRAWS):
        pools[..., ARMS + draw - 1, draw] = np.nan
    return arms, pools


def affect(arms: np.ndarray, bar: float, rng: np.random.Generator) -> np.ndarray:
    """The same arms, each with its effect at its lag."""
    arms = arms.copy()
    for i, (kind, size, lag) in enumerate(EFFECTS):
        final = arms[:, LAGS.index(lag), i]
        failed, lot = final < bar, rng.random(len(final)) < size
        if kind == "shift":
            final[~failed] += size
        elif kind == "rescue" and (~failed).any():
            final[failed & lot] = rng.choice(final[~failed], (failed & lot).sum())
        elif kind == "break":
            final[lot] = 0.3
    return arms


def earlier(arms: np.ndarray, pools: np.ndarray) -> np.ndarray:
    """The rule in use before, `[C]`: an exact median interval outside of the placebo spread, one draw as reference."""
    difference = arms - pools[..., 0]
    spread = np.abs(np.median(difference[..., ARMS:], 0)).max(-1)
    level = 1 - rules.ALPHA / difference[0].size
    found = [
        [median_interval(difference[:, i, j], level)[1:] for j in range(difference.shape[2])]
        for i in range(len(LAGS))
    ]
    low, high = np.moveaxis(np.array(found), -1, 0)
    return (1.0 * (low > spread[:, None]) - (high < -spread[:, None])).ravel()


def judge(arms: np.ndarray, pools: np.ndarray, bar: float, rng: np.random.Generator):
    """Sides of risk (-1: fails less), of level and of the earlier rule, each `[L, ARMS + 2]`."""
    S, shape = len(arms), arms.shape[1:]
    flat, pool = arms.reshape(S, -1), pools.reshape(S, -1, DRAWS)
    answers = rules.answer(flat, pool, bar, rng, FLIPS)
    more = np.sign((flat < bar).mean(0) - answers.fail_reference)
    risk = np.where(answers.risk_p <= rules.ALPHA, more, 0)
    return tuple(x.reshape(shape) for x in (risk, answers.side, earlier(arms, pools)))


def measure(runs: pl.DataFrame, trials: int) -> pl.DataFrame:
    """Rates of verdicts: rows of kind "none" hold the share of pages with a false one."""
    bar = FAIL * float(runs.filter(pl.col("lag") == "0")["final"].median())  # pyright: ignore[reportArgumentType]
    tables = [
        runs.filter(pl.col("lag") == lag).pivot("arm", index="seed", values="final").sort("seed")
        for lag in LAGS
    ]
    finals = np.stack([table.drop("seed").to_numpy() for table in tables], 1)
    base: dict[str, float] = dict(zip(LAGS, (finals < bar).mean((0, 2)), strict=True))
    rows = []
    for seeds in SEEDS:
        rng = np.random.default_rng(seeds)
        false, right, wrong = np.zeros(3), np.zeros((len(EFFECTS), 3)), np.zeros(len(EFFECTS))
        for _ in range(trials):
            arms, pools = page(finals, seeds, rng)
            false += [(side != 0).any() for side in judge(arms, pools, bar, rng)]
            sides = judge(affect(arms, bar, rng), pools, bar, rng)
            for i, (kind, _, lag) in enumerate(EFFECTS):
                risk, level, before = (side[LAGS.index(lag), i] for side in sides)
                good = {"shift": 0, "rescue": -1, "break": 1}[kind]
                up = {"shift": 1, "rescue": 1, "break": -1}[kind]
                right[i] += [bool(good) and risk == good, level == up, before == up]
                wrong[i] += (bool(good) and risk == -good) or level == -up
        names = ("risk", "level", "earlier")
        rows.append({"seeds": seeds, "kind": "none", "size": 0.0, "lag": "all", "base": None, "trials": trials}
                    | dict(zip(names, false / trials, strict=True)) | {"wrong": None})  # fmt: skip
        for i, (kind, size, lag) in enumerate(EFFECTS):
            rows.append({"seeds": seeds, "kind": kind, "size": size, "lag": lag, "base": float(base[lag]), "trials": trials}
                        | dict(zip(names, right[i] / trials, strict=True)) | {"wrong": wrong[i] / trials})  # fmt: skip
    return pl.DataFrame(rows)


def text(table: pl.DataFrame, runs: pl.DataFrame) -> str:
    """README.md of the report."""
    many = (ARMS + DRAWS - 1) * len(LAGS)
    lines = [
        "# What the verdicts see, and how often they are wrong",
        "",
        "```sh",
        *runs["command"].unique().sort(),
        "python -m simlab.study.power reports/power/runs.parquet --out reports/power",
        "```",
        "",
        f"Written by the second command from {len(runs):,} runs of PPO alone (runs.parquet, {runs['seed'].n_unique()} seeds, "
        f"{runs['arm'].n_unique()} draws; final J of each; commit {runs['commit'][0]}), which the first command made. A page has {ARMS} arms and "
        f"{DRAWS} draws of the reference at {len(LAGS)} lags: {many} comparisons. simlab/study/power.py says how pages are made of runs; "
        "power.parquet holds the rates.",
        "",
        "## False verdicts",
        "",
        "Share of pages with at least one verdict although every arm is PPO. Both questions promise 5 % at most. "
        '"Earlier" is the rule before: the exact interval of the median outside of the placebo spread, against one draw.',
        "",
        "| seeds | risk | level | earlier |",
        "| --- | --- | --- | --- |",
    ]
    share = lambda x: f"{100 * x:.0f} %"  # noqa: E731
    for row in table.filter(pl.col("kind") == "none").iter_rows(named=True):
        lines.append(
            f"| {row['seeds']} | {share(row['risk'])} | {share(row['level'])} | {share(row['earlier'])} |"
        )
    lines += [
        "",
        "## Power",
        "",
        "Share of pages with the right verdict on one arm: on its level for a shift, on its risk for a rescue (every failed run, or half of "
        "them, ends like a run that lived, and nothing else changes) and for a break (a share of all runs ends at 0.3). "
        "In brackets the earlier rule.",
        "",
        "| effect | lag | PPO fails | " + " | ".join(f"{n} seeds" for n in SEEDS) + " |",
        "| --- " * (3 + len(SEEDS)) + "|",
    ]
    for kind, size, lag in EFFECTS:
        mine = table.filter(
            (pl.col("kind") == kind) & (pl.col("size") == size) & (pl.col("lag") == lag)
        ).sort("seeds")
        cells = [
            f"{share(r['level' if kind == 'shift' else 'risk'])} ({share(r['earlier'])})"
            for r in mine.iter_rows(named=True)
        ]
        word = f"{kind} {size:g}" if kind == "shift" else f"{kind} {share(size)}"
        lines.append(f"| {word} | {lag} | {share(mine['base'][0])} | {' | '.join(cells)} |")
    lines += [
        "",
        f"The largest share of verdicts to the wrong side, over all effects and seeds, is {share(table['wrong'].max())}.",
        "",
        "What this does not show: one world and one method behind all runs; several effects stand on one page, which helps Holm's "
        f"correction a little; seeds of a page are drawn with replacement from {runs['seed'].n_unique()}.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def main(words: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=300)
    options = parser.parse_args(words)
    runs = pl.read_parquet(options.runs)
    table = measure(runs, options.trials)
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "power.parquet", table.write_parquet)
    write(options.out / "README.md", partial(Path.write_text, data=text(table, runs)))


if __name__ == "__main__":
    main(sys.argv[1:])
