"""OpenRLHF: any method in place of its PolicyLoss. It has no plugin, so the module of the actor is replaced.

    from simlab.adapters.openrlhf import StabilizedPolicyLoss
    trainer.actor_loss_fn = StabilizedPolicyLoss("ppo:eps_high=0.28")   # a PPO trainer of OpenRLHF

mu are `rollout_log_probs`, the engine's; OpenRLHF's own before the step are `logp_prox`. Leave its importance
sampling correction off: it would correct the ratio a second time. With `batch_num_tokens` and `dp_size` the mean
is over the tokens of the whole batch, else over those of this call.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from simlab.adapters.common import method, numbers
from simlab.core.tokens import TokenBatch


class StabilizedPolicyLoss(nn.Module):
    """PolicyLoss whose loss is a method of simlab, averaged over tokens. Raises ValueError in one sentence."""

    def __init__(self, spec: str, *, whole_batch: Literal["refuse", "micro"] = "refuse"):
        super().__init__()
        given = ("position", "logp_prox")
        self.stabilizer = method(spec, "OpenRLHF", given, whole_batch == "micro")
        self.diagnostics: dict[str, float] = {}  # of the last call

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: int | None = None,
        global_batch_size: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`[B, A]` each. Returns loss, share of tokens without a gradient, mean old - log pi, mean mu - old."""
        if rollout_log_probs is None:
            raise ValueError(
                "OpenRLHF gave no rollout_log_probs; ask the engine for them, mu is the engine's"
            )
        b = TokenBatch.from_padded(
            log_probs, rollout_log_probs, advantages, action_mask, logp_prox=old_log_probs
        )
        out = self.stabilizer(b)
        self.diagnostics = {name: x.item() for name, x in numbers(b, out).items()}
        own = b.mask.sum().clamp(min=1)
        count = own if batch_num_tokens is None else batch_num_tokens / dp_size
        cut = (b.mask & ~out.active & (b.advantage != 0)).sum() / own
        prox = old_log_probs.reshape(-1)
        gaps = (prox - b.logp, b.logp_mu - prox)
        moved, engine = (torch.where(b.mask, x, 0.0).sum().detach() / own for x in gaps)
        return -out.S.sum() / count, cut, moved, engine
