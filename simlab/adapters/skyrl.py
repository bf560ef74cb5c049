"""SkyRL: any method as a policy loss of its registry.

    # before the trainer starts, in your entry point
    from simlab.adapters.skyrl import register
    register("mine=gspo+tis")
    # and on the command line
    trainer.algorithm.policy_loss_type=mine

SkyRL hands over the engine's log-probs as `rollout_logprobs`, which are mu, and its own before the step as
`old_log_probs`, which are `logp_prox`. It has scaled the advantages by loss_reduction over the mini-batch, so
the loss is a sum and micro-batches add up. Scaling by a positive number a response changes no gate, but no
method may read the size of an advantage then. Leave SkyRL's own off-policy correction off: it would correct
the ratio a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from simlab.adapters.common import label, method, numbers
from simlab.core.tokens import TokenBatch


def register(spec: str, *, whole_batch: Literal["refuse", "micro"] = "refuse") -> str:
    """Register the method under its label; returns that, for policy_loss_type. Raises ValueError as `policy_loss`."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    PolicyLossRegistry.register(label(spec), policy_loss(spec, whole_batch=whole_batch))
    return label(spec)


def policy_loss(
    spec: str, *, whole_batch: Literal["refuse", "micro"] = "refuse"
) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """The method in the signature of SkyRL's policy losses. Raises ValueError in one sentence."""
    chosen = method(spec, "SkyRL", ("position", "logp_prox"), whole_batch == "micro")

    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any = None,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """`[B, T]` each. Returns the sum over tokens, and the method's diagnostics."""
        if rollout_logprobs is None:
            raise ValueError(
                "SkyRL gave no rollout_logprobs; switch on generator.sampling_params.logprobs, mu is the engine's"
            )
        mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask
        prox = log_probs.detach() if old_log_probs is None else old_log_probs
        b = TokenBatch.from_padded(log_probs, rollout_logprobs, advantages, mask, logp_prox=prox)
        out = chosen(b)
        return -out.S.sum(), {name: x.item() for name, x in numbers(b, out).items()}

    return loss
