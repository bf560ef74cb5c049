"""How trainers hold tokens: padded `[responses, tokens]`, or packed one after another. Both become one list."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor


class Layouts:
    """Constructors of `tokens.TokenBatch`."""

    @classmethod
    def from_padded(
        cls, logp: Tensor, logp_mu: Tensor, advantage: Tensor, mask: Tensor, **fields: Tensor
    ) -> Self:
        """The batch of tensors `[B, T]`, a row a response, as verl, TRL, SkyRL and OpenRLHF hold them.

        Every other field is `[B, T]` too (`topk` and `topk_mu` `[B, T, K]`), or `[B]`: a number a response. `mask`
        is True, or not 0, on the tokens that the policy sampled; padding may stand anywhere. S comes back as one
        list; `S.view(B, T)` is a row a response again. Raises ValueError for any other shape.
        """
        _dims("from_padded", logp, 2, "[B, T]")
        B, T = logp.shape
        spread = {
            name: _flat(name, x, (B, T), lambda x: x.unsqueeze(1).expand(B, T).reshape(-1))
            for name, x in _named(logp, logp_mu, advantage, mask, fields).items()
        }
        index = torch.arange(B * T, device=logp.device)
        own = {"response": index // max(T, 1), "position": index % max(T, 1)}
        return cls(**own | spread | {"n_responses": max(B, 1)})

    @classmethod
    def from_packed(
        cls,
        logp: Tensor,
        logp_mu: Tensor,
        advantage: Tensor,
        mask: Tensor,
        cu_seqlens: Tensor,
        **fields: Tensor,
    ) -> Self:
        """The batch of tensors `[N]` or `[1, N]`, responses one after another, as varlen attention takes them.

        `cu_seqlens` `[B + 1]` are whole numbers, response i is the tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1, 0
        the first, N the last. Every other field is as `logp`, or `[B]`: a number a response. Raises ValueError for
        any other shape, and for lengths that do not add up to N.
        """
        if logp.dim() == 2 and logp.shape[0] == 1:
            given = _named(logp, logp_mu, advantage, mask, fields)
            flat = {k: x[0] if x.shape[:2] == logp.shape else x for k, x in given.items()}
            return cls.from_packed(cu_seqlens=cu_seqlens, **flat)
        _dims("from_packed", logp, 1, "[N] or [1, N]")
        N, B = len(logp), len(cu_seqlens) - 1
        starts = cu_seqlens.to(logp.device).long()
        lengths = starts.diff()
        ends = (int(starts[0]), int(starts[-1])) if B >= 0 else (-1, -1)
        if ends != (0, N) or bool((lengths < 0).any()):
            raise ValueError(
                f"from_packed: cu_seqlens must rise from 0 to the {N} tokens of logp, got "
                f"{cu_seqlens.numel()} numbers from {ends[0]} to {ends[1]}"
            )
        response = torch.arange(B, device=logp.device).repeat_interleave(lengths)
        spread = {
            name: _flat(name, x, (N,), lambda x: x[response], B)
            for name, x in _named(logp, logp_mu, advantage, mask, fields).items()
        }
        own = {"response": response, "position": torch.arange(N, device=logp.device)}
        own["position"] -= starts[response]
        return cls(**own | spread | {"n_responses": max(B, 1)})


def _named(logp, logp_mu, advantage, mask, fields) -> dict[str, Tensor]:
    return {"logp": logp, "logp_mu": logp_mu, "advantage": advantage, "mask": mask != 0} | fields


def _dims(method: str, logp: Tensor, dims: int, shape: str) -> None:
    if logp.dim() != dims:
        raise ValueError(f"{method}: logp has shape {tuple(logp.shape)}, it must be {shape}")


def _flat(name: str, x: Tensor, shape: tuple[int, ...], spread, responses: int | None = None):
    """x as one list: as `logp`, with a last axis of its own, or a number a response that is spread out."""
    responses = shape[0] if responses is None else responses
    if x.shape[: len(shape)] == shape and x.dim() - len(shape) in (0, 1):
        return x.flatten(0, len(shape) - 1)
    if x.shape == (responses,):
        return spread(x)
    raise ValueError(
        f"{name} has shape {tuple(x.shape)}; it must be {shape} as logp, or ({responses},), a number a response"
    )
