"""Lists of log-probs whose entries say more than a number, as engines return them.

    [-0.3, 11, "text"]                                            SGLang, agents: log-prob, id, text
    {"token": "a", "logprob": -0.3, "token_id": 11}               OpenAI, with or without an id
    {"11": {"logprob": -0.3, "rank": 1}, "12": {...}}             vLLM: the sampled id among others
    {"content": [...]}, {"token_logprobs": [...]}, {"choices": [{"logprobs": ...}]}   around them

Ids that the entries have stand in a column of their own (`ids_column`). An entry that lacks the id which its
neighbours have is left out there, so that the lengths differ and the row is set aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

ID_NAMES = ("token_id", "id")
IDS = ("token_ids", "output_ids", "response_ids", "tokens")


def ids_column(name: str) -> str:
    """The column of the ids that entries of the column `name` hold."""
    return f"{name} ids"


def unpacked(rows: list[dict], names: Sequence[str]) -> list[dict]:
    """Rows whose columns `names` hold plain numbers. Raises ValueError with the row's number and a sentence."""
    out = []
    for number, row in enumerate(rows):
        new = dict(row)
        for name in names:
            value = _inside(row.get(name))
            if isinstance(value, list) and _speaks(value):
                try:
                    entries = [_entry(x, i, row) for i, x in enumerate(value)]
                except ValueError as error:
                    raise ValueError(number, f"{name}: {error}") from error
                value = [x for x, _, _ in entries]
                ids = [x for _, x, _ in entries if x is not None]
                texts = [x for _, _, x in entries if x is not None]
                if ids:
                    new[ids_column(name)] = ids
                if len(texts) == len(value):
                    new.setdefault("token_texts", texts)
            new[name] = value
        out.append(new)
    return out


def flat(frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """The same of columns that are typed: lists of lists with a log-prob first, lists of structs."""
    for name in names:
        dtype = frame.schema[name]
        if not isinstance(dtype, pl.List):
            continue
        inner, x = dtype.inner, pl.col(name)
        if isinstance(inner, pl.List) and (frame[name].list.len() != 1).any():
            ids = x.list.eval(pl.element().list.get(1, null_on_oob=True))
            x = x.list.eval(pl.element().list.get(0, null_on_oob=True))
        elif isinstance(inner, pl.Struct) and "logprob" in (own := [f.name for f in inner.fields]):
            id_name = next((y for y in ID_NAMES if y in own), None)
            ids = x.list.eval(pl.element().struct.field(id_name)) if id_name else None
            x = x.list.eval(pl.element().struct.field("logprob"))
        else:
            continue
        frame = frame.with_columns(x.alias("_"), *([] if ids is None else [ids.alias("_ids")]))
        frame = frame.with_columns(pl.col("_").alias(name)).drop("_")
        if ids is not None:
            frame = frame.with_columns(pl.col("_ids").list.drop_nulls().alias(ids_column(name)))
            frame = frame.drop("_ids")
    return frame


def _inside(value: Any) -> Any:
    """The list inside of an OpenAI-style answer."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else None
    if isinstance(one, dict) and "logprobs" in one:  # choices of one
        value = one["logprobs"]
    for name in ("content", "token_logprobs"):
        if isinstance(value, dict) and isinstance(value.get(name), list):
            return value[name]
    return value


def _speaks(value: list) -> bool:
    """Whether entries are more than numbers; a list in a list of one is a batch of one."""
    if any(isinstance(x, dict) for x in value):
        return True
    triples = [isinstance(x, list) and 1 < len(x) < 4 for x in value]
    if len(value) == 1 and any(triples):
        return len(value[0]) == 3 and (value[0][2] is None or isinstance(value[0][2], str))
    return any(triples)


def _entry(x: Any, i: int, row: dict) -> tuple[float | None, int | None, str | None]:
    """Log-prob, id and text of an entry."""
    if isinstance(x, list):
        number, token, text = [*x, None, None][:3]
        return number, token, text if isinstance(text, str) else None
    if not isinstance(x, dict):
        return x, None, None
    if "logprob" in x:
        token = next((x[name] for name in ID_NAMES if name in x), None)
        return x["logprob"], token, x.get("token")
    return _of_ids(x, i, row)


def _of_ids(x: dict, i: int, row: dict) -> tuple[float | None, int | None, str | None]:
    """The sampled one of the tokens that vLLM lists by id."""
    if len(x) == 1:
        key = str(next(iter(x)))
    else:
        ids = next((row[name] for name in IDS if isinstance(row.get(name), list)), None)
        key = str(ids[i]) if ids is not None and i < len(ids) else ""
        if key not in x:
            raise ValueError(
                f"entry {i} lists {len(x)} tokens and no column of ids ({', '.join(IDS)}) says which was sampled"
            )
    entry = x[key]
    if not isinstance(entry, dict) or not key.lstrip("-").isdecimal():
        raise ValueError(f"entry {i} is an object without a logprob")
    return entry.get("logprob"), int(key), entry.get("decoded_token")
