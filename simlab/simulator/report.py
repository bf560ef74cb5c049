"""report.html: one self-contained page that opens offline, and the figures beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import polars as pl

from simlab.simulator import regimes
from simlab.simulator.config import Config
from simlab.simulator.figures import FIGURES
from simlab.simulator.summary import findings
from simlab.study.files import write
from simlab.study.page import NUMBER, PERCENT, embed, shown, write_page

GUIDES = {
    "learning_curves": (
        "Learning curves",
        "Distance of the exact expected reward J from 1, on a log axis: median over seeds, band from the first to the "
        "third quartile. Black is the reference, grey are its other draws: the distance between black and "
        "grey is what chance alone does here.",
    ),
    "risk": (
        "Risk",
        "Share of runs that failed, with the exact (Clopper-Pearson) 95 % interval; the grey line is the pooled "
        "reference. Filled dots have a verdict: the exact test on paired seeds, corrected for the page. Arms "
        "stand in the order of the settings, never of their result.",
    ),
    "level": (
        "Level",
        "Final J of the arm minus that of the reference, on the seeds where neither failed. Dot and thick line: "
        "mean difference to one draw, with an interval by sign flips. Tick and thin line: median difference to a median of the draws, with its exact interval. Both "
        "hold for all arms and lags of the page at once, and one that excludes 0 is a verdict (filled). The "
        "mean of few lucky survivors is not comparable with one of many: read it with the risk.",
    ),
    "profiles": (
        "Performance profiles",
        "Share of runs that end nearer to J = 1 than the value on the axis; the dotted line is the bar below which a "
        "run failed. A step far to the right is a group of seeds that went wrong together. At most six arms a "
        "panel, those with a verdict first.",
    ),
    "mismatch_tail": (
        "The tail of |d|",
        "d = log pi - log mu of the sampled tokens, reference arm, averaged over logged steps. Left: "
        "quantiles and the largest value seen. Right: mean size of the policy part (what training moved "
        "since the tokens were sampled) and of the implementation part (engine against trainer at equal "
        "weights). The parts need not add up: they may have opposite signs. Dashed: PPO's radius. Grey: the mean of the SAT paper's runs, 0.009 at lag 1 to 0.03 at lag 8.",
    ),
    "clip_share": (
        "Where a rule acts",
        "Left: tokens with an advantage and no gradient. Middle: tokens that the method treats unlike PPO "
        "at 0.2/0.2. Right: logged batches without one such token, in which a rule that only cuts cannot matter. Weights "
        "and caps (pg, TIS, DPPO) change sizes, which these numbers do not count.",
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
    "d_bar": ("mean |d|", NUMBER),
    "d_q99": ("99 % |d|", NUMBER),
    "cut": ("cut %", PERCENT),
    "unlike_ppo": ("unlike PPO %", PERCENT),
    "flat_groups": ("flat groups %", PERCENT),
    "ess": ("ESS", NUMBER),
    "tv_sum": ("sum of TV", NUMBER),
    "vacuous_mean": ("vacuous %", PERCENT),
    "diverged": ("diverged", NUMBER),
}
DOWNLOADS = ("runs.parquet", "results.parquet", "summary.csv", "config.toml")


def sentences(config: Config, ranges: pl.DataFrame | None, table: pl.DataFrame) -> list[str]:
    """What a page says first; `ranges` are the `regimes` of a sweep."""
    if ranges is None or not regimes.ordered(config):
        return findings(config, table)
    return regimes.findings(config, ranges, table)


def write_report(
    out: Path,
    config: Config,
    question: str,
    experiment: str,
    changed: dict[str, object],
    rows: pl.DataFrame,
    runs: pl.DataFrame,
    table: pl.DataFrame,
) -> None:
    """Figures as PNG, SVG and PDF under out/figures, and out/report.html; of a sweep its map, and map.csv.

    A sweep over words (names of dtypes, say) has no ranges: its page is a comparison with more groups.

    Raises OSError if unwritable.
    """
    (out / "figures").mkdir(exist_ok=True)
    page = shown(config, table, COLUMNS, DOWNLOADS)
    if config.axes:
        ranges = regimes.regimes(config, runs)
        write(out / "map.csv", ranges.write_csv)
        said = sentences(config, ranges, table)
        pictures = [
            embed(
                partial(draw, config, runs, ranges), out / "figures", name, *guide, " ".join(said)
            )
            for name, draw, guide in regimes.figures(config)
        ]
        page |= {"downloads": ["map.csv", *DOWNLOADS]} | (
            {"matrix": None} if regimes.ordered(config) else {}
        )
    else:
        said = sentences(config, None, table)
        about = f"{said[0]} {' '.join(x for x in said if x.startswith('Lag'))}"
        alts = dict.fromkeys(("learning_curves", "risk", "level", "profiles"), about)
        pictures = [
            embed(
                partial(draw, config, rows, runs, table),
                out / "figures",
                name,
                *GUIDES[name],
                alts.get(name),
            )
            for name, draw in FIGURES.items()
        ]
    write_page(
        out / "report.html",
        Path(__file__).parent / "report.html",
        question=question,
        experiment=experiment,
        changed=", ".join(f"{name} = {value}" for name, value in changed.items()),
        provenance=rows.row(0, named=True),
        findings=said,
        pictures=pictures,
        config=(out / "config.toml").read_text(),
        **page,
    )
