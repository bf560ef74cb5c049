"""The record and its rows: a TokenBatch to the rows of a token log and back, bit for bit.

    rows = from_batch(b, step=3, trainer_version=3, token_ids=ids, group=group, reward=reward)
    write_step(folder, 3, rows, run)
    b = to_batch(read(path).rows)

Back come values, dtypes and shapes of every field of the batch (bf16 and fp16 as float32, without the
gradient), with the tokens sorted by response and without padding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from simlab.core.tokens import TokenBatch, widen
from simlab.token_log.schema import PER_TOKEN, SCHEMA, check, flat


def from_batch(
    b: TokenBatch,
    *,
    step: int,
    trainer_version: int,
    token_ids: Tensor,
    group: Tensor,
    reward: Tensor,
    lanes: Sequence[int] | None = None,
    **more: Tensor | Sequence,
) -> pl.DataFrame:
    """Rows of a batch `[N]`, or of `[L, N]` with the numbers of its L `lanes`.

    `token_ids` is `[..., N]`, `group` and `reward` are `[..., R]` for R = b.n_responses; further
    columns by name, `[..., N]` per token or R long (a list, or `[..., R]`) per response. `age` of the
    batch becomes `weight_versions` = trainer_version - age. bf16 and fp16 are written as float32.
    A masked token outside the responses (padding) is left out, and the tokens of a response are in the
    order of `position` where the batch has it.

    Raises ValueError for a batch without `age` and for rows that `check` refuses.
    """
    if unknown := more.keys() - SCHEMA.keys():
        raise ValueError(f"a token log has no column {', '.join(sorted(unknown))}")
    age = b.need("age", "a token log")
    lead = b.logp.shape[:-1]
    if len(lead) > 1 or lead != (() if lanes is None else (len(lanes),)):
        raise ValueError(f"a batch {list(b.logp.shape)} needs a name for each of its lanes")
    L, R = math.prod(lead), b.n_responses
    inside = (b.response >= 0) & (b.response < R)
    if (b.mask & ~inside).any():
        raise ValueError(f"a sampled token is outside of the {R} responses of its batch")
    token: dict[str, Any] = {"weight_versions": trainer_version - age, "token_ids": token_ids}
    named = {n: getattr(b, column.field) for n, column in SCHEMA.items() if column.field}
    token |= {name: x for name, x in named.items() if x is not None}
    token |= {name: more.pop(name) for name in PER_TOKEN if name in more}
    row = b.response + R * torch.arange(L, device=b.response.device).view(*lead, 1)
    columns = {"row": row[inside]} | {name: x[inside] for name, x in token.items()}
    if b.position is not None:
        columns["position"] = b.position[inside]
    table = pl.DataFrame({name: _numpy(x) for name, x in columns.items()})
    if b.position is not None:
        table = table.sort("row", "position", maintain_order=True).drop("position")
    lists = table.group_by("row", maintain_order=True).agg(pl.all())
    response = {"group": group, "reward": reward} | more
    response = {n: _numpy(x).ravel() if isinstance(x, Tensor) else x for n, x in response.items()}
    rows = pl.DataFrame(
        {"row": np.arange(L * R), "response": np.tile(np.arange(R), L), **response}
        | ({} if lanes is None else {"lane": np.repeat(np.array(lanes, dtype=np.int64), R)})
    )
    rows = rows.join(lists, "row", "left", maintain_order="left").with_columns(
        pl.col(lists.columns[1:]).fill_null([]),
        step=pl.lit(step, pl.Int64),
        trainer_version=pl.lit(trainer_version, pl.Int64),
    )
    rows = rows.select([x for x in SCHEMA if x in rows.columns])
    check(rows)
    return rows


def to_batch(rows: pl.DataFrame) -> TokenBatch:
    """The batch of rows that `check` accepts: `[N]`, or `[L, N]` when there is a column `lane`.

    Responses are numbered by their place among the rows (of their lane), so any choice of rows is a
    batch. It has `reward`, `group` and `position`, whether or not the batch that was written had them. Raises ValueError if lanes differ in responses or tokens.
    """
    shape, parts = (len(rows),), [rows]  # [R] or [L, R]
    if "lane" in rows.columns:
        parts = rows.partition_by("lane", maintain_order=True) or [rows]
        sizes = {(len(x), int(x["token_ids"].list.len().sum())) for x in parts}
        if len(sizes) > 1:
            raise ValueError("lanes of a token log must have equally many responses and tokens")
        shape = (len(parts), len(parts[0]))
    rows = pl.concat(parts)
    lengths = rows["token_ids"].list.len().to_numpy()
    lead = (*shape[:-1], int(lengths.sum()) // len(parts))

    def per_token(response: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.repeat(response, lengths)).to(dtype).view(lead)

    def entries(name: str) -> Tensor:
        x = torch.from_numpy(flat(rows[name]).to_numpy().copy())
        x = x if x.is_floating_point() else x.long()
        return x.view(*lead, *x.shape[1:])

    values: dict[str, Any] = {
        c.field: entries(n) for n, c in SCHEMA.items() if c.field and n in rows.columns
    }
    values["mask"] = values["mask"].bool()
    values["age"] = per_token(rows["trainer_version"].to_numpy()) - entries("weight_versions")
    values["reward"] = per_token(rows["reward"].to_numpy(), values["advantage"].dtype)
    values["group"] = per_token(rows["group"].to_numpy())
    first = np.repeat(lengths.cumsum() - lengths, lengths)
    values["position"] = torch.from_numpy(np.arange(len(first)) - first.astype(np.int64)).view(lead)
    values["response"] = per_token(np.tile(np.arange(shape[-1]), len(parts)))
    return TokenBatch(**values, n_responses=max(shape[-1], 1), lanes=len(shape) > 1)


def experts_digest(routed: Tensor | np.ndarray) -> str:
    """SHA-256 of the experts `[tokens, layers, k]` of a response, shape and int32 numbers, in hex."""
    routed = np.ascontiguousarray(_numpy(torch.as_tensor(routed)), dtype="<i4")
    return hashlib.sha256(f"{routed.shape}".encode() + routed.tobytes()).hexdigest()


def _numpy(x: Tensor) -> np.ndarray:
    x = x.detach().cpu()
    if x.dtype == torch.bool:
        return x.to(torch.uint8).numpy()
    return (widen(x) if x.is_floating_point() else x).numpy()
