"""Math problems from parquet files or files of JSON lines: messages and the right answer of each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

Problem = tuple[list[dict[str, str]], str]


def problems(
    files: str | dict | Sequence[str | dict],
    prompt: str = "prompt",
    answer: str = "reward_model.ground_truth",
    unique: bool = False,
    expect: int | None = None,
) -> list[list[Problem]]:
    """(messages, right answer) of all rows, a list for each file, in order.

    A file is .parquet (also at `hf://datasets/...`, which polars reads from the Hugging Face hub) or
    JSON lines. Column `prompt` holds text or messages of role and content; `answer`, a path of names
    joined by dots, one text or number, or a list of one. For a single file they stand in a table:
    `{path = "...", prompt = "...", answer = "..."}`. `unique=True` drops a problem whose messages
    were there before, in any file. Raises ValueError in one sentence: with file, row (the first is
    0) and column for a row that does not fit, and where the problems are none, or not `expect`.
    """
    parts, seen, sizes = [], set(), []
    for file in [files] if isinstance(files, str | dict) else files:
        table = file if isinstance(file, dict) else {"path": file}
        if odd := table.keys() - {"path", "prompt", "answer"} or {"path"} - table.keys():
            raise ValueError(
                f"math: a file is a path, or a table of path, prompt and answer; see {min(odd)!r}"
            )
        columns = {"prompt": prompt, "answer": answer} | table
        path, kept = str(columns.pop("path")), []
        tops = dict.fromkeys([columns["prompt"], columns["answer"].split(".")[0]])
        for n, row in enumerate(_rows(path, list(tops))):
            try:
                messages, right = _problem(row, **columns)
            except ValueError as error:
                raise ValueError(f"math: {path}, row {n}, {error}") from None
            key = tuple(message["content"] for message in messages)
            if not (unique and key in seen):
                kept.append((messages, right))
            seen.add(key)
        parts.append(kept)
        sizes.append(f"{len(kept)} of {path}")
    total = sum(map(len, parts))
    if not total or total != (expect or total):
        raise ValueError(
            f"math: {total} problems, expected {expect or 'some'}: "
            f"{', '.join(sizes) or 'no files'} ({len(seen)} different ones)"
        )
    return parts


def _rows(file: str, columns: Sequence[str]) -> Iterator[dict]:
    """Rows of a .parquet file, or of a file of JSON lines. Raises ValueError in one sentence."""
    hub, parquet = file.startswith("hf://"), file.endswith(".parquet")
    if hub and not parquet:
        raise ValueError(f"math: {file}: of the Hugging Face hub only .parquet files are read")
    if not hub and not Path(file).is_file():
        raise ValueError(f"math: there is no file {file}")
    if parquet:
        import polars as pl

        try:
            there = pl.read_parquet_schema(file)
            if missing := [column for column in columns if column not in there]:
                raise ValueError(
                    f"math: {file} has no column {missing[0]!r}, only {', '.join(there)}"
                )
            yield from pl.read_parquet(file, columns=list(columns)).iter_rows(named=True)
        except (pl.exceptions.PolarsError, OSError) as error:
            why = " ".join(str(error).splitlines()[:1])
            raise ValueError(f"math: {file} cannot be read as parquet: {why}") from None
        return
    with open(file, encoding="utf-8", errors="replace") as lines:
        for n, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"math: {file}, row {n}: no JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"math: {file}, row {n}: needs a JSON object")
            yield row


def _problem(row: dict, prompt: str, answer: str) -> Problem:
    """Messages and right answer of a row; `answer` may be a path of names joined by dots.

    Raises ValueError with the column and what is wrong with it.
    """
    messages = row.get(prompt)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    good = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    if not good or not messages or not messages[-1]["content"].strip():
        raise ValueError(f"column {prompt!r}: needs text or messages of role and content")
    right = row
    for name in answer.split("."):
        right = right.get(name) if isinstance(right, dict) else None
    if isinstance(right, list) and len(right) == 1:
        right = right[0]
    if isinstance(right, float) and math.isfinite(right):
        right = format(Decimal(repr(right)), "f")  # 0.00001: math-verify does not read 1e-05
    if isinstance(right, int) and not isinstance(right, bool):
        right = str(right)
    if not isinstance(right, str) or not right.strip():
        raise ValueError(f"column {answer!r}: needs one answer, a text or a number")
    return [{"role": m["role"], "content": m["content"]} for m in messages], right
