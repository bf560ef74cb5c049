"""Small batches by hand; ranks as threads and seeded ragged batches come from simlab.contract.batches."""

import torch

from simlab.contract.batches import (
    by_response,
    cast,
    graded,
    graded_head,
    on_ranks,
    ragged,
)
from simlab.core.tokens import TokenBatch

__all__ = ["by_response", "cast", "graded", "graded_head", "on_ranks", "ragged", "tokens"]


def tokens(d, A=1.0, *, mu=-1.0, mask=None, response=None, prox=None, dtype=torch.float64):
    """A batch from a list of log-ratios: logp = mu + d; every token its own response by default."""
    d = torch.as_tensor(d, dtype=dtype)
    logp_mu = torch.as_tensor(mu, dtype=dtype).expand(d.shape).clone()
    mask = torch.ones(d.shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
    if response is None:
        response = torch.arange(d.shape[-1]).expand(d.shape)
    return TokenBatch(
        logp=logp_mu + d,
        logp_mu=logp_mu,
        advantage=torch.as_tensor(A, dtype=dtype).expand(d.shape).clone(),
        mask=mask,
        response=torch.as_tensor(response),
        logp_prox=None if prox is None else torch.as_tensor(prox, dtype=dtype),
        lanes=d.dim() > 1,
    )
