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


def sample(world: World, logp_mu: Tensor, u: Tensor) -> Answers:
    """Inverse-CDF sampling from the table logp_mu `[L, P, T, M, V]` by uniforms u `[L, P, G, T]`."""
    P, T, M, V = world.sizes
    L, _, G, _ = u.shape
    cdf = logp_mu.double().exp().cumsum(-1).view(-1, V)
    next_state = world.next_state.view(-1)
    prompt = torch.arange(L * P).view(L, P, 1) * T  # row of (lane, prompt, t = 0) in units of M
    m = world.start.view(L, P, 1).expand(L, P, G)
    slots = []
    for t in range(T):
        row = (prompt + t) * M + m
        levels = cdf[row]
        token = (levels <= u[..., t, None] * levels[..., -1:]).sum(-1).clamp(max=V - 1)
        slot = row * V + token
        m = next_state[slot]
        slots.append(slot)
    reward = world.reward.gather(-1, m)
    lane = torch.arange(L).view(L, 1) * (P * T * M * V)
    return Answers(torch.stack(slots, -1).view(L, -1) - lane, reward)


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
    advantage = group_advantage(reward).flatten(1).repeat_interleave(length, -1)
    response = torch.arange(answers_per_lane).repeat_interleave(length)

    def pick(table: Tensor) -> Tensor:
        return table.flatten(1).gather(-1, slot)

    return TokenBatch(
        logp=pick(logp),
        logp_mu=pick(logp_mu),
        advantage=advantage.to(logp.dtype),
        mask=torch.ones(1, 1, dtype=torch.bool).expand(L, N),
        response=response.expand(L, N),
        logp_prox=pick(logp_prox),
        version=torch.tensor(version).expand(L, N),
        n_responses=answers_per_lane,
    )
