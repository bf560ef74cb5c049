"""A `Sample`: the engine's raw record of one response, before a reward; what the trainer sees is the `Response`
of scaleup/trainer/responses.py."""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sample:
    """A response of T tokens to a prompt of P; an aborted one has the tokens it got."""

    prompt: list[int]  # P token ids
    output: list[int]  # T token ids; a stop token that was drawn is the last
    logp_mu: Tensor  # float32 [T], nats, at the temperature drawn with
    version: Tensor  # int64 [T], version of the weights each token was drawn with
    experts: Tensor | None  # int32 [P + T - 1, layers, K], expert ids of every token but the last
    finish: str  # "stop", "length" or "abort"
    retractions: int  # how often it was paused and read again
    head: Tensor | None = None  # int32 [T, k], ids of the likeliest tokens, the likeliest first
    head_logp: Tensor | None = None  # float32 [T, k], nats, as logp_mu

    def copied(self) -> Sample:
        """A copy with tensors of its own."""
        tensors = {k: x.clone() for k, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


def parse(
    prompt: list[int], reply: dict[str, Any], layers: int = 0, topk: int = 0, head: int = 0
) -> Sample:
    """A Sample from SGLang's reply to /generate. `topk = 0` means a model without experts, `head` is
    how many likeliest tokens were asked for.

    Raises RuntimeError where the reply contradicts itself.
    """
    meta, output = reply["meta_info"], list(reply.get("output_ids") or [])
    T = len(output)
    logprobs = meta.get("output_token_logprobs") or []
    if [token for _, token, *_ in logprobs] != output:
        raise RuntimeError(f"rollout: {len(logprobs)} log-probs do not belong to the {T} tokens")
    version = torch.full((T,), -1, dtype=torch.int64)
    for span in meta["weight_versions"]:
        version[span["start"] : span["end"]] = int(span["version"])
    if (version < 0).any():
        raise RuntimeError(f"rollout: the version spans {meta['weight_versions']} miss tokens")
    experts = None
    if topk and T:
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        if flat.size != (len(prompt) + T - 1) * layers * topk:
            raise RuntimeError(
                f"rollout: {flat.size} expert ids for {len(prompt)} + {T} - 1 tokens, "
                f"{layers} layers and top-{topk}"
            )
        experts = torch.from_numpy(flat.reshape(-1, layers, topk).copy())
    head_ids = head_logp = None
    if head:
        head_ids, head_logp = _head(meta.get("output_top_logprobs") or [], T, head)
    return Sample(
        prompt=list(prompt),
        output=output,
        logp_mu=torch.tensor([logp for logp, *_ in logprobs], dtype=torch.float32),
        version=version,
        experts=experts,
        finish=meta["finish_reason"]["type"],
        retractions=meta.get("num_retractions", 0),
        head=head_ids,
        head_logp=head_logp,
    )


def _head(rows: list, T: int, k: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs `[T, k]` of SGLang's lists of (log-prob, id, text)."""
    if [len(row or ()) for row in rows] != [k] * T:
        raise RuntimeError(f"rollout: {len(rows)} heads do not fit {T} tokens with {k} each")
    ids = torch.tensor([[token for _, token, *_ in row] for row in rows], dtype=torch.int32)
    logp = torch.tensor([[x for x, *_ in row] for row in rows], dtype=torch.float32)
    return ids.view(T, k), logp.view(T, k)
