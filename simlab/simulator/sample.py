"""Answers drawn from mu, read by the automaton, written into the one record."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from simlab.core.tokens import TokenBatch
from simlab.simulator.exact import entropy, total_variation
from simlab.simulator.tasks.world import World


class Answers(NamedTuple):
    """G answers to each of P prompts, N = P * G * T tokens in this order."""

    slot: Tensor  # [L, N] int64, index of (state, token) in a table [L, P*T*M*V]
    reward: Tensor  # [L, P, G] float64


def cumulative(logp_mu: Tensor) -> Tensor:
    """Cumulative probabilities `[V - 1, L*P*T*M]` of a table `[L, P, T, M, V]`, for `sample`."""
    cdf = logp_mu.double().exp().flatten(0, -2).cumsum(-1)
    return (cdf / cdf[:, -1:])[:, :-1].t().contiguous()


def compose(engine: dict[int, tuple[Tensor, ...]], versions: list[int]) -> tuple[Tensor, ...]:
    """The tables of a batch whose position t was sampled by versions[t].

    `engine` has (log mu, its `cumulative`, log pi of the trainer) by version, and so is the answer;
    log mu and log pi are `[L, P, T, M, V]`. One version everywhere gives its own tables, not copies.
    """
    if len(set(versions)) == 1:
        return engine[versions[0]]
    states = engine[versions[0]][0].shape[:-1]
    held = {v: (mu, cdf.unflatten(1, states), pi) for v, (mu, cdf, pi) in engine.items()}
    cuts = [t for t, v in enumerate(versions) if t == 0 or v != versions[t - 1]]
    spans = list(zip(cuts, [*cuts[1:], len(versions)], strict=True))

    def joined(table: int, axis: int) -> Tensor:
        return torch.cat(
            [held[versions[t]][table].narrow(axis, t, end - t) for t, end in spans], axis
        )

    return joined(0, 2), joined(1, 3).flatten(1), joined(2, 2)


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
    answers: Answers,
    tables: dict[str, Tensor],
    advantage: Tensor,
    age: int | list[int],
    **fields: Tensor,
) -> TokenBatch:
    """The record of sampled answers.

    `tables` `[L, P, T, M, V]` are picked at the sampled (state, token), by the name of their field;
    `logp` carries the gradient. advantage is `[L, P, G]`, one number an answer; age is one
    number, or one for each of the T positions of an answer; other fields are `[L, N]`.
    """
    slot = answers.slot
    L, N = slot.shape
    answers_per_lane = advantage[0].numel()
    length = N // answers_per_lane
    picked = {name: table.flatten(1).gather(-1, slot) for name, table in tables.items()}
    advantage = advantage.to(picked["logp"].dtype).flatten(1).unsqueeze(-1)
    return TokenBatch(
        **picked,
        advantage=advantage.expand(-1, -1, length).reshape(L, N),
        mask=torch.ones(1, 1, dtype=torch.bool).expand(L, N),
        response=(torch.arange(N) // length).expand(L, N),
        age=torch.tensor(age).expand(answers_per_lane, length).flatten().expand(L, N),
        n_responses=answers_per_lane,
        lanes=True,
        **fields,
    )


def of_responses(wanted: tuple[str, ...], answers: Answers, horizon: int) -> dict[str, Tensor]:
    """The wanted fields `[L, N]` that belong to an answer: its reward, its prompt, a token's place in it."""
    index = torch.arange(answers.slot.shape[-1])
    fields = {
        "reward": answers.reward.float().flatten(1).repeat_interleave(horizon, -1),
        "group": (index // (answers.reward.shape[-1] * horizon)).expand(answers.slot.shape),
        "position": (index % horizon).expand(answers.slot.shape),
    }
    return {name: x for name, x in fields.items() if name in wanted}


def full_distribution(
    wanted: tuple[str, ...], answers: Answers, tables: dict[str, Tensor], horizon: int
) -> dict[str, Tensor]:
    """The wanted optional fields that only the whole vocabulary tells, from the tables of `token_batch`.

    Entropy and Gini index of mu, entropy of the proximal policy, total variation between mu and pi, all at
    the token's state; the head, which here is the whole vocabulary, mu's likeliest tokens first, `topk` with the gradient of `logp`;
    and `stratum`, the position in the answer.
    """
    V = tables["logp"].shape[-1]
    slot = answers.slot
    rows = pi, mu = [tables[x].flatten(1, -2) for x in ("logp", "logp_mu")]  # [L, states, V]
    state = slot // V
    of_state = {
        "entropy_mu": lambda: entropy(mu),
        "entropy_prox": lambda: entropy(tables["logp_prox"].detach().flatten(1, -2)),
        "gini_mu": lambda: 1 - mu.exp().square().sum(-1),
        "tv": lambda: total_variation(pi.detach().exp(), mu.exp()),
    }
    fields = {name: f().gather(-1, state) for name, f in of_state.items() if name in wanted}
    if "stratum" in wanted:
        fields["stratum"] = (torch.arange(slot.shape[-1]) % horizon).expand(slot.shape)
    if "topk" in wanted:
        likeliest = mu.topk(V, -1).indices
        index = state.unsqueeze(-1).expand(*state.shape, V)
        itself = likeliest.gather(-2, index) == (slot % V).unsqueeze(-1)
        for name, x in zip(("topk", "topk_mu"), rows, strict=True):
            top = x.gather(-1, likeliest).gather(-2, index)
            fields[name] = torch.where(itself, -torch.inf, top)
    return fields
