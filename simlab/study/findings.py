"""What the verdicts of a table allow to be said, in ten sentences at most; arms are never ranked beyond them."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from simlab.study.arms import cannot_act
from simlab.study.settings import Comparison
from simlab.study.verdicts import ACTED, FAIL, comparisons, groups

NAMED = 6  # arms that a sentence names
TOLD = 5  # groups that have a sentence of their own
FLAT = 0.5  # share of groups without two rewards above which a sentence says so


def findings(config: Comparison, table: pl.DataFrame) -> list[str]:
    """Sentences about runs that were not trained, risk, level, arms that never acted, placebos, collapse, and
    what the page could see."""
    said = [_bar(config, table), *untrained(config, table), _flat(config, table)]
    if len(config.arms) > 1:
        said += [*_groups(config, table), _never(config, table), seen(config, table)]
    said += [_idle(config), _placebos(config, table), _collapse(config, table)]
    return [sentence for sentence in said if sentence]


def place(group: dict[str, str]) -> str:
    """A group in words: `Lag 8, replay none`."""
    return ", ".join(f"{name} {value}" for name, value in group.items()).capitalize()


def listing(names: Iterable[str]) -> str:
    """`a, b and 3 more`."""
    names = list(names)
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    names = names[:NAMED] + more
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _bar(config: Comparison, table: pl.DataFrame) -> str:
    return (
        f"A run fails if it ends below {table['bar'][0]:.3g}, which is {FAIL} of the median of "
        f"{config.reference} at lag {config.healthy}."
    )


def _groups(config: Comparison, table: pl.DataFrame) -> list[str]:
    """A sentence for each group that has a verdict, TOLD at most, and one for the rest."""
    said, silent = [], []
    for group in groups(config):
        here = table.filter(*[pl.col(name) == value for name, value in group.items()])
        own = here.filter(~pl.col("arm").is_in([config.reference, *config.placebos]))
        draws = here.filter(pl.col("arm").is_in([config.reference, *config.placebos]))
        parts = [
            f"{config.reference} fails in {draws['failed'].sum()} of {draws['seeds'].sum()} runs"
        ]
        for verdict in ("fails less", "fails more"):
            rows = own.filter(pl.col("risk") == verdict).iter_rows(named=True)
            if names := [f"{r['arm']} ({r['failed']} of {r['seeds']})" for r in rows]:
                parts.append(f"{verdict}: {listing(names)}")
        for verdict in ("above", "below"):
            rows = own.filter(pl.col("level") == verdict).iter_rows(named=True)
            if names := [f"{r['arm']} ({r['typical']:+.3f})" for r in rows]:
                parts.append(f"{verdict} it where neither failed (median): {listing(names)}")
        if len(parts) > 1 and len(said) < TOLD:
            said.append(f"{place(group)}: {'; '.join(parts)}.")
        else:
            silent.append((place(group), len(parts) > 1))
    if names := [name for name, separated in silent if separated]:
        said.append(f"{listing(names)}: the matrix has their verdicts.")
    if names := [name for name, separated in silent if not separated]:
        said.append(
            f"{listing(names)}: no arm is separated from {config.reference} in risk or level, "
            "and none is ranked."
        )
    return said


def untrained(config: Comparison, table: pl.DataFrame) -> list[str]:
    """Which arms were not trained, and why; and which have seeds that are copies of one run."""
    said: dict[str, list[dict]] = {}
    for row in table.iter_rows(named=True):
        why = _why(row, row.get("training.lr", config.training.lr))
        if why or row["seeds_alike"]:
            said.setdefault(why, []).append(row)
    copies = said.pop("", [])
    sentences = [
        f"Nothing was trained{_where(config, rows, table)}: {why}." for why, rows in said.items()
    ]
    if copies:
        sentences.append(
            f"All seeds are one run{_where(config, copies, table)}: nothing in it depends on the seed, so no "
            "interval and no verdict means anything there."
        )
    return sentences


def of_run(rows: pl.DataFrame, lr: float) -> str:
    """The same of the logged steps of a single run: a sentence, empty where it was trained."""
    row = rows.select(**ACTED, flat_groups=pl.col("flat_groups").mean()).row(0, named=True)
    why = _why(row, lr)
    return why and f"Nothing was trained: {why}."


def _why(row: dict, lr: object) -> str:
    """Why a run or all runs of an arm were not trained, from their shares of ACTED; empty if they were."""
    if row["empty"] == 1:
        return "all masked: no data, for no logged batch had a token"
    if lr == 0:
        return "the learning rate is 0, so that every run ends with the weights it began with"
    if row["still"] == 1 and row["flat_groups"] == 1:
        return (
            "in every logged batch all answers to a prompt got one reward (a group of one answer always "
            "does), so that every advantage was 0"
        )
    return "the gradient was 0 at every logged step" if row["still"] == 1 else ""


def _where(config: Comparison, rows: list[dict], table: pl.DataFrame) -> str:
    """` in ppo at lag 8 and sat at lag 8`, or nothing where the rows are the whole table."""
    return "" if len(rows) == len(table) else f" in {listing(_cell(config, row) for row in rows)}"


def _flat(config: Comparison, table: pl.DataFrame) -> str:
    """Where most groups of a reference that mostly answers wrong have one reward: a small batch in truth."""
    mine = table.filter(pl.col("arm") == config.reference, pl.col("still") < 1)
    flat = mine.filter(pl.col("flat_groups") > FLAT, pl.col("final") < FLAT)
    if not len(flat):
        return ""
    cells = [
        f"{100 * r['flat_groups']:.0f} % at {_within(config, r)}"
        for r in flat.iter_rows(named=True)
    ]
    return (
        f"Most groups of {config.reference} taught nothing, because all their answers got one reward: "
        f"{listing(cells)}. With a success rate p a group of G answers does with probability "
        "p^G + (1 - p)^G: more answers a prompt help."
    )


def _never(config: Comparison, table: pl.DataFrame) -> str:
    """Arms whose runs are the reference's own, where there was something to act on."""
    same = table.filter(pl.col("same_as_reference"), pl.col("still") < 1)
    if not len(same):
        return ""
    cells = [_cell(config, row) for row in same.iter_rows(named=True)]
    return f"Identical to {config.reference}, because the rule never acted: {listing(cells)}."


def _idle(config: Comparison) -> str:
    said = filter(None, (cannot_act(arm, config.training) for arm in config.arms))
    return " ".join(f"{sentence}." for sentence in said)


def seen(config: Comparison, table: pl.DataFrame) -> str:
    """What so many seeds and comparisons see four times in five; reports/power has the rates behind it."""
    row = table.row(0, named=True)
    n, failures, shift = row["seeds"], row["failures_seen"], row["shift_seen"]
    risk = (
        f"no failure in {n} runs against {failures} of {n}"
        if failures is not None
        else "no difference in failures at all"
    )
    level = f"a shift of {shift:.2g}" if shift == shift else "no shift"
    return (
        f"With {n} seeds and {comparisons(config)} comparisons this page sees, four times in five: "
        f"{level} where runs live, and {risk}; less than that may be there unseen."
    )


def _placebos(config: Comparison, table: pl.DataFrame) -> str:
    placebo = table.filter(pl.col("arm").is_in(config.placebos))
    if not len(placebo):
        return "" if len(config.arms) == 1 else f"{config.reference} has no other draws to pool."
    separated = pl.col("risk").str.starts_with("fails") | pl.col("level").is_in(["above", "below"])
    off = len(placebo.filter(separated))
    return (
        f"Placebos: of {len(placebo)} comparisons of {config.reference} with its own other draws, "
        f"{off or 'none'} {'is' if off < 2 else 'are'} separated."
    )


def _collapse(config: Comparison, table: pl.DataFrame) -> str:
    total, diverged = int(table["collapsed"].sum()), int(table["diverged"].sum())
    words = f"{total} of {int(table['seeds'].sum())} runs collapsed"
    if total:
        cells = [
            f"{_cell(config, r)}: {r['collapsed']}"
            for r in table.filter(pl.col("collapsed") > 0).iter_rows(named=True)
        ]
        words += f" ({listing(cells)})"
    skipped = int(table["skipped_steps"].sum())
    note = f"; {skipped} steps had a non-finite gradient, which was set to 0" if skipped else ""
    return f"{words}; {diverged} diverged to non-finite weights{note}."


def _cell(config: Comparison, row: dict) -> str:
    return f"{row['arm']} at {_within(config, row)}"


def _within(config: Comparison, row: dict) -> str:
    return ", ".join(f"{name} {row[name]}" for name in config.groups)
