"""What tasks of text share, and the tokenizer of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scaleup.models import weights
from scaleup.tasks.task import Prompt
from scaleup.tasks.verifier import VerifierPool


class TextTask:
    """What tasks of text share: a tokenizer, its chat template, its stop token, verifier processes.

    With `chat=False` the messages' contents are joined by newlines instead. `system` is the
    content of a first message of that role. Raises ValueError without a tokenizer or without a template.
    """

    _verifiers: VerifierPool  # a task makes its own
    counts: dict[str, int]  # of that pool

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
        """Messages of roles and contents as one text, open for the response."""
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
        """A prompt of messages of roles and contents, open for the response."""
        text = self.text(messages)
        return Prompt(self.ids([text])[0], answer, text)

    def decode(self, response: Sequence[int]) -> str:
        """Text of a response, without special tokens."""
        return self.tokenizer.decode(response, skip_special_tokens=True)

    def largest_token(self) -> int:
        """The largest token id of the tokenizer."""
        return max(self.tokenizer.get_vocab().values())

    def close(self) -> None:
        """End the processes that verify."""
        self._verifiers.close()


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
