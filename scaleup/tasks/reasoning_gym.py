"""reasoning_gym: problems that a generator makes, scored by its own verifier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scaleup.tasks.task import Order, Prompt
from scaleup.tasks.text import TextTask
from scaleup.tasks.verifier import VerifierPool
from simlab.core.arguments import check_name


class ReasoningGym(TextTask):
    """Problems of a generator of reasoning-gym, and its verifier.

    `size` problems make an epoch. `extract` says what part of the text is scored: last_number,
    tagged (<answer>...</answer>) or text. Their scores give part of the reward to a text that
    only contains the right one ("14" for "4" is worth 0.5); `exact=True` pays for full scores only.
    Other options are those of the generator. A response that cannot be scored within `timeout`
    seconds, or whose scoring fails, is worth 0; `counts` says how many (gym.py says why).
    Prompts longer than `limit` tokens are skipped: the next one of the epoch takes their place. Raises
    ValueError for an option that the generator does not take, and where none of a hundred in a row
    is short enough.
    """

    def __init__(
        self,
        tokenizer,
        *,
        dataset: str,
        seed: int = 0,
        size: int = 10_000,
        extract: str = "last_number",
        exact: bool = False,
        workers: int = 2,
        timeout: float = 10.0,
        chat: bool = True,
        system: str | None = None,
        limit: int | None = None,
        **options,
    ):
        super().__init__(tokenizer, chat, system, limit)
        from scaleup.tasks import gym

        check_name("extract", extract, gym.EXTRACT)
        # problem j of theirs is drawn with seed + j: neighbouring seeds would share their problems
        drawn = int(np.random.SeedSequence(seed).generate_state(1)[0]) // 2
        try:
            self._data = gym.create_dataset(dataset, seed=drawn, size=size, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"reasoning_gym: {dataset} {options}: {error}") from None
        self.size, self._order = size, Order(size, seed)
        self._exact, self._packed = exact, gym.packed
        setup = {"name": dataset, "seed": drawn, "size": size, "extract": extract} | options
        self._verifiers = VerifierPool(workers, timeout, "scaleup.tasks.gym:scorer", setup)
        self.counts = self._verifiers.counts

    def prompt(self, i: int) -> Prompt:
        """Prompt number i of the run; its answer is reasoning-gym's whole entry."""
        for k in range(min(self.size, 100)):
            entry = self._data[self._order(i + k)]
            prompt = self.encode([{"role": "user", "content": entry["question"]}], entry)
            if self.limit is None or len(prompt.ids) <= self.limit:
                return prompt
        raise ValueError(
            f"reasoning_gym: prompt {i} and those after it have more than {self.limit} tokens, the limit"
        )

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """Scores in [0, 1] of reasoning-gym, one for each response of token ids."""
        pairs = zip(prompts, responses, strict=True)
        scores = self._verifiers([(self._packed(p.answer), self.decode(x)) for p, x in pairs])
        return [float(score >= 1) for score in scores] if self._exact else scores
