"""The tokens of a log as the record that losses read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simlab.core.tokens import TokenBatch
from simlab.token_log.tokens import PER_RESPONSE, Tokens

SEED = 0  # of the uniform draws of methods that draw


def batch_of(t: Tokens, tokens: np.ndarray) -> TokenBatch:
    """The tokens with the numbers `tokens` `[n]`, in order, as one batch without a gradient.

    Responses keep their numbers. A field that the log lacks, or lacks at one of the tokens, is None; the
    proximal log-prob is the trainer's own where there is no column for it, and an advantage that is
    unknown is 1.
    """
    response = t.responses[tokens]
    wide = np.result_type(t.trainer, t.rollout)

    def column(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x[tokens], dtype=wide))

    def known(role: str, per_response: bool = False) -> Tensor | None:
        x = t.extra.get(role)
        if x is None:
            return None
        x = x[response] if per_response else x[tokens]
        return torch.from_numpy(x.astype(wide)) if np.isfinite(x).all() else None

    logp = column(np.minimum(t.trainer, 0))
    fields: dict[str, Any] = {
        "logp_prox": known("proximal"),
        "entropy_prox": known("entropy"),
        "reward": known("reward", per_response=True),
        "group": known("group", per_response=True),
        "age": ages(t, tokens),
    }
    if fields["group"] is not None:
        _, number = np.unique(fields["group"].numpy(), return_inverse=True)
        fields["group"] = torch.from_numpy(number.astype(np.int64).reshape(-1))
    if fields["logp_prox"] is None:
        fields["logp_prox"] = logp
    if fields["entropy_prox"] is not None and t.extra.get("proximal") is not None:
        fields["entropy_prox"] = None  # the entropy of another policy
    advantage = known("advantage")
    return TokenBatch(
        logp=logp,
        logp_mu=column(np.minimum(t.rollout, 0)),
        advantage=torch.ones_like(logp) if advantage is None else advantage,
        mask=torch.ones(len(tokens), dtype=torch.bool),
        response=torch.from_numpy(response.astype(np.int64)),
        position=torch.from_numpy(tokens - t.starts[response]),
        uniform=torch.rand(
            len(tokens), dtype=logp.dtype, generator=torch.Generator().manual_seed(SEED)
        ),
        n_responses=max(len(t.row), 1),
        **fields,
    )


def ages(t: Tokens, tokens: np.ndarray) -> Tensor | None:
    """Optimizer steps since the weights that sampled each token `[n]`; None where one is unknown."""
    if t.version is None or t.trained is None:
        return None
    age = t.trained[tokens] - t.version[tokens]
    if not np.isfinite(age).all() or (age < 0).any():
        return None
    return torch.from_numpy(age.astype(np.int64))


def at_rollout(b: TokenBatch, t: Tokens, tokens: np.ndarray) -> TokenBatch | None:
    """The batch with the trainer's scores at the weights that sampled: engine noise and nothing else.

    None if the log does not have them at all of the tokens.
    """
    before = t.extra.get("before")
    if before is None or not np.isfinite(before[tokens]).all():
        return None
    logp = torch.from_numpy(np.minimum(before[tokens], 0)).to(b.logp.dtype)
    return replace(b, logp=logp, logp_prox=logp)


def of_responses(t: Tokens, tokens: np.ndarray, most: int) -> np.ndarray:
    """Those of the tokens `[n]` that stand in evenly spaced responses, about `most` at most."""
    every = -(-len(tokens) // most)
    if every < 2:
        return tokens
    parts = np.array_split(tokens, max(len(tokens) >> 20, 1))
    return np.concatenate([x[t.responses[x] % every == 0] for x in parts])


def tokens_of(batches: Sequence[TokenBatch], before: Sequence[Tensor] | None = None) -> Tokens:
    """The active tokens of the micro-batches of a trainer, response after response.

    Responses of two micro-batches are different ones, whatever their numbers.
    """
    parts: dict[str, list[np.ndarray]] = {}
    offset = 0
    fields = {"trainer": "logp", "rollout": "logp_mu", "advantage": "advantage", "age": "age",
              "group": "group", "reward": "reward", "entropy": "entropy_prox"}  # fmt: skip
    for i, b in enumerate(batches):
        own = {name: getattr(b, source) for name, source in fields.items()}
        own |= {"response": b.response + offset}
        if before is not None:
            own["before"] = before[i]
        if b.logp_prox is not b.logp:
            own["proximal"] = b.logp_prox
        order = torch.argsort(b.response[b.mask], stable=True)
        for name, x in own.items():
            if x is not None:
                parts.setdefault(name, []).append(x.detach()[b.mask][order].cpu().numpy())
        offset += b.n_responses
    flat = {name: np.concatenate(x) for name, x in parts.items() if len(x) == len(batches)}
    response = flat.pop("response", np.zeros(0, dtype=np.int64))
    present, first = np.unique(response, return_index=True)
    age = flat.pop("age", None)
    trainer, rollout = (flat.pop(name, np.zeros(0)) for name in ("trainer", "rollout"))
    extra = {name: x[first] if name in PER_RESPONSE else x for name, x in flat.items()}
    return Tokens(
        trainer=trainer,
        rollout=rollout,
        mask=np.ones(len(response), dtype=bool),
        starts=np.append(first, len(response)),
        files=(),
        file=np.zeros(len(present), dtype=int),
        row=present,
        keys=np.zeros((len(present), 0)),
        version=None if age is None else -age.astype(float) + age.max(initial=0),
        trained=None if age is None else np.full(len(age), float(age.max(initial=0))),
        columns=("logp", "logp_mu"),
        extra=extra,
    )
