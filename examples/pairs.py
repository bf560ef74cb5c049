"""Other pairs of a finished run than arm against reference, by the rules of its page.

    python examples/pairs.py RUN ppo-dual:dppo gspo:dppo

prints, for every pair and group, how many runs of each fail, the median difference on the seeds where neither does, and
the verdicts. For each question one false verdict or more, over all that is asked at once, is an event of 5 %: choose the
pairs before looking.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import polars as pl

from simlab.study.rules import ALPHA, answer


def pairs(folder: Path, asked: list[str]) -> pl.DataFrame:
    """A row for each pair `arm:other` and group of a run folder that has runs.parquet."""
    runs = pl.read_parquet(folder / "runs.parquet")
    groups = runs.columns[1 : runs.columns.index("seed")]
    rows, mine, theirs = [], [], []
    for pair in asked:
        arm, other = pair.split(":")
        here = runs.filter(pl.col("arm") == arm)
        both = here.join(
            runs.filter(pl.col("arm") == other),
            on=[*groups, "seed"],
            suffix="_other",
            maintain_order="left",
        )
        for group, part in both.group_by(groups, maintain_order=True):
            part = part.sort("seed")
            failed = part["failed"].sum(), part["failed_other"].sum()
            rows.append(
                {
                    "arm": arm,
                    "other": other,
                    **dict(zip(groups, group, strict=True)),
                    "seeds": len(part),
                }
                | {"failed": failed[0], "failed_other": failed[1]}
            )
            mine.append(part["final"])
            theirs.append(part["final_other"])
    if not rows:
        raise ValueError(f"{folder}: has none of {', '.join(asked)}")
    arm, pool = np.stack(mine, 1), np.stack(theirs, 1)[:, :, None]
    said = answer(arm, pool, runs["bar"][0], np.random.default_rng(0))
    less = pl.col("failed") < pl.col("failed_other")
    return pl.DataFrame(rows).with_columns(
        risk=pl.when(pl.Series(said.risk_p) > ALPHA)
        .then(pl.lit("not separated"))
        .otherwise(pl.when(less).then(pl.lit("fails less")).otherwise(pl.lit("fails more"))),
        median=pl.Series(said.typical).fill_nan(None).round(4),
        level=pl.Series(said.side).replace_strict(
            {1: "above", -1: "below"}, default="not separated"
        ),
    )


if __name__ == "__main__":
    with pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_width_chars=200, tbl_hide_dataframe_shape=True):
        print(pairs(Path(sys.argv[1]), sys.argv[2:]))
