"""Answers drawn from mu, read by the automaton, written into the one record."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from simlab.batch_stats import group_advantage
from simlab.tasks.world import World
from simlab.tokens import TokenBatch


class Answers(NamedTuple):
    """G answers to each of P prompts, N = P * G * T tokens in this order."""

    slot: Tensor  # [L, N] int64, index of (state, token) in a table [L, P*T*M*V]
    reward: Tensor  # [L, P, G] float64


def cumulative(logp_mu: Tensor) -> Tensor:
    """Cumulative probabilities `[V - 1, L*P*T*M]` of a table `[L, P, T, M, V]`, for `sample`."""
    cdf = logp_mu.double().exp().flatten(0, -2).cumsum(-1)
    return (cdf / cdf[:, -1:])[:, :-1].t().contiguous()


def sample(world: World, cdf: Tensor, u: Tensor) -> Answers:
    """Inverse-CDF sampling from `cumulative(logp_mu)` by uniforms u `[L, P, G, T]` in [0, 1)."""
    P, T, M, V = world.sizes
    L, _, G, _ = u.shape
    u = u.permute(3, 0, 1, 2).reshape(T, -1)
    # a row stands for (lane, prompt, position, automaton state)
    first = torch.arange(L * P).view(L, P) * T * M + world.start
    row = first.unsqueeze(-1).expand(L, P, G).reshape(-1)
    slots = torch.empty(T, L * P * G, dtype=torch.int64)
    for t in range(T):
        torch.sum(cdf.index_select(1, row) <= u[t], 0, out=slots[t])
        slots[t] += row * V
        row = world.next_row[slots[t]]
    m = (row % M).view(L, P, G)
    slot = slots.view(T, L, P * G).permute(1, 2, 0).reshape(L, -1)
    lane = torch.arange(L).view(L, 1) * (P * T * M * V)
    return Answers(slot - lane, world.reward.gather(-1, m))


def token_batch(
    answers: Answers, logp: Tensor, logp_mu: Tensor, logp_prox: Tensor, version: int
) -> TokenBatch:
    """The record of sampled answers, from log-prob tables `[L, P, T, M, V]`.

    `logp` carries the gradient; advantages are GRPO's, constant over an answer.
    """
    slot, reward = answers
    L, N = slot.shape
    answers_per_lane = reward[0].numel()
    length = N // answers_per_lane
    advantage = group_advantage(reward).to(logp.dtype).flatten(1).unsqueeze(-1)

    def pick(table: Tensor) -> Tensor:
        return table.flatten(1).gather(-1, slot)

    return TokenBatch(
        logp=pick(logp),
        logp_mu=pick(logp_mu),
        advantage=advantage.expand(-1, -1, length).reshape(L, N),
        mask=torch.ones(1, 1, dtype=torch.bool).expand(L, N),
        response=(torch.arange(N) // length).expand(L, N),
        logp_prox=pick(logp_prox),
        version=torch.tensor(version).expand(L, N),
        n_responses=answers_per_lane,
    )
