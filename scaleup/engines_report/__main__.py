"""The page about the real engines: what was measured, where, and what nobody has run yet.

    python -W ignore -m scaleup.engines_report    # writes reports/scaleup_engines

Four minutes on two idle cores. Engines and trainers hold tiny random models; the measurements are
those of measure.py, routing.py and resuming.py, which tests/scaleup assert. README.md, numbers.csv and
the figure are made of the same rows.
"""

from __future__ import annotations

import csv
import os
import platform
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import torch

from scaleup.engines_report.launch import Ranks
from scaleup.engines_report.page import LARGE, figure, page
from scaleup.engines_report.rows import Row, agreement, trainings

OUT = Path("reports/scaleup_engines")


def main(out: Path = OUT) -> None:
    """Measure and write the folder."""
    from scaleup.engines_report import dry_run as plan
    from simlab.study.files import commit, write
    from simlab.study.page import embed

    os.environ["SGLANG_TIMEOUT_KEEP_ALIVE"] = "600"  # a connection idles while trainers score
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(1) as pool:
        training = pool.submit(trainings, Path(root) / "training")
        with Ranks(1, 900) as rank:
            rows = list(agreement(rank, Path(root)))
        rows += training.result()
    large = plan.dry_run(layouts=())
    rows += [
        Row("plan", LARGE, 0, name, getattr(large, name)) for name in ("parameters", "tensors")
    ]
    provenance = {"commit": commit(), "simlab": version("simlab"), "torch": torch.__version__,
                  "sglang": version("sglang"), "megatron-core": version("megatron-core"),
                  "Python": platform.python_version()}  # fmt: skip
    (out / "figures").mkdir(parents=True, exist_ok=True)
    embed(lambda: figure(rows), out / "figures", "gap_tail", "", "")

    def table(path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*Row._fields, "version", "commit"])
            for row in rows:
                writer.writerow([*row, provenance["simlab"], provenance["commit"]])

    write(out / "numbers.csv", table)
    write(out / "README.md", lambda part: part.write_text(page(rows, provenance)))


if __name__ == "__main__":
    main()
