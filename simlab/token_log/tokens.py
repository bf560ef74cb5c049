"""All tokens of a log as flat arrays, whatever the layout of its files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

PER_TOKEN = (
    "before",
    "proximal",
    "advantage",
    "entropy",
    "token",
    "prefill",
    "prefill_again",
    "trainer_again",
)  # numbers beside the pair
PER_RESPONSE = ("reward", "group", "step")


@dataclass(frozen=True)
class Tokens:
    """All tokens of a log, response after response: N tokens, R responses."""

    trainer: np.ndarray  # [N] nats
    rollout: np.ndarray  # [N] nats
    mask: np.ndarray  # [N] bool, True where the policy sampled the token
    starts: np.ndarray  # [R + 1], where a response begins
    files: tuple[Path, ...]
    file: np.ndarray  # [R], index in `files`
    row: np.ndarray  # [R], number in its file
    keys: np.ndarray  # [R, K], numbers that name a response; K = 0 if there are none
    version: np.ndarray | None = None  # [N], of the weights that sampled; NaN is unknown
    trained: np.ndarray | None = None  # [N], version of the weights of `trainer`; NaN is unknown
    at_rollout: bool = False  # `trainer` was scored at the rollout's weights
    token_row: np.ndarray | None = None  # [N], row in its file of a log with one row a token
    columns: tuple[str, ...] = ()  # `trainer`, `rollout` and `mask` in the file
    extra: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # by role, [N] or [R]; NaN is unknown

    def response(self, token: int) -> int:
        """Number of the response that a token stands in."""
        return int(np.searchsorted(self.starts, token, side="right")) - 1

    @cached_property
    def responses(self) -> np.ndarray:
        """Number of the response of each token `[N]`."""
        return np.repeat(np.arange(len(self.row), dtype=np.int32), np.diff(self.starts))

    def place(self, token: int) -> str:
        """Row (of a text: line) and, where a row is a response, position of a token."""
        from simlab.token_log.tables import place  # polars, which arrays alone do not need

        r = self.response(token)
        if not self.files:
            return f"response {self.row[r]}, token {token - self.starts[r]}"
        path = self.files[self.file[r]]
        name = f"{path.name}, " if len(self.files) > 1 else ""
        if self.token_row is not None:
            return name + place(path, int(self.token_row[token]))
        return f"{name}{place(path, int(self.row[r]))}, token {token - self.starts[r]}"


def joined(parts: list[Tokens]) -> Tokens:
    """The tokens of several files as one log; a column that a file lacks is unknown there."""
    if len(parts) == 1:
        return parts[0]
    offsets = np.cumsum([0, *(len(x.mask) for x in parts)])
    inner = [x.starts[:-1] + offset for x, offset in zip(parts, offsets, strict=False)]
    many: dict[str, Any] = {"starts": np.concatenate([*inner, offsets[-1:]])}
    files = tuple(dict.fromkeys(path for x in parts for path in x.files))
    numbers = [files.index(x.files[0]) if x.files else 0 for x in parts]
    many["file"] = np.repeat(numbers, [len(x.row) for x in parts])
    many["files"] = files
    for name in ("version", "trained", "token_row"):
        some = [getattr(x, name) for x in parts]
        if any(x is not None for x in some):
            unknown = (np.full(len(x.mask), np.nan) for x in parts)
            some = [u if x is None else x for x, u in zip(some, unknown, strict=True)]
            many[name] = np.concatenate(some)
    many["extra"] = {}
    for name in dict.fromkeys(x for part in parts for x in part.extra):
        per_token = name in (*PER_TOKEN, "text")
        sizes = (len(x.mask) if per_token else len(x.row) for x in parts)
        unknown = (np.full(size, "" if name == "text" else np.nan) for size in sizes)
        some = [x.extra.get(name, u) for x, u in zip(parts, unknown, strict=True)]
        many["extra"][name] = np.concatenate(some)
    width = min(x.keys.shape[1] for x in parts)
    many["keys"] = np.concatenate([x.keys[:, :width] for x in parts])
    for name in ("trainer", "rollout", "mask", "row"):
        many[name] = np.concatenate([getattr(x, name) for x in parts])
    return replace(parts[0], **many)
