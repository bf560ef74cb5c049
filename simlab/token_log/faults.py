"""Faults of single numbers of a log: what is no log-prob, no version, no measurement or there twice.

Functions take flat arrays of one order, N tokens, and a mask of those the policy sampled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simlab.token_log.tokens import Tokens

FAR = (1.0, 4.0)  # nats below 0 where the other side is exactly 0: 8 median gaps, in this range
ABSURD = 20.0  # nats; a ratio of 5e8
FEW = 1e-3  # share of absurd tokens that may be set aside
ROUNDING = 1e-5  # nats above 0 that are rounding
ON_GRID = 0.9  # share of numbers on a grid that is no accident
FEW_VALUES = 16  # different values that can show a grid
MOST_VALUES = 4096  # that are looked through for them
MOST_ON_GRID = 1 << 21  # tokens, evenly spaced, that the share on a grid is taken from
LEAST_STEPS = 4  # gaps that can
TINY = 1e-5  # nats; below it a gap is 0
LONG = 16  # tokens of a response whose copy is no accident


class Finding(NamedTuple):
    """What was found, with the number that decided."""

    cause: str
    number: float
    sentence: str  # `{place}` is where `token` stands
    refuses: bool = True  # as noise; an audit sets `tokens` aside and goes on
    token: int | None = None  # the first
    tokens: np.ndarray | None = None  # that it speaks of; None is all of them

    def text(self, tokens: Tokens) -> str:
        """The sentence, with the place of its token."""
        if self.token is None:
            return self.sentence
        return self.sentence.format(place=tokens.place(self.token))


def versions(version, trained, mask: np.ndarray, at_rollout: bool) -> list[Finding]:
    """Placeholders, negative ages, unknown versions and policy lag, by the versions of the weights."""
    if version is None or not mask.any():
        return []

    def first(bad: np.ndarray, cause: str, sentence: str) -> list[Finding]:
        i = int(bad.argmax())
        words = sentence.replace("{n}", f"{int(bad.sum()):,} of {int(mask.sum()):,}")
        words = words.replace("{v}", f"{version[i]:.0f}")
        words = words.replace("{s}", "" if trained is None else f"{trained[i]:.0f}")
        return [Finding(cause, float(version[i]), words, token=i, tokens=np.flatnonzero(bad))]

    if (bad := mask & (version < 0)).any():
        return first(
            bad,
            "placeholder version",
            "{place}: weight_versions is {v} (at {n} sampled tokens): a placeholder, not a version",
        )
    if trained is not None and (bad := mask & (version > trained)).any():
        return first(
            bad,
            "negative age",
            "{place}, was sampled at version {v} and scored at version {s} ({n} tokens): a negative age",
        )
    if at_rollout:
        return []
    if trained is None:
        return first(
            mask,
            "unknown version",
            "weight_versions without trainer_version: policy lag cannot be told from noise; add it, or trainer_logprobs_before",
        )
    if (bad := mask & (np.isnan(version) | np.isnan(trained))).any():
        return first(
            bad,
            "unknown version",
            "{place}: the version of the weights is unknown (at {n} sampled tokens), so lag cannot be told from noise",
        )
    if (bad := mask & (version != trained)).any():
        return first(
            bad,
            "staleness",
            "{place}, was sampled at version {v} and scored at version {s}: policy lag, not noise; trainer_logprobs_before (at the rollout's weights) is needed",
        )
    return []


def not_a_number(x: np.ndarray, mask: np.ndarray, name: str) -> Finding | None:
    """A sampled token without a finite log-prob."""
    if not (bad := mask & ~np.isfinite(x)).any():
        return None
    i, n = int(bad.argmax()), int(bad.sum())
    text = f"{{place}}: {name} is {x[i]}, not a log-prob ({n:,} such tokens)"
    return Finding("not finite", n, text, token=i, tokens=np.flatnonzero(bad))


def above_zero(x: np.ndarray, mask: np.ndarray, name: str) -> Finding | None:
    """Probabilities above 1: rounding is counted (and read as 0), more is refused."""
    if not (bad := mask & (x > 0)).any():
        return None
    i, n = int(np.where(bad, x, -np.inf).argmax()), int(bad.sum())
    if x[i] <= ROUNDING:
        return Finding(
            "rounding",
            float(x[i]),
            f"{name} is above 0 at {n:,} tokens, by {x[i]:.1e} at most: read as 0",
            False,
        )
    return Finding(
        "above 0",
        float(x[i]),
        f"{{place}}: {name} is {x[i]:.6g}, not a log-prob ({n:,} tokens are above 0)",
        token=i,
        tokens=np.flatnonzero(mask & (x > ROUNDING)),
    )


def identical(trainer: np.ndarray, rollout: np.ndarray, mask: np.ndarray) -> Finding | None:
    """All gaps exactly 0: one column is a copy of the other."""
    n = int(mask.sum())
    if not n or (mask & (trainer != rollout)).any():
        return None
    return Finding(
        "identical",
        0.0,
        f"all {n:,} gaps are exactly 0: one column is a copy of the other, so there is no noise",
    )


def placeholders(trainer, rollout, mask: np.ndarray, row: np.ndarray, columns) -> list[Finding]:
    """Exactly 0.0 on one side where the other is far below: nothing was measured there."""
    findings = []
    both = mask & (trainer != 0) & (rollout != 0)
    every = slice(None, None, max(-(-len(both) // MOST_ON_GRID), 1))
    some = np.abs(trainer[every] - rollout[every])[both[every]]
    middle = np.median(some) if len(some) else 0.0
    far = np.clip(8 * min(middle, FAR[1]), *FAR)  # a nucleus of one word is 1 nat at most
    for i, (zero, other) in enumerate([(trainer, rollout), (rollout, trainer)]):
        bad = np.flatnonzero(mask & (zero == 0) & (other < -far))
        if not len(bad):
            continue
        active = np.flatnonzero(mask)
        last = active[np.flatnonzero(np.diff(row[active], append=-1))]
        where, at_end = "", int(np.isin(bad, last).sum())
        if at_end == len(bad):
            where = ", each the last of its response"
        elif at_end == 0 and len(set(row[bad].tolist())) * 2 <= len(bad):
            where = f", in {len(set(row[bad].tolist())):,} responses"
        says = f"{columns[1 - i]} says {other[bad].mean():.2f} on average"
        text = f"{columns[i]} is exactly 0.0 at {len(bad):,} sampled tokens{where}, where {says}: placeholders; mask them"
        text = f"{{place}}: {text}"
        findings.append(Finding("placeholder", len(bad), text, token=int(bad[0]), tokens=bad))
    return findings


def absurd(trainer: np.ndarray, rollout: np.ndarray, mask: np.ndarray) -> Finding | None:
    """Gaps of ABSURD nats and more: set aside where they are FEW, refused above."""
    bad = np.flatnonzero(mask & (np.abs(trainer - rollout) >= ABSURD))
    if not len(bad):
        return None
    share, worst = len(bad) / mask.sum(), float(np.abs(trainer[bad] - rollout[bad]).max())
    text = f"{{place}}: {len(bad):,} tokens have a gap of {ABSURD:.0f} nats or more, {worst:.4g} at most ({share:.1e} of all): a fault, not noise"
    return Finding(
        "absurd",
        share,
        text + ("; left out" if share <= FEW else ""),
        share > FEW,
        int(bad[0]),
        bad,
    )


def coarse(x: np.ndarray, mask: np.ndarray, name: str) -> Finding | None:
    """Log-probs that were rounded to 8 or 11 bits before they were written."""
    every = max(-(-len(x) // MOST_ON_GRID), 1)
    some = x[::every][mask[::every] & (x[::every] != 0)]
    if len(np.unique(some[:MOST_VALUES])) < FEW_VALUES:
        return None
    single = some.astype(np.float32)
    grids = {
        "bfloat16": (single.view(np.uint32) & 0xFFFF == 0, 2.0**-9),
        "float16": (single == single.astype(np.float16).astype(np.float32), 2.0**-12),
    }
    for grid, (on_grid, rounding) in grids.items():
        if (share := float(on_grid.mean())) > ON_GRID:
            gap = float((np.abs(some) * rounding).mean())
            text = f"{share:.0%} of {name} lie on the grid of {grid}: rounding alone gives gaps of {gap:.2g} nats on average; have them written in float32"
            return Finding("grid", share, text, refuses=False)
    return None


def steps_of_gap(d: np.ndarray, name: str = "d") -> Finding | None:
    """Gaps that are multiples of one step: logits of low precision on one side."""
    some = np.abs(d[np.abs(d) > TINY])
    if len(some) < LEAST_STEPS:
        return None
    for step in (2.0**-k for k in range(2, 7)):
        on_grid = np.abs(some / step - np.round(some / step)) < 1e-4
        if (share := float(on_grid.mean())) > ON_GRID:
            text = f"{share:.0%} of the gaps that are not 0 are multiples of {step:g}: the logits of one side have low precision (fp8, or bf16 beyond 8)"
            return Finding("steps", step, text, refuses=False)
    return None


def duplicates(trainer, rollout, starts: np.ndarray, keys: np.ndarray) -> Finding | None:
    """Responses that are there twice: the same numbers, and the same keys where there are keys.

    Without keys a response must have LONG tokens to count, as short answers repeat by themselves.
    """
    size = np.diff(starts)
    rows = np.flatnonzero(size >= (1 if keys.shape[1] else LONG))
    if len(rows) < 2:
        return None
    ends = starts[:-1][rows], starts[1:][rows] - 1
    marks = [size[rows], *keys[rows].T, *(x[end] for x in (trainer, rollout) for end in ends)]
    order = np.lexsort(marks)
    marks = np.stack([np.asarray(x, dtype=float) for x in marks])[:, order]
    again = np.flatnonzero(((marks[:, 1:] == marks[:, :-1]) | np.isnan(marks[:, 1:])).all(0))
    spans = [slice(starts[r], starts[r + 1]) for r in rows[order]]
    same = [
        i + 1
        for i in again
        if all(
            np.array_equal(x[spans[i]], x[spans[i + 1]], equal_nan=True) for x in (trainer, rollout)
        )
    ]
    if not same:
        return None
    tokens = np.sort(
        np.concatenate([np.arange(int(spans[i].start), int(spans[i].stop)) for i in same])
    )
    text = f"{{place}}: {len(same):,} responses are exact copies of another; counted once"
    return Finding("duplicate", len(same), text, False, int(tokens[0]), tokens)
