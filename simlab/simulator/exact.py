"""Everything about a pair (mu, pi) of tables, exactly, by dynamic programming. No sampling.

Tables are `[L, P, T, M, V]`; results are `[L]`, prompts averaged, in float64. Rewards lie in [0, 1],
so that centring gives xi = 1/2 in the bounds of SAT (33), (34), (36).
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.simulator.policies import log_normalise
from simlab.simulator.tasks.world import World

XI = 0.5


def values(world: World, p: Tensor) -> tuple[Tensor, Tensor]:
    """J `[L]` and Q `[L, P, T, M, V]`, the reward expected after each state and token, under p."""
    _, T, M, V = world.sizes
    later = world.reward
    q = torch.empty_like(p)
    for t in range(T - 1, -1, -1):
        index = world.next_state[:, :, t].flatten(-2)
        q[:, :, t] = later.gather(-1, index).unflatten(-1, (M, V))
        later = (p[:, :, t] * q[:, :, t]).sum(-1)
    return later.gather(-1, world.start.unsqueeze(-1)).mean((1, 2)), q


def visitation(world: World, p: Tensor) -> Tensor:
    """P(state m at position t | prompt) `[L, P, T, M]` under p."""
    P, T, M, _ = world.sizes
    visits = torch.zeros(p.shape[0], P, T, M, dtype=p.dtype)
    visits[:, :, 0].scatter_(-1, world.start.unsqueeze(-1), 1.0)
    for t in range(T - 1):
        flow = (visits[:, :, t, :, None] * p[:, :, t]).flatten(-2)
        visits[:, :, t + 1].scatter_add_(-1, world.next_state[:, :, t].flatten(-2), flow)
    return visits


def total_variation(p: Tensor, m: Tensor) -> Tensor:
    """(1/2) sum_a |p - m| at every state `[L, P, T, M]`."""
    return (p - m).abs().sum(-1) / 2


def entropy(logp: Tensor) -> Tensor:
    """-sum_a p log p in nats over the last axis; a token with log-prob -inf adds 0."""
    return -torch.where(logp > -torch.inf, logp.exp() * logp, 0).sum(-1)


def evaluate(world: World, logp: Tensor, logp_mu: Tensor) -> dict[str, Tensor]:
    """The improvement bound and the truth, for pi and mu given as log-prob tables.

    - `J`, `J_mu`: expected reward of pi and of mu.
    - `L_prime`: SAT (3), E_mu[R sum_t (r_t - 1)] over tokens that mu can draw.
    - `remainder` = L' - (J - J_mu): what the penalties must cover, (31).
    - `tv_sum` = sum_t E_mu TV, over positions (S of the formulas); `tv_max` = largest TV at a state that
      mu reaches (D_max).
    - `penalty_mean` = 4 xi tv_sum (34); `penalty_max` = 2 xi T (T-1) tv_max^2 (33).
    A penalty above 2 xi = 1, the range of J, is vacuous: it says nothing.
    """
    p, m = (log_normalise(x.double()).exp() for x in (logp, logp_mu))  # tables come in float32
    T = world.sizes[1]
    J, _ = values(world, p)
    J_mu, q = values(world, m)
    visits = visitation(world, m)
    step = torch.where(m > 0, (p - m) * q, 0).sum(-1)
    L_prime = (visits * step).sum((2, 3)).mean(1)
    tv = total_variation(p, m)
    tv_sum = (visits * tv).sum((2, 3)).mean(1)
    tv_max = torch.where(visits > 0, tv, 0).amax((1, 2, 3))
    return {
        "J": J,
        "J_mu": J_mu,
        "L_prime": L_prime,
        "remainder": L_prime - (J - J_mu),
        "tv_sum": tv_sum,
        "tv_max": tv_max,
        "penalty_mean": 4 * XI * tv_sum,
        "penalty_max": 2 * XI * T * (T - 1) * tv_max**2,
    }
