"""Tasks: the i-th prompt of a run, and the rewards of answers to it.

    task = make("reasoning_gym", tokenizer, seed=0, dataset="chain_sum", max_terms=2, max_digits=1)
    prompt = task.prompt(i)                              # pure in (seed, i): a run resumes at any i
    rewards = task.rewards([prompt], [[1, 2, 3, ...]])   # of token ids
    task.size                                            # prompts of an epoch
    task.counts                                          # {} or {"timeout": 0, ...}
    task.close()

The prompts of a task are a fixed list; every epoch goes once through it, in an order of its own
(balanced math problems: through each file).

Every task takes `limit`, the largest number of tokens a prompt may have after the chat template:
engines refuse a prompt that leaves no room for max_new_tokens in the model's context. None is no
limit.

`counts` are totals of the task object since it was made, so they never fall, and a resumed run
counts from 0: problems left out for their length ("long"), and answers that could not be checked and
scored 0, because the check hung ("timeout"), ended its process ("crash"), or could not read the right
answer ("unreadable"). A task where none of this can happen has no counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from scaleup import weights
from scaleup.problems import Problem, problems
from scaleup.verify import Judges
from simlab.arguments import call, check_call, check_name


@dataclass(frozen=True)
class Prompt:
    """What an engine is asked, and what is right."""

    ids: list[int]  # token ids, chat template included
    answer: object  # of the task's own kind
    text: str | None = None  # the same as ids, where the task has text


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


class Residue:
    """A task of token ids alone: the prompt says k in 0..7, and the answer shall be of ids = k mod 8.

    The prompt is (k, 8 + k, 16 + k). Reward: the share of the answer's tokens whose id mod 8 is k,
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

    def rewards(self, prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]]) -> list[float]:
        """One reward in [0, 1] for each answer of token ids; prompts[j] belongs to outputs[j]."""
        return [
            sum(token % 8 == prompt.answer for token in output) / max(len(output), 1)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def largest_token(self) -> int:
        """The largest token id in any prompt."""
        return 23

    def close(self) -> None:
        """Nothing is open."""


class TextTask:
    """What tasks of text share: a tokenizer, its chat template, its stop token, and judges of answers.

    With `chat=False` the messages' contents are joined by newlines instead. `system` is a first
    message of the system. Raises ValueError without a tokenizer or without a template.
    """

    _judges: Judges  # a task makes its own
    counts: dict[str, int]  # theirs

    def __init__(
        self,
        tokenizer,
        chat: bool = True,
        system: str | None = None,
        limit: int | None = None,
    ):
        if tokenizer is None:
            raise ValueError("this task needs a tokenizer, and the model's folder has none")
        if chat and not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; say chat = false for plain text")
        self.tokenizer, self.chat, self.system, self.limit = tokenizer, chat, system, limit
        self.eos: int | None = tokenizer.eos_token_id

    def text(self, messages: list[dict[str, str]]) -> str:
        """Messages of roles and contents as one text, open for the answer."""
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        if not self.chat:
            return "\n".join(message["content"] for message in messages)
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text."""
        # the template writes the special tokens itself
        return self.tokenizer(texts, add_special_tokens=not self.chat)["input_ids"]

    def encode(self, messages: list[dict[str, str]], answer: object) -> Prompt:
        """A prompt of messages of roles and contents, open for the answer."""
        text = self.text(messages)
        return Prompt(self.ids([text])[0], answer, text)

    def decode(self, output: Sequence[int]) -> str:
        """Text of an answer, without special tokens."""
        return self.tokenizer.decode(output, skip_special_tokens=True)

    def largest_token(self) -> int:
        """The largest token id of the tokenizer."""
        return max(self.tokenizer.get_vocab().values())

    def close(self) -> None:
        """End the processes that verify."""
        self._judges.close()


class ReasoningGym(TextTask):
    """Problems of a generator of reasoning-gym, and its verifier.

    `size` problems make an epoch. `extract` says what of the text is the answer: last_number,
    tagged (<answer>...</answer>) or text. Their scores give part of the reward to an answer that
    only contains the right one ("14" for "4" is worth .5); `exact=True` pays for full scores only.
    Other options are those of the generator. An answer that cannot be scored within `timeout`
    seconds, or whose scoring fails, is worth 0; `counts` says how many (scaleup/gym.py says why).
    In place of a prompt of more than `limit` tokens stands the next of the epoch that is not. Raises
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
        from scaleup import gym

        check_name("extract", extract, gym.EXTRACT)
        # problem j of theirs is drawn with seed + j: neighbouring seeds would share their problems
        theirs = int(np.random.SeedSequence(seed).generate_state(1)[0]) // 2
        try:
            self._data = gym.create_dataset(dataset, seed=theirs, size=size, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"reasoning_gym: {dataset} {options}: {error}") from None
        self.size, self._order = size, Order(size, seed)
        self._exact, self._packed = exact, gym.packed
        setup = {"name": dataset, "seed": theirs, "size": size, "extract": extract} | options
        self._judges = Judges(workers, timeout, "scaleup.gym:scorer", setup)
        self.counts = self._judges.counts

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

    def rewards(self, prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]]) -> list[float]:
        """One reward in [0, 1] for each answer of token ids; prompts[j] belongs to outputs[j]."""
        pairs = zip(prompts, outputs, strict=True)
        scores = self._judges([(self._packed(p.answer), self.decode(x)) for p, x in pairs])
        return [float(score >= 1) for score in scores] if self._exact else scores


class Math(TextTask):
    """Math problems from files, answers checked by math-verify (scaleup/verify.py): 1 or 0.

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

    An answer that cannot be checked within `timeout` seconds, or whose check ends its process, is
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
        verifier: str = "scaleup.verify:math_verify",
        chat: bool = True,
        system: str | None = None,
        limit: int | None = None,
    ):
        super().__init__(tokenizer, chat, system, limit)
        parts = problems(files, prompt, answer, unique, expect)
        found, parts = sum(map(len, parts)), [self._short(part) for part in parts]
        self.size = left = sum(map(len, parts))
        if not left:
            raise ValueError(f"math: all {found} prompts have more than {limit} tokens, the limit")
        if not balanced:
            parts = [[problem for part in parts for problem in part]]
        if not all(parts):
            raise ValueError(
                f"math: balanced draws from every file, but no problem is left of file number "
                f"{parts.index([])} (the first is 0)"
            )
        self._parts = [(part, Order(len(part), seed, k)) for k, part in enumerate(parts)]
        self._judges = Judges(workers, timeout, verifier)
        self.counts = self._judges.counts  # the same dict: it goes on counting
        self.counts["long"] = found - left

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

    @property
    def timeouts(self) -> int:
        """Answers whose check hung or ended its process; they scored 0."""
        return self.counts["timeout"] + self.counts["crash"]

    def prompt(self, i: int) -> Prompt:
        """Prompt number i of the run."""
        place, k = divmod(i, len(self._parts))
        part, order = self._parts[k]
        return self.encode(*part[order(place)])

    def rewards(self, prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]]) -> list[float]:
        """One reward, 0 or 1, for each answer of token ids; prompts[j] belongs to outputs[j]."""
        pairs = zip(prompts, outputs, strict=True)
        return self._judges([(p.answer, self.decode(output)) for p, output in pairs])


TASKS = {"residue": Residue, "reasoning_gym": ReasoningGym, "math": Math}


OWN = {"tokenizer", "seed", "limit"}  # options that a run gives itself


def check_options(name: str, options: dict) -> None:
    """Raises ValueError for a task or options that do not exist."""
    check_name("task", name, TASKS)
    if own := OWN & options.keys():
        raise ValueError(f"task {name}: {min(own)} is not an option, the run sets it")
    check_call(f"task {name}", TASKS[name], None, **options)


def make(name: str, tokenizer=None, **options):
    """The task of a name. Raises ValueError for a name or options that do not exist or do not fit."""
    check_name("task", name, TASKS)
    return call(f"task {name}", TASKS[name], tokenizer, **options)


def check_tokenizer(tokenizer, config: dict) -> None:
    """Raises ValueError where a tokenizer does not belong to the model of config.json `config`."""
    largest, vocabulary = max(tokenizer.get_vocab().values()), config["vocab_size"]
    if largest >= vocabulary:
        raise ValueError(
            f"the tokenizer has token {largest}, but the model's vocabulary ends at {vocabulary - 1}"
        )
    ours, theirs = tokenizer.eos_token_id, config.get("eos_token_id")
    if ours not in (theirs if isinstance(theirs, list) else [theirs]):
        raise ValueError(f"the tokenizer stops at token {ours}, but the model's config at {theirs}")


def load_tokenizer(folder: str | Path):
    """The tokenizer of a checkpoint folder, checked against its config; None if it has none."""
    kinds = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((Path(folder) / name).is_file() for name in kinds):
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_tokenizer(tokenizer, weights.read_config(folder))
    return tokenizer
