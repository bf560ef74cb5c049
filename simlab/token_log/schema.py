"""The token log: what every sampled token was, and what the trainer made of it, in Parquet.

One file a step, `step_00000012.parquet` in the folder of the run, and one row a response. A file is
whole or absent, a step that is run again after a resume replaces its own file, and nothing is ever
appended to a file that may be read. `pl.scan_parquet("folder/*.parquet")` is the run as one table.

Columns are those of SCHEMA, in docs/token_log.md as a table. A list column has one entry for every
token of the response, so all list columns of a row are of one length (`prompt_ids` aside). Log-probs
and entropies are nats. Settings of the run (`Run`) stand in the key-value metadata of every file.

rows.py takes a TokenBatch to rows and back. The simulator and the cluster write the same
log, and `simlab compare --noise-from` resamples its noise from such a file. A log records what was
there: a NaN that an engine returned is kept, and `TokenBatch.screen` finds it again.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import polars as pl

from simlab.core.aggregate import AGGREGATIONS
from simlab.stabilizers import Stabilizer

VERSION = 1  # of the schema


class Column(NamedTuple):
    kind: str  # integer, number, text, integers, numbers, flags (0 or 1), top or tops (K numbers or integers a token)
    meaning: str
    required: bool = False
    field: str | None = None  # of the TokenBatch


SCHEMA = {
    "step": Column("integer", "optimizer step that trained on the response", True),
    "lane": Column("integer", "independent run in this file, a seed of the simulator"),
    "response": Column("integer", "number of the response in its batch (and lane)", True),
    "group": Column("integer", "number of the prompt; answers to one prompt share it", True),
    "reward": Column("number", "reward of the response", True),
    "trainer_version": Column("integer", "version of the weights of `trainer_logprobs`", True),
    "finish_reason": Column("text", "why the engine stopped"),
    "routed_experts_digest": Column("text", "`experts_digest` of the experts the engine chose"),
    "prompt_ids": Column("integers", "tokens of the prompt, of a length of its own"),
    "token_ids": Column("integers", "tokens of the response", True),
    "loss_mask": Column("flags", "1 where the policy sampled the token", True, "mask"),
    "weight_versions": Column("integers", "version of the weights that sampled the token", True),
    "rollout_logprobs": Column("numbers", "log mu, as the engine returned it", True, "logp_mu"),
    "trainer_logprobs": Column("numbers", "log pi in the loss", True, "logp"),
    "trainer_logprobs_step": Column("numbers", "log pi before the step, the trainer's first pass"),
    "trainer_logprobs_before": Column(
        "numbers", "log-prob of the trainer at the rollout's weights"
    ),
    "proximal_logprobs": Column("numbers", "log-prob of the proximal policy", field="logp_prox"),
    "reference_logprobs": Column("numbers", "log-prob of the reference policy", field="logp_ref"),
    "advantages": Column("numbers", "advantage of the token", True, "advantage"),
    "entropy": Column("numbers", "entropy of pi at the token's state"),
    "rollout_entropy": Column("numbers", "entropy of mu at the token's state", field="entropy_mu"),
    "proximal_entropy": Column(
        "numbers", "entropy of the proximal policy at the token's state", field="entropy_prox"
    ),
    "rollout_gini": Column("numbers", "1 - sum mu^2 at the token's state", field="gini_mu"),
    "total_variation": Column("numbers", "between mu and pi at the token's state", field="tv"),
    "stratum": Column("integers", "turn or position class", field="stratum"),
    "uniform": Column("numbers", "uniform draw of methods that draw", field="uniform"),
    "top_token_ids": Column(
        "tops", "the likeliest tokens of mu, -1 where that is the sampled token itself"
    ),
    "top_logprobs": Column("top", "log pi of the likeliest tokens of mu", field="topk"),
    "top_rollout_logprobs": Column("top", "log mu of the likeliest tokens of mu", field="topk_mu"),
}
REQUIRED = [name for name, column in SCHEMA.items() if column.required]
PER_TOKEN = [
    name
    for name, column in SCHEMA.items()
    if column.kind in ("integers", "numbers", "flags", "top", "tops") and name != "prompt_ids"
]
KINDS = {
    "integer": "an integer",
    "number": "a float32 or float64",
    "text": "a string",
    "integers": "a list of integers",
    "numbers": "a list of float32 or float64",
    "flags": "a list of integers",
    "top": "a list of arrays of float32 or float64",
    "tops": "a list of arrays of integers",
}
LOGPROB_MODES = {
    "scaled": "log-softmax of logits / temperature over the whole vocabulary, before truncation",
    "raw": "log-softmax of the logits, whatever the temperature",
    "support": "log-prob under the distribution really drawn from, after temperature and truncation",
}


ENGINE_WORDS = {"raw_logprobs": "raw", "processed_logprobs": "support"}  # vLLM's for two of them
NEUTRAL = {  # what else changes the distribution that is drawn from, and the value that changes nothing
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}


def _number(x) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and not math.isnan(x)


def _word(x) -> bool:
    return isinstance(x, str) and bool(x)


FINE = {
    "temperature": lambda x: _number(x) and 0 < x < math.inf,
    "top_p": lambda x: _number(x) and 0 < x <= 1,
    "top_k": lambda x: type(x) is int and (x == -1 or x > 0),
    "logprob_mode": lambda x: _word(x) and x in LOGPROB_MODES,
    "aggregation": lambda x: _word(x) and x in AGGREGATIONS,
    "stabilizer": _word,
    "arguments": lambda x: isinstance(x, dict),
    "eps": lambda x: x is None or (isinstance(x, tuple) and len(x) == 2 and all(map(_number, x))),
    "code_version": _word,
    "horizon": lambda x: x is None or (type(x) is int and x > 0),
    "notes": lambda x: isinstance(x, dict) and all(map(_word, x.values())),
    "sampling": lambda x: (
        isinstance(x, dict)
        and all(_number(v) if k in NEUTRAL else _word(k) and _word(v) for k, v in x.items())
    ),
}


@dataclass(frozen=True)
class Run:
    """Settings of the run that wrote a log; each is a JSON value in the metadata, by its name.

    Raises ValueError in one sentence for an impossible value.
    """

    temperature: float  # of the sampler; trainer log-probs are at the same one
    top_p: float  # 1 does not truncate
    top_k: int  # -1 does not truncate
    logprob_mode: str  # what the engine returns, one of LOGPROB_MODES
    aggregation: str  # one of simlab.core.aggregate.AGGREGATIONS
    stabilizer: str
    arguments: dict  # of the stabilizer, those left at their default included
    eps: tuple[float, float] | None  # clip radii below and above 1, of a method that has them
    code_version: str
    horizon: int | None = None  # of seq_mean_token_sum_norm
    notes: dict[str, str] = field(default_factory=dict)  # engine, model, trainer, anything else
    sampling: dict[str, float | str] = field(default_factory=dict)  # NEUTRAL's, or texts by name

    def __post_init__(self):
        if isinstance(self.logprob_mode, str):
            mode = ENGINE_WORDS.get(self.logprob_mode, self.logprob_mode)
            object.__setattr__(self, "logprob_mode", mode)
        if isinstance(self.eps, list):
            object.__setattr__(self, "eps", tuple(self.eps))
        for name, fine in FINE.items():
            if not fine(value := getattr(self, name)):
                raise ValueError(f"{name} cannot be {value!r} in a token log")
        if self.aggregation == "seq_mean_token_sum_norm" and self.horizon is None:
            raise ValueError("horizon is needed by aggregation seq_mean_token_sum_norm")

    @classmethod
    def of(cls, stabilizer: Stabilizer, **settings) -> Run:
        """Settings with name, arguments and radii read off a bound stabilizer."""
        held = stabilizer.settings
        eps = (
            (held["eps_low"], held["eps_high"]) if {"eps_low", "eps_high"} <= held.keys() else None
        )
        return cls(stabilizer=stabilizer.name, arguments=held, eps=eps, **settings)

    def metadata(self) -> dict[str, str]:
        """Key-value metadata of a file."""
        held = {"token_log": VERSION} | {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: json.dumps(value) for name, value in held.items()}


def check(rows: pl.DataFrame, where: str = "token log") -> None:
    """Raises ValueError in one sentence unless the rows keep to SCHEMA."""
    for name in rows.columns:
        if name not in SCHEMA:
            raise ValueError(f"{where}: unknown column {name}; there are {', '.join(SCHEMA)}")
    for name in REQUIRED:
        if name not in rows.columns:
            raise ValueError(f"{where}: column {name} is missing")
    for name, dtype in rows.schema.items():
        kind = SCHEMA[name].kind
        if not _fits(kind, dtype):
            raise ValueError(f"{where}: column {name} is {dtype}, not {KINDS[kind]}")
        if rows[name].null_count():
            raise ValueError(f"{where}: row {_first(rows[name].is_null())}, {name} is null")
    sizes = rows["token_ids"].list.len()
    for name in (x for x in PER_TOKEN if x in rows.columns):
        lengths = rows[name].list.len()
        if (other := lengths != sizes).any():
            i = _first(other)
            raise ValueError(
                f"{where}: row {i} has {lengths[i]} {name} entries for {sizes[i]} token_ids"
            )
    for name in (x for x in rows.columns if isinstance(rows.schema[x], pl.List)):
        values = flat(rows[name])
        values = values.explode() if SCHEMA[name].kind in ("top", "tops") else values
        bad = values.is_null()
        if SCHEMA[name].kind == "flags":
            bad |= ~values.is_in([0, 1]).fill_null(False)
        if bad.any():
            i, position = _place(rows[name], _first(bad), len(values))
            value = "null" if values[_first(bad)] is None else values[_first(bad)]
            must = ", not 0 or 1" if SCHEMA[name].kind == "flags" else ""
            raise ValueError(f"{where}: row {i}, {name}[{position}] is {value}{must}")
    key = [x for x in ("step", "lane", "response") if x in rows.columns]
    if (twice := rows.select(pl.struct(key).is_duplicated()).to_series()).any():
        i = _first(twice)
        raise ValueError(f"{where}: row {i}, response {rows['response'][i]} is there twice")


def _fits(kind: str, dtype) -> bool:
    if kind in ("integers", "numbers", "flags", "top", "tops"):
        if not isinstance(dtype, pl.List):
            return False
        dtype = dtype.inner
    if kind in ("top", "tops"):
        if not isinstance(dtype, pl.Array):
            return False
        dtype = dtype.inner
    if kind == "text":
        return dtype == pl.String
    return (
        dtype in (pl.Float32, pl.Float64) if kind[:6] in ("number", "top") else dtype.is_integer()
    )


def _first(flags: pl.Series) -> int:
    return flags.arg_max() or 0


def _place(lists: pl.Series, index: int, total: int) -> tuple[int, int]:
    """(row, place in its list) of a flat index among `total` numbers, one or K to an entry."""
    ends = lists.list.len().cum_sum().to_numpy()
    index = index * int(ends[-1]) // total
    row = int(np.searchsorted(ends, index, side="right"))
    return row, index - (int(ends[row - 1]) if row else 0)


def flat(lists: pl.Series) -> pl.Series:
    """Entries of a list column, one after another; explode alone makes a null of an empty list."""
    return lists.filter(lists.list.len() > 0).explode()
