"""residue: a task without text, which a model with random weights learns in minutes."""

from __future__ import annotations

from collections.abc import Sequence

from scaleup.tasks.task import Order, Prompt


class Residue:
    """A task of token ids alone: the prompt says k in 0..7, and the ids of the response should be k mod 8.

    The prompt is (k, 8 + k, 16 + k). Reward: the share of the response's tokens whose id mod 8 is k,
    0 for no tokens. Chance is 1/8 where the vocabulary is a multiple of 8. No tokenizer, no stop
    token. Eight prompts in a row that start at a multiple of 8 hold every k once. Raises ValueError
    for a `limit` below 3.
    """

    eos = None

    def __init__(self, tokenizer=None, *, seed: int = 0, limit: int | None = None):
        if limit is not None and limit < 3:
            raise ValueError(f"residue: a prompt has 3 tokens, and the limit is {limit}")
        self.size = 8
        self._order = Order(8, seed)
        self.counts: dict[str, int] = {}

    def prompt(self, i: int) -> Prompt:
        """Prompt number i of the run."""
        k = self._order(i)
        return Prompt([k, 8 + k, 16 + k], k)

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """Shares in [0, 1], one for each response of token ids."""
        return [
            sum(token % 8 == prompt.answer for token in response) / max(len(response), 1)
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    def largest_token(self) -> int:
        """The largest token id in any prompt."""
        return 23

    def close(self) -> None:
        """Nothing is open."""
