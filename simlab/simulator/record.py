"""What is logged of a step of the simulator: the exact numbers, and what both worlds measure."""

from __future__ import annotations

from torch import Tensor

from simlab.core.advantages import flat_groups
from simlab.core.tokens import TokenBatch
from simlab.simulator.exact import evaluate
from simlab.simulator.sample import Answers
from simlab.simulator.tasks.world import World
from simlab.study.measure import measure


def record(
    world: World,
    b: TokenBatch,
    active: Tensor,
    answers: Answers,
    logp: Tensor,
    logp_mu: Tensor,
    logp_rollout: Tensor,
) -> dict[str, Tensor]:
    """The logged numbers of a batch and its three tables `[L, P, T, M, V]`, whatever the method; all `[L]`.

    docs/results.md has their names, units and meanings.
    """
    same_weights = logp_rollout.flatten(1).gather(-1, answers.slot)
    return {
        **evaluate(world, logp, logp_mu),
        **measure([b], [active], logp_rollout=[same_weights]),
        "reward": answers.reward.mean((1, 2)),
        "flat_groups": flat_groups(answers.reward).double().mean(-1),
    }
