"""report.html: one self-contained page that opens offline, and the figures beside it."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from simlab.config import Config
from simlab.figures import FIGURES
from simlab.page import embed, write_page
from simlab.summary import comparisons, placebo_sentence

GUIDES = {
    "learning_curves": (
        "Learning curves",
        "Exact expected reward J of the trained policy (no sampling error), mean over seeds, with the "
        "95 % interval of the mean at each step. Black is the reference, grey are placebo arms: the "
        "distance between black and grey is what chance alone does here.",
    ),
    "final_difference": (
        "Final J against the reference, seed by seed",
        "Final J of the arm minus final J of the reference on the same worlds, first weights and sampling "
        "draws (placebo-draws: other draws). Dot and thick line: mean over seeds, 95 % Student-t interval. "
        "Tick and thin line: median over seeds, exact interval that holds for all arms and lags of this "
        "page at once. The grey band is the placebo spread. Only a thin line that lies wholly outside the "
        "band is called a difference; where the seeds are too few for such an interval there is no line. "
        "One collapsed seed moves the mean and not the median: a dot far from its tick says so.",
    ),
    "final_level": (
        "Final J",
        "Mean J over the last eighth of the logged steps, 95 % interval over seeds. These intervals hold "
        "the spread between worlds, which the paired figure above removes. J after a fixed number of steps "
        "mixes speed and stability; the curves tell them apart. Arms stand in the order of the "
        "configuration, never of their result.",
    ),
    "collapse": (
        "Probability of collapse",
        "Share of seeds whose final J is below 0.7 of the run's own peak, with the exact "
        "(Clopper-Pearson) 95 % interval. With 24 seeds, none of 24 still allows a probability of 14 %.",
    ),
    "mismatch_tail": (
        "The tail of |d|",
        "d = log pi - log mu of the sampled tokens, reference arm, averaged over logged steps. Left: "
        "quantiles and the largest value seen. Right: mean size of the policy part (what training moved "
        "since the tokens were sampled) and of the implementation part (engine against trainer at equal "
        "weights). The parts need not add up: they may have opposite signs.",
    ),
    "clip_share": (
        "Effective clip share",
        "Left: tokens with an advantage and no gradient. Right: tokens that the method treats unlike PPO "
        "at .2/.2, i.e. the share on which it acts at all. An arm whose right-hand number is near zero "
        "cannot differ from PPO by its rule. Weights and caps (pg, TIS, DPPO) change sizes, which these "
        "numbers do not count.",
    ),
    "bound": (
        "The improvement bound against the truth",
        "J(pi) - J(mu) is at least L' - penalty. Blue: the size of the exact remainder that a penalty has to cover. "
        "Orange and red: the two penalties of SAT (34) and (33), with xi = 1/2. Median and quartiles over "
        "seeds, reference arm. Above the dashed line (the range of J) a bound says nothing; the share of "
        "such steps stands in each title. Below it only the max form can promise an improvement: L' never "
        "exceeds half of the average form's penalty (theory, claim 3).",
    ),
}
COLUMNS = {
    "arm": "arm",
    "lag": "lag",
    "seeds": "seeds",
    "final": "final J",
    "diff": "minus reference (mean)",
    "typical": "minus reference (median)",
    "verdict": "verdict",
    "collapse": "P(collapse)",
    "peak": "peak J",
    "d_bar": "mean |d|",
    "d_q99": "99 % |d|",
    "cut": "cut %",
    "unlike_ppo": "unlike PPO %",
    "flat_groups": "flat groups %",
    "ess": "ESS",
    "S": "S = sum TV",
    "vacuous_mean": "vacuous %",
    "diverged": "diverged",
}


def write_report(
    out: Path,
    config: Config,
    question: str,
    experiment: str,
    changed: dict[str, object],
    rows: pl.DataFrame,
    table: pl.DataFrame,
) -> None:
    """Figures as PNG and SVG under out/figures, and out/report.html. Raises OSError if unwritable."""
    (out / "figures").mkdir(exist_ok=True)
    pictures = [
        embed(draw(config, rows, table), out / "figures", name, *GUIDES[name])
        for name, draw in FIGURES.items()
    ]
    write_page(
        out / "report.html",
        "report.html",
        question=question,
        experiment=experiment,
        changed=", ".join(f"{name} = {value}" for name, value in changed.items()),
        provenance=rows.row(0, named=True),
        findings=findings(config, table),
        pictures=pictures,
        columns=COLUMNS.values(),
        table=[_cells(row) for row in table.iter_rows(named=True)],
        config=(out / "config.toml").read_text(),
    )


def findings(config: Config, table: pl.DataFrame) -> list[str]:
    """What the intervals allow to be said, in plain sentences; overlapping arms are never ranked."""
    said = (
        [_lag_sentence(config, table, lag) for lag in config.lags] if len(config.arms) > 1 else []
    )
    if said and not table["typical_low"].is_finite().any():
        said.append(
            f"{config.seeds} seeds are too few for any verdict on {comparisons(config)} comparisons at once."
        )
    for lag in config.lags:
        same = table.filter(pl.col("same_as_reference") & (pl.col("lag") == lag))["arm"].to_list()
        if same:
            words = f"gave the very runs of {config.reference}: what tells them apart never acted"
            said.append(f"Lag {lag}: {', '.join(same)} {words}.")
    said += [
        placebo_sentence(config, table),
        _collapse_sentence(table),
        _bound_sentence(config, table),
    ]
    return [sentence for sentence in said if sentence]


def _lag_sentence(config: Config, table: pl.DataFrame, lag: str) -> str:
    at = table.filter((pl.col("lag") == lag) & ~pl.col("arm").is_in(config.placebos))
    parts = []
    for verdict in ("above", "below"):
        names = [
            f"{r['arm']} (median {r['typical']:+.3f}, exactly {r['typical_low']:+.3f} to "
            f"{r['typical_high']:+.3f}; mean {r['diff']:+.3f})"
            for r in at.filter(pl.col("verdict") == verdict).iter_rows(named=True)
        ]
        if names:
            parts.append(f"{verdict} {config.reference} on the typical seed: {', '.join(names)}")
    same = at.filter(pl.col("verdict") == "not separated")["arm"].to_list()
    if same:
        parts.append(f"not separated from {config.reference}, and not ranked: {', '.join(same)}")
    spread = table.filter(pl.col("lag") == lag)["placebo_spread"][0]
    note = f"The placebo spread is {spread:.4f}." if config.placebos else "There is no placebo arm."
    return " ".join([f"Lag {lag}:", *(["; ".join(parts) + "."] if parts else []), note])


def _collapse_sentence(table: pl.DataFrame) -> str:
    total, diverged = int(table["collapsed"].sum()), int(table["diverged"].sum())
    words = f"{total} of {int(table['seeds'].sum())} runs collapsed"
    if total:
        top = table.filter(pl.col("collapsed") > 0)
        cells = [
            f"{r['arm']} at lag {r['lag']}: {r['collapsed']}" for r in top.iter_rows(named=True)
        ]
        words += f" ({', '.join(cells)})"
    skipped = int(table["skipped_steps"].sum())
    note = f" {skipped} steps had a non-finite gradient, which was set to 0." if skipped else ""
    return f"{words}; {diverged} diverged to non-finite weights.{note}"


def _bound_sentence(config: Config, table: pl.DataFrame) -> str:
    mine = table.filter(pl.col("arm") == config.reference)
    shares = [
        f"{100 * r['vacuous_mean']:.0f} % / {100 * r['vacuous_max']:.0f} % at lag {r['lag']}"
        for r in mine.drop_nulls("vacuous_mean").iter_rows(named=True)
    ]
    broken = int(table["bound_violations"].sum())
    return (
        f"The improvement bound (average / max form) was vacuous on {', '.join(shares)} of the logged "
        f"steps of {config.reference}, and was violated on {broken} of all logged steps."
        + (
            " Violations are possible only where the engine truncates its support."
            if broken
            else ""
        )
    )


def _cells(row: dict) -> list[str]:
    def interval(name: str) -> str:
        return f"{row[name]:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"

    shown = {name: interval(name) for name in ("final", "diff", "typical", "collapse")}

    def number(x: float | None, digits: int) -> str:
        return "-" if x is None else f"{x:.{digits}f}"  # a run that was never finite

    for name in ("cut", "unlike_ppo", "flat_groups", "vacuous_mean"):
        shown[name] = number(None if row[name] is None else 100 * row[name], 1)
    for name in ("peak", "d_bar", "d_q99", "ess", "S"):
        shown[name] = number(row[name], 3)
    return [shown.get(name, str(row[name])) for name in COLUMNS]
