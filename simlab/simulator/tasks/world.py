"""The token MDP: a finite automaton reads the answer and decides the reward.

State = (prompt p, position t, automaton state m). J, visitation and total variation are exact by
dynamic programming over P x T x M states, where the V**T answers could never be enumerated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

EASY, FORK, FORK_SHARE = 0.85, 0.25, 0.4  # chance of the right token; share of states that fork
DIFFICULTY = 0.5  # standard deviation over prompts of a shift of the right token's log-odds


@dataclass(frozen=True)
class World:
    """W worlds side by side, one per lane. Example: health has P=8, T=10, M=3, V=8, 240 states."""

    next_state: Tensor  # [W, P, T, M, V] int64, automaton state after each token
    reward: Tensor  # [W, P, M] float64 in [0, 1], by the automaton state after T tokens
    start: Tensor  # [W, P] int64
    base: Tensor  # [W, P, T, M, V] float64 nats, log-probs of the pre-trained policy

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """P, T, M, V."""
        P, T, M, V = self.next_state.shape[1:]
        return P, T, M, V

    @cached_property
    def next_row(self) -> Tensor:
        """`[W*P*T*M*V]`: row (world, prompt, position, state) of a table after each (row, token)."""
        P, T, M, _ = self.sizes
        row = torch.arange(len(self.start) * P * T).view(-1, P, T, 1, 1) * M
        return (row + M + self.next_state).flatten()

    @staticmethod
    def stack(worlds: list[World]) -> World:
        """One record of many worlds of equal sizes."""
        names = [f.name for f in fields(World)]
        return World(**{n: torch.cat([getattr(w, n) for w in worlds]) for n in names})


def make_world(next_state: np.ndarray, reward: np.ndarray, start: int, base: np.ndarray) -> World:
    """One world from arrays [P, T, M, V], [P, M], a start state and log-probs [P, T, M, V]."""
    return World(
        torch.from_numpy(np.array(next_state, dtype=np.int64, order="C")).unsqueeze(0),
        torch.from_numpy(reward.astype(np.float64)).unsqueeze(0),
        torch.full((1, next_state.shape[0]), start, dtype=torch.int64),
        torch.from_numpy(base).unsqueeze(0),
    )


def pretrained(rng: np.random.Generator, right: np.ndarray, V: int) -> np.ndarray:
    """Base log-probs [P, T, M, V]: the right token [P, T, M] is likely at easy states, a guess at forks.

    Easy states give it 0.85, forks (40 %) 0.25, moved in log-odds by the difficulty of the prompt; the
    rest of the mass is spread unevenly over the other tokens.
    """
    p = np.where(rng.random(right.shape) < FORK_SHARE, FORK, EASY)
    shift = DIFFICULTY * rng.standard_normal((right.shape[0], 1, 1))
    p = 1 / (1 + np.exp(-(np.log(p / (1 - p)) + shift)))
    chosen = np.eye(V, dtype=bool)[right]
    weight = np.where(chosen, 0.0, np.exp(0.5 * rng.standard_normal((*right.shape, V))))
    rest = (1 - p)[..., None] * weight / weight.sum(-1, keepdims=True)
    return np.log(np.where(chosen, p[..., None], rest))
