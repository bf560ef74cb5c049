"""What a task is: the i-th prompt of a run, and the rewards of responses to it.

    task = make("reasoning_gym", tokenizer, seed=0, dataset="chain_sum", max_terms=2, max_digits=1)
    prompt = task.prompt(i)                              # pure in (seed, i): a run resumes at any i
    rewards = task.rewards([prompt], [[1, 2, 3, ...]])   # token ids of the responses
    task.size                                            # prompts of an epoch
    task.counts                                          # {} or {"timeout": 0, ...}
    task.close()

An answer is what is right; what the model says is a response. The prompts of a task are a fixed list;
every epoch goes once through it, in an order of its own (balanced math problems: through each file).

Every task takes `limit`, the largest number of tokens a prompt may have after the chat template:
engines refuse a prompt that leaves no room for max_new_tokens in the model's context. None is no
limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """What an engine is asked, and the right answer."""

    ids: list[int]  # token ids, chat template included
    answer: object  # the right one, in the task's own form
    text: str | None = None  # the same as ids, where the task has text


@runtime_checkable
class Task(Protocol):
    """The members that a run uses.

    `counts` are totals of the task object since it was made, so they never fall, and a resumed run
    counts from 0: problems left out for their length ("long"), and responses that could not be checked
    and scored 0, because the check hung ("timeout"), ended its process ("crash"), or could not read the
    right answer ("unreadable"). A task where none of this can happen has no counts.
    """

    size: int
    """Prompts of an epoch."""
    counts: dict[str, int]
    eos: int | None
    """The token that ends a response; None: every response has max_new_tokens tokens."""

    def prompt(self, i: int) -> Prompt:
        """Prompt number i of the run; a pure function of i and the seed."""

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """A reward in [0, 1] for each response of token ids; prompts[j] belongs to responses[j].

        Raises ValueError for another number of responses than prompts.
        """

    def largest_token(self) -> int:
        """The largest token id that a prompt may have."""

    def close(self) -> None:
        """End what the task runs."""


class Order:
    """Item number i of an endless stream over n items; each epoch is a permutation of its own.

    Streams of one seed and different `part` are independent.
    """

    def __init__(self, n: int, seed: int, part: int = 0):
        self.n = n
        self._epoch = lru_cache(2)(lambda e: np.random.default_rng([seed, e, part]).permutation(n))

    def __call__(self, i: int) -> int:
        epoch, place = divmod(i, self.n)
        return int(self._epoch(epoch)[place])
