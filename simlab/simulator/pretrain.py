"""Where every run starts: the worlds of its seeds and a policy fitted to the base distribution."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from simlab.simulator.config import WorldSpec
from simlab.simulator.exact import visitation
from simlab.simulator.policies import POLICIES, log_normalise
from simlab.simulator.rng import INIT, WORLD, Generators
from simlab.simulator.tasks import TASKS
from simlab.simulator.tasks.world import World

FIT_STEPS, FIT_LR = 300, 0.03


@lru_cache(maxsize=4)
def pretrain(spec: WorldSpec, seeds: tuple[int, ...]) -> tuple[World, Tensor, dict[str, Tensor]]:
    """The worlds of these seeds, state features X `[L, S, F]`, and weights fitted to the base policy.

    The fit minimises KL(base || pi), half by visits under the base policy, half evenly over states.
    """
    build = TASKS[spec.task].build
    rng = Generators(seeds, WORLD)
    world = World.stack(
        [
            build(generator, P=spec.prompts, T=spec.horizon, V=spec.vocab)
            for generator in rng.generators
        ]
    )
    P, T, M, V = world.sizes
    policy, size = (
        POLICIES[spec.policy],
        {"states": P * T * M, "features": spec.features, "vocab": V},
    )
    rng = Generators(seeds, INIT)
    X = spec.feature_scale * rng.normal(size["states"], spec.features)
    starts = [policy.init(generator, **size) for generator in rng.generators]
    w = {name: torch.from_numpy(np.stack([s[name] for s in starts])).float() for name in starts[0]}
    if "z" in w:
        return world, X, {"z": world.base.flatten(1, 3).float()}
    base = world.base.flatten(1, 3)
    share = visitation(world, world.base.exp()).flatten(1) / (P * T) + 1 / (P * T * M)
    weight = (share.unsqueeze(-1) * base.exp()).float()
    optimizer = torch.optim.Adam(list(w.values()), lr=FIT_LR, foreach=True)
    for x in w.values():
        x.requires_grad_()
    for _ in range(FIT_STEPS):
        optimizer.zero_grad()
        loss = -(weight * log_normalise(policy.logits(w, X))).sum()
        loss.backward()
        optimizer.step()
    return world, X, {name: x.detach() for name, x in w.items()}
