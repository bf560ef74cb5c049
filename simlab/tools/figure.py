"""`simlab figure RUN NAME`: one figure of a finished run folder again, in the width and format of a paper."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

import polars as pl
import tyro
from pydantic import Field

from simlab.core.arguments import check_name
from simlab.study.command_line import parse
from simlab.study.folder import read_toml
from simlab.study.strict import Strict

TABLES = ("config.toml", "results.parquet", "runs.parquet")


class FigureOf(Strict):
    """Draw one figure of a run folder of simlab compare again, into a file of its own."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run folder."""
    name: Annotated[str, tyro.conf.Positional]
    """learning_curves, risk, level, profiles, mismatch_tail, clip_share or bound; of a sweep those that its report shows."""
    width: Annotated[float, Field(gt=0.5, le=40)] | None = None
    """Inches, as a column of your paper has (3.25); the height keeps its proportion. As in the report by default."""
    font: Annotated[float, Field(gt=1, le=40)] | None = None
    """Size of the text in points; below 5 inches 6 by default, else 9."""
    format: Literal["pdf", "svg", "png"] = "pdf"
    """pdf and svg keep lines and text, png has 300 dots an inch."""
    out: Path | None = None
    """The file, NAME.FORMAT by default."""


def run_figure(words: list[str]) -> None:
    """`simlab figure`."""
    options = parse(FigureOf, words, "simlab figure")
    out = options.out or Path(f"{options.name}.{options.format}")
    data = drawn(options.run, options.name, options.width, options.font, options.format)
    from simlab.study.files import write

    write(out, partial(Path.write_bytes, data=data))
    print(out)


def drawn(run: Path, name: str, width: float | None, font: float | None, kind: str) -> bytes:
    """The figure as the bytes of a file. Raises ValueError in one sentence."""
    for table in TABLES:
        if not (run / table).is_file():
            raise ValueError(
                f"{run}: has no {table}, so it is no finished run folder of simlab compare"
            )
    import matplotlib

    from simlab.simulator import regimes
    from simlab.simulator.config import Config
    from simlab.simulator.figures import FIGURES
    from simlab.simulator.summary import summarize
    from simlab.study.page import UNDATED
    from simlab.study.style import style

    config = Config(
        **{k: x for k, x in read_toml(run / "config.toml").items() if k != "experiment"}
    )
    rows, runs = (pl.read_parquet(run / f"{x}.parquet") for x in ("results", "runs"))
    if config.axes:
        ranges = regimes.regimes(config, runs)
        draws = {x: partial(draw, config, runs, ranges) for x, draw, _ in regimes.figures(config)}
    else:
        table = summarize(config, runs)
        draws = {x: partial(draw, config, rows, runs, table) for x, draw in FIGURES.items()}
    check_name("figure", name, draws)
    file = BytesIO()
    with style():
        narrow = width is not None and width < 5
        matplotlib.rcParams["font.size"] = font or (6 if narrow else 9)
        fig = draws[name]()
        if width is not None:
            own, height = fig.get_size_inches()
            fig.set_size_inches(width, height * width / own)
        for text in fig.findobj(matplotlib.text.Text) if font or narrow else ():
            text.set_fontsize(min(text.get_fontsize(), matplotlib.rcParams["font.size"]))
        fig.savefig(file, format=kind, dpi=300, metadata=UNDATED[kind])
    return file.getvalue()
