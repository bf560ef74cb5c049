"""What is logged of every step: the exact numbers, the mismatch, and who keeps a gradient."""

from __future__ import annotations

from torch import Tensor

from simlab.batch_stats import flat_groups, mismatch
from simlab.exact import evaluate
from simlab.sample import Answers
from simlab.stabilizers import ppo
from simlab.tasks.world import World
from simlab.tokens import TokenBatch


def measure(
    world: World,
    b: TokenBatch,
    answers: Answers,
    logp: Tensor,
    logp_mu: Tensor,
    logp_rollout: Tensor,
) -> dict[str, Tensor]:
    """What is logged of a batch and its three tables `[L, P, T, M, V]`, whatever the method; all `[L]`.

    `d_policy` and `d_impl` are the exact two-term split of SAT (2) in mean absolute nats: current
    weights against the rollout's, and trainer against engine at the rollout's weights.
    `flat_groups` is the share of groups whose answers got one and the same reward.
    """
    same_weights = logp_rollout.flatten(1).gather(-1, answers.slot)
    return {
        **evaluate(world, logp, logp_mu),
        **mismatch(b),
        "d_policy": (b.logp.detach() - same_weights).abs().mean(-1),
        "d_impl": (same_weights - b.logp_mu).abs().mean(-1),
        "reward": answers.reward.mean((1, 2)),
        "flat_groups": flat_groups(answers.reward).double().mean(-1),
    }


def gradient_shares(b: TokenBatch, active: Tensor) -> dict[str, Tensor]:
    """Shares of active tokens: `cut` have an advantage and no gradient; `unlike_ppo` keep a gradient
    where PPO (.2/.2) cuts it or the other way round, i.e. where the method acts at all."""
    reference = ppo.surrogate(b).active
    n = b.mask.sum(-1).clamp(min=1)
    cut = b.mask & (b.advantage != 0) & ~active
    return {"cut": cut.sum(-1) / n, "unlike_ppo": (active != reference).sum(-1) / n}
