"""`simlab promote METHOD --from RUN`: the gate between the simulator, a miniature on real engines, and the cluster.

Every criterion is printed with its number. One that fails refuses; one that was not measured is said, here and in
the recipe. The first rung writes a recipe of the miniature. `--miniature FOLDER`, the finished `scaleup compare` of
it, is held to the same criteria and writes the recipe of Qwen3-30B-A3B.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import polars as pl
import tyro

from simlab.study.command_line import parse
from simlab.study.files import write
from simlab.study.specs import parse as parse_spec
from simlab.study.strict import Strict

RUNGS = {"miniature": "tiny_grid", "qwen3_30b_a3b": "qwen3_30b_a3b"}  # recipe of scaleup, by file
SEEDS = {"miniature": 10, "qwen3_30b_a3b": 2}
MARKS = {True: "holds", False: "FAILS", None: "not measured"}


class Criterion(NamedTuple):
    """What is asked, whether it holds (None: not measured), and the number that says so."""

    question: str
    holds: bool | None
    number: str


class Promote(Strict):
    """Ask whether a method may go from the simulator to real engines, and write the recipe of its next run."""

    method: Annotated[str, tyro.conf.Positional]
    """An arm of the run: its label, as in ppo-dual."""
    runs: Annotated[tuple[Path, ...], tyro.conf.arg(name="from")]
    """Run folders of simlab compare that have the arm; in each of them it must not be worse."""
    map: Path | None = None
    """A run folder of a sweep over training.lr that has the arm: its stable range against the reference's."""
    log: Path | None = None
    """audit.json of `simlab audit` on a log of the target: whether the rule acts at its mismatch."""
    miniature: Path | None = None
    """The run folder of scaleup compare that the first rung asked for."""
    out: Path = Path("promoted")
    """Folder of the recipe; an existing recipe is left alone."""
    force: bool = False
    """Write the recipe although a criterion fails, and say so in it."""


def run_promote(words: list[str]) -> None:
    """`simlab promote`."""
    options = parse(Promote, words, "simlab promote")
    asked, arm = criteria(options)
    for c in asked:
        print(f"{MARKS[c.holds]:>12}  {c.question}: {c.number}")
    failed = [c.question for c in asked if c.holds is False]
    if failed and not options.force:
        print(
            f"\n{options.method} is not promoted: {'; '.join(failed)}. --force writes its recipe all the same."
        )
        raise SystemExit(1)
    rung = "miniature" if options.miniature is None else "qwen3_30b_a3b"
    path = options.out / f"{rung}.toml"
    if path.exists():
        raise ValueError(f"{path}: is there already and is left alone; choose another --out")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        write(path, partial(Path.write_text, data=recipe(rung, arm, asked, failed)))
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror or error})") from error
    folder = options.out / rung
    print(f"\n{path} is written; next: scaleup plan {path}; scaleup compare {path} --out {folder}")
    if rung == "miniature":
        print(
            f"then: simlab promote {options.method} --from {' '.join(map(str, options.runs))} --miniature {folder} --out {options.out}"
        )


def criteria(options: Promote) -> tuple[list[Criterion], dict]:
    """All criteria, in order, and the arm's settings. ValueError in one sentence where a folder has not the arm."""
    from simlab.tools.folders import settings, summary

    if not options.runs:
        raise ValueError("--from names no run folder")
    label, asked, arms = options.method, [], []
    for run in options.runs:
        table, known = summary(run), settings(run)
        reference = str(known["reference"])
        specs = {parse_spec(s)[0]: s for s in known["methods"]}  # pyright: ignore[reportGeneralTypeIssues]
        if label not in specs or label == reference:
            others = ", ".join(x for x in specs if x != reference)
            raise ValueError(
                f"{run}: {label!r} is none of its arms besides the reference ({others})"
            )
        files = known.get("method_file") or []
        arms.append(
            {"spec": specs[label], "reference": specs[reference], "label": label, "files": files}
        )
        if arms[-1] != arms[0]:
            raise ValueError(
                f"{run}: its {label} is {specs[label]} and its reference {specs[reference]}, unlike those of {options.runs[0]}"
            )
        asked += [*verdicts(run.name, table, label, reference), acts(run.name, table, label)]
    arm, reference = arms[0], parse_spec(arms[0]["reference"])[0]
    asked = [
        contract(arm),
        *asked,
        stable(options.map, label, reference),
        at_target(options.log, arm),
    ]
    if options.miniature is not None:
        asked += verdicts("miniature", summary(options.miniature), label, reference)
    study = "reports/promotion has a design and no runs: how far the simulator's order is that of engines is open"
    return [*asked, Criterion("the simulator predicts this regime", None, study)], arm


def contract(arm: dict) -> Criterion:
    """Whether the method keeps the promises."""
    from simlab.contract.promises import check
    from simlab.stabilizers import load
    from simlab.study.arms import Arm

    for path in arm["files"]:
        load(Path(path))
    try:
        check(Arm.parse(arm["spec"]).stabilizer)
    except AssertionError as error:
        return Criterion("contract", False, str(error))
    return Criterion("contract", True, "every promise is kept")


def verdicts(where: str, table: pl.DataFrame, label: str, reference: str) -> list[Criterion]:
    """Risk not above the reference's and level not below it, at every lag of a summary."""
    if not {"risk", "level"} <= set(table.columns):
        raise ValueError(
            f"its summary of the {where} has no verdicts of risk and level; run it again"
        )
    from simlab.tools.folders import keys

    mine = table.filter(pl.col("arm") == label)
    if mine.is_empty():
        raise ValueError(f"the {where} has no arm {label!r}")
    asked = []
    for name, bad, than in (("risk", "fails more", " than"), ("level", "below", "")):
        worse = mine.filter(pl.col(name) == bad).iter_rows(named=True)
        groups = [", ".join(f"{x} {row[x]}" for x in keys(table) if x != "arm") for row in worse]
        failed, seeds = mine["failed"].sum(), mine["seeds"].sum()
        said = (
            f"fails in {failed} of {seeds} runs"
            if name == "risk"
            else f"least median difference {_least(mine)}"
        )
        said += (
            f"; {bad}{than} {reference} at {', '.join(groups)}"
            if groups
            else "; no verdict against it"
        )
        asked.append(Criterion(f"{where}: {name} against {reference}", not groups, said))
    return asked


def _least(mine: pl.DataFrame) -> str:
    least = mine["typical"].min()
    return "unknown (too few lived)" if least is None else f"{least:+.4f}"


def acts(where: str, table: pl.DataFrame, label: str) -> Criterion:
    """Whether the rule made a difference in a run."""
    mine = table.filter(pl.col("arm") == label)
    same = bool(mine["same_as_reference"].all()) if "same_as_reference" in mine.columns else False
    share = mine["unlike_ppo"].max()
    said = (
        "every run is the reference's own"
        if same
        else f"up to {100 * share:.3g} % of the tokens are cut or kept unlike PPO"
    )  # pyright: ignore[reportOperatorIssue]
    return Criterion(f"{where}: its rule acts", not same, said)


def stable(folder: Path | None, label: str, reference: str) -> Criterion:
    """Whether the stable range of the learning rate is at least the reference's, at every lag."""
    question = "stable range of the learning rate at least the reference's"
    if folder is None:
        return Criterion(question, None, "no --map, such as the run of --experiment e0")
    path = folder / "map.csv"
    if not path.is_file():
        raise ValueError(f"{folder}: has no map.csv, so it is no sweep; --experiment e0 is one")
    table = pl.read_csv(path)
    axis = table["axis"].unique().to_list()
    mine, theirs = (table.filter(pl.col("arm") == x) for x in (label, reference))
    if axis != ["training.lr"] or mine.is_empty() or theirs.is_empty():
        raise ValueError(f"{path}: is no sweep of training.lr with {label} and {reference}")
    pairs = mine.join(theirs, on="lag", suffix="_reference")
    narrower = pairs.filter(pl.col("stable") < pl.col("stable_reference"))
    said = ", ".join(
        f"lag {r['lag']}: {r['stable']} values against {r['stable_reference']}"
        for r in pairs.iter_rows(named=True)
    )
    return Criterion(question, narrower.is_empty(), said)


def at_target(log: Path | None, arm: dict) -> Criterion:
    """Whether the rule acts on the tokens of the target's log."""
    question = "its rule acts at the mismatch of the target"
    if log is None:
        return Criterion(question, None, "no --log, the audit.json of simlab audit")
    try:
        rows = json.loads(log.read_text(encoding="utf-8"))["methods"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{log}: is no audit.json ({error})") from error
    _, name, _, arguments = parse_spec(arm["spec"])
    row = next((x for x in rows if x.get("method") == name and "acts" in x), None)
    if arguments or row is None:
        return Criterion(
            question,
            None,
            f"the table of {log} has methods at their defaults only, and no {arm['spec']}",
        )
    share = f"{100 * row['cut']:.3g} % cut, {100 * row['capped']:.3g} % capped, {100 * row['raised']:.3g} % raised"
    return Criterion(question, row["acts"], share)


def recipe(rung: str, arm: dict, asked: list[Criterion], failed: list[str]) -> str:
    """The recipe as TOML, with what was asked on top."""
    lines = [
        f"# {arm['label']}, promoted by simlab promote"
        + (f" with --force: {'; '.join(failed)}" if failed else "")
    ]
    lines += [f"# {MARKS[c.holds]}: {c.question}: {c.number}" for c in asked]
    lines += [f'base = "{RUNGS[rung]}"', f"methods = {json.dumps([arm['reference'], arm['spec']])}"]
    lines += [f"reference = {json.dumps(parse_spec(arm['reference'])[0])}"]
    lines += (
        [f"method_file = {json.dumps([str(Path(x).resolve()) for x in arm['files']])}"]
        if arm["files"]
        else []
    )
    return "\n".join([*lines, f"seeds = {SEEDS[rung]}", ""])
