"""The measured tokens of a log in blocks of whole responses, so that no array of doubles is as long as the log."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simlab.token_log.tokens import Tokens

BLOCK = 1 << 20  # tokens


def active(keep: np.ndarray) -> np.ndarray:
    """`np.flatnonzero` in the smallest type of whole numbers."""
    small = np.int32 if len(keep) < 2**31 else np.int64
    out, at = np.empty(int(np.count_nonzero(keep)), dtype=small), 0
    for start in range(0, len(keep), BLOCK):
        here = np.flatnonzero(keep[start : start + BLOCK])
        out[at : at + len(here)] = here + start
        at += len(here)
    return out


def blocks(t: Tokens, tokens: np.ndarray) -> Iterator[np.ndarray]:
    """The tokens `[n]`, in order, in runs of whole responses of about BLOCK tokens."""
    start = 0
    while start < len(tokens):
        stop = min(start + BLOCK, len(tokens))
        if stop < len(tokens):  # to the end of its response
            end = t.starts[t.response(int(tokens[stop - 1])) + 1]
            while stop < len(tokens) and tokens[stop] < end:
                near = tokens[stop : stop + BLOCK]
                stop += int(np.searchsorted(near, near.dtype.type(end)))
        yield tokens[start:stop]
        start = stop


def gaps(t: Tokens, tokens: np.ndarray, positive: bool = True) -> np.ndarray:
    """d of the tokens `[n]`, nats: double where the log is short or has doubles.

    Without `positive` a log-prob above 0 by rounding counts as 0.
    """
    short = len(tokens) <= BLOCK or t.trainer.dtype != np.float32 or t.rollout.dtype != np.float32
    d, at = np.empty(len(tokens), dtype=float if short else np.float32), 0
    for block in blocks(t, tokens):
        pair = (x[block] for x in (t.trainer, t.rollout))
        pi, mu = pair if positive else (np.minimum(x, 0) for x in pair)
        np.subtract(pi, mu, out=d[at : at + len(block)], dtype=d.dtype)
        at += len(block)
    return d


def per_response(t: Tokens, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number of measured tokens and sum of |d| of each response `[R]`."""
    R = len(t.row)
    count, total = np.zeros(R, dtype=np.int64), np.zeros(R)
    for block in blocks(t, tokens):
        r = t.responses[block]
        first, n = int(r[0]), int(r[-1]) - int(r[0]) + 1
        size = np.abs(t.trainer[block].astype(float) - t.rollout[block])
        count[first : first + n] += np.bincount(r - first, minlength=n)
        total[first : first + n] += np.bincount(r - first, size, n)
    return count, total
