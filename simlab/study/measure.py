"""What is logged of every step in either world, from its micro-batches, whatever sampled and trained them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from simlab.core.mismatch import gradient_shares, mismatch
from simlab.core.quantile import Reduce
from simlab.core.tokens import TokenBatch
from simlab.stabilizers import ppo


def measure(
    batches: Sequence[TokenBatch],
    active: Sequence[Tensor],
    reduce: Reduce | None = None,
    logp_rollout: Sequence[Tensor] | None = None,
) -> dict[str, Tensor]:
    """The columns of `mismatch` and `gradient_shares`, `[...]`, over all micro-batches and ranks.

    `active` is the stabilizer's, bool `[..., N]` a batch; what PPO at 0.2/0.2 would keep is worked out here.
    """
    base = [ppo.surrogate(b).active for b in batches]
    return mismatch(batches, reduce, logp_rollout) | gradient_shares(batches, active, base, reduce)
