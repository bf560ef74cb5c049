"""math: problems of files with one right answer each, checked symbolically."""

from __future__ import annotations

from collections.abc import Sequence

from scaleup.tasks.problems import Problem, problems
from scaleup.tasks.task import Order, Prompt
from scaleup.tasks.text import TextTask
from scaleup.tasks.verifier import VerifierPool


class Math(TextTask):
    """Math problems from files, responses checked by math-verify (verifier.py): 1 or 0.

    `files` are parquet files (local, or `hf://datasets/...` of the Hugging Face hub) or JSON lines.
    `prompt` and `answer` name the columns, for a single file in a table: `{path = "...", prompt =
    "...", answer = "..."}`. The defaults are those of DAPO-Math-17k; Dolci-RL-Zero-Math-7B has
    `answer = "ground_truth"`. `unique=True` drops a problem whose prompt was there before. `expect`
    is the number of problems there must be then. Problems whose prompts have more than `limit`
    tokens are left out after that.

    All problems are shuffled together, so files mix by size and every problem comes once an epoch.
    `balanced=True` draws from the files in turn: each file gives every n-th prompt of n files, in a
    shuffled order and with epochs of its own, so a smaller file comes round sooner. The SAT paper
    (2607.18722, App. F) says "balanced sampling" and does not define it; this is one reading.

    A response that cannot be checked within `timeout` seconds, or whose check ends its process, is
    worth 0; `counts` says how many. Raises ValueError naming file, row (the first is 0) and column,
    and where no problem is left (`balanced`: of any file).
    """

    def __init__(
        self,
        tokenizer,
        *,
        files: str | dict | Sequence[str | dict],
        seed: int = 0,
        prompt: str = "prompt",
        answer: str = "reward_model.ground_truth",
        expect: int | None = None,
        unique: bool = False,
        balanced: bool = False,
        workers: int = 2,
        timeout: float = 10.0,
        verifier: str = "scaleup.tasks.verifier:math_verify",
        chat: bool = True,
        system: str | None = None,
        limit: int | None = None,
    ):
        super().__init__(tokenizer, chat, system, limit)
        parts = problems(files, prompt, answer, unique, expect)
        total, parts = sum(map(len, parts)), [self._short(part) for part in parts]
        self.size = left = sum(map(len, parts))
        if not left:
            raise ValueError(f"math: all {total} prompts have more than {limit} tokens, the limit")
        if not balanced:
            parts = [[problem for part in parts for problem in part]]
        if not all(parts):
            raise ValueError(
                f"math: balanced draws from every file, but no problem is left of file number "
                f"{parts.index([])} (the first is 0)"
            )
        self._parts = [(part, Order(len(part), seed, k)) for k, part in enumerate(parts)]
        self._verifiers = VerifierPool(workers, timeout, verifier)
        self.counts = self._verifiers.counts  # the same dict, which the pool goes on counting in
        self.counts["long"] = total - left

    def _short(self, part: list[Problem]) -> list[Problem]:
        """The problems whose prompts are within the limit."""
        if self.limit is None:
            return part
        kept = []
        for i in range(0, len(part), 1024):  # batches are fast; a single one would be large
            some = part[i : i + 1024]
            ids = self.ids([self.text(messages) for messages, _ in some])
            kept += [p for p, its in zip(some, ids, strict=True) if len(its) <= self.limit]
        return kept

    def prompt(self, i: int) -> Prompt:
        """Prompt number i of the run."""
        place, k = divmod(i, len(self._parts))
        part, order = self._parts[k]
        return self.encode(*part[order(place)])

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """0 or 1 for each response of token ids."""
        pairs = zip(prompts, responses, strict=True)
        return self._verifiers([(p.answer, self.decode(response)) for p, response in pairs])
