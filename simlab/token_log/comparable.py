"""Whether two columns of log-probs can be compared; each cause of a refusal has its own number.

With d = log pi - log mu of tokens drawn from mu, the columns measure one policy at equal weights if

    E[e^d] = 1          noise, whatever its size; the kept mass S where mu was truncated, e^c for an offset c
    slopes at most 1    of each column on the other; 1/T and its inverse where one side has temperature T
    best shift 0        the gap is smallest where the columns stand

Noise that was added to a column after the draw has mean d = 0 (or E[e^-d] = 1) instead of E[e^d] = 1, so
one of the three must be neutral. Every test leaves five standard errors, by token or by response,
whichever are larger. Functions take flat arrays of one order and return a Finding or None.
"""

from __future__ import annotations

import numpy as np

from simlab.token_log.faults import (
    Finding,
    above_zero,
    absurd,
    coarse,
    duplicates,
    identical,
    not_a_number,
    placeholders,
    steps_of_gap,
    versions,
)
from simlab.token_log.tokens import Tokens

OTHER_WEIGHTS = 2.0  # nats, median |d|
ERRORS = 5.0  # standard errors
LEVEL = 0.01  # least departure of mean d, E[e^d] and E[e^-d]
SLOPE = 0.03  # least departure of a slope from 1
NOISE = 0.5  # of the residual variance over that of the column, added to SLOPE: noise alone stays below 0
SHIFTS = (1, -1, 2, -2)
SHIFTED = 0.25  # of its gap as given is what a moved response has at its own shift, at most
LEAST_SHIFTED = 0.02  # share of the responses
EXACT = 1e-9  # nats; a mean gap at another shift that needs no further tokens
LEAST_FRESH = 200  # tokens without lag that suffice to judge definitions
LEAST_TOKENS = 4  # of a response that can show its shift
ONE_SIGN = 0.9  # share of gaps below 0
MOST = 1 << 21  # tokens that shift, slopes and means are computed on


def examine(t: Tokens, lag: bool = False) -> list[Finding]:
    """All findings on a log; those that refuse come first, in the order in which one hides the next.

    With `lag` tokens may be older than the trainer's weights, and what is at fault is set aside token by
    token instead of hiding the rest; definitions are then judged where lag has no part: on
    `trainer_logprobs_before` if there is such a column, or on tokens of age 0 if there are LEAST_FRESH.
    """
    causes = versions(t.version, t.trained, t.mask, t.at_rollout or lag)
    keep = t.mask.copy()

    def add(*some: Finding | None) -> None:
        for finding in filter(None, some):
            causes.append(finding)
            if finding.tokens is not None:
                keep[finding.tokens] = False

    for name, x in zip(t.columns, (t.trainer, t.rollout), strict=False):
        add(not_a_number(x, keep, name), above_zero(x, keep, name))
    if not lag and (refused := [x for x in causes if x.refuses]):
        return refused
    row = t.responses
    add(duplicates(t.trainer, t.rollout, t.starts, t.keys))
    add(identical(t.trainer, t.rollout, keep))
    add(*placeholders(t.trainer, t.rollout, keep, row, t.columns))
    add(absurd(t.trainer, t.rollout, keep))
    if lag:
        add(best_shift(t.trainer, t.rollout, keep, row), *_other_steps(t, keep))
        add(
            *(
                coarse(x, keep, name)
                for name, x in zip(t.columns, (t.trainer, t.rollout), strict=False)
            )
        )
    few = sample(t.starts)
    some = slice(None) if few is None else few
    trainer, fresh = _fresh(t, keep) if lag else (t.trainer, keep)
    trainer, rollout, fresh, row = (x[some] for x in (trainer, t.rollout, fresh, row))
    if not lag:
        add(best_shift(trainer, rollout, fresh, row))
    trainer, rollout, row = trainer[fresh], rollout[fresh], row[fresh]
    add(steps_of_gap(trainer - rollout) if lag else None, *definitions(trainer, rollout, row))
    return sorted(causes, key=lambda x: not x.refuses)


def _fresh(t: Tokens, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The trainer's column and the tokens at which lag has no part; all of them where none is known."""
    if (before := t.extra.get("before")) is not None:
        known = keep & np.isfinite(before)
        if known.any():
            return before, known
    if t.version is not None and t.trained is not None:
        young = keep & (t.version == t.trained)
        if young.sum() >= LEAST_FRESH:
            return t.trainer, young
    return t.trainer, keep


def _other_steps(t: Tokens, keep: np.ndarray) -> list[Finding]:
    """Steps, but not all of them, whose gaps are those of other weights."""
    step = t.extra.get("step")
    if step is None or len(np.unique(step)) < 2:
        return []
    findings = []
    row, R = t.responses, len(step)
    many = np.zeros((2, R), dtype=np.int64)
    for start in range(0, len(row), MOST):
        some = slice(start, start + MOST)
        far = keep[some] & (np.abs(t.trainer[some] - t.rollout[some]) > OTHER_WEIGHTS)
        for count, tokens in zip(many, (far, keep[some]), strict=True):
            count += np.bincount(row[some][tokens], minlength=R)
    for number in np.unique(step[many[0] > 0]):
        rows = step == number
        if many[0][rows].sum() * 2 < many[1][rows].sum():
            continue
        bad = np.flatnonzero(keep & rows[row])
        gap = np.abs(t.trainer[bad] - t.rollout[bad])
        if len(bad) >= 20 and (middle := float(np.median(gap))) > OTHER_WEIGHTS:
            text = f"{{place}}, step {number:g}: half of its {len(bad):,} gaps are above {middle:.3g} nats: other weights on one side in this step, no temperature; a push was left out"
            findings.append(Finding("other weights", middle, text, True, int(bad[0]), bad))
    all_of_them = sum(len(x.tokens) for x in findings if x.tokens is not None) == keep.sum()
    return [] if all_of_them else findings


def sample(starts: np.ndarray) -> np.ndarray | None:
    """Tokens of evenly spaced responses, some MOST of them, of a log with more; None for all."""
    every = -(-int(starts[-1]) // MOST)
    if every < 2 or len(starts) < 2 * every:
        return None
    return np.concatenate(
        [np.arange(a, b) for a, b in zip(starts[:-1:every], starts[1::every], strict=True)]
    )


# ---------------------------------------------------------------- definitions
def best_shift(trainer, rollout, mask: np.ndarray, row: np.ndarray) -> Finding | None:
    """Responses whose gap is smallest when the trainer's column is moved; +1 is trainer[t], rollout[t + 1]."""
    R = int(row[-1]) + 1 if len(row) else 0

    def gaps(k: int):
        """Sum of |d| and tokens, by response."""
        total, count = np.zeros(R), np.zeros(R, dtype=np.int64)
        for start in range(0, len(row), MOST):  # pairs of neighbours, whose first stands in a block
            start, stop = max(start, -k), min(start + MOST, len(row) - max(k, 0))
            if start >= stop:
                continue
            here, there = slice(start, stop), slice(start + k, stop + k)
            both, r = mask[here] & mask[there] & (row[here] == row[there]), row[here]
            d = np.abs(trainer[here].astype(float) - rollout[there])
            first = int(r[0])
            own = np.bincount(r - first, np.where(both, d, 0)), np.bincount(r - first, both)
            total[first : first + len(own[0])] += own[0]
            count[first : first + len(own[1])] += own[1].astype(np.int64)
        return total, count

    total, count = gaps(0)
    long = count >= LEAST_TOKENS
    given = total / np.maximum(count, 1)
    if not (given > 0.1).any():
        return None
    best, gap = np.zeros(R, dtype=int), np.where(long & (given > 0.1), SHIFTED * given, 0)
    for k in SHIFTS:
        moved, n = gaps(k)
        mean = moved / np.maximum(n, 1)
        better = (n >= LEAST_TOKENS - 1) & (mean < gap)
        exact = (n >= 2) & (mean <= EXACT) & (given > 0.1) & (best == 0)
        best[better | exact], gap[better | exact] = k, mean[better | exact]
    shifted = np.flatnonzero(best)
    if len(shifted) < max(LEAST_SHIFTED * long.sum(), min(2, long.sum()), 1):
        return None
    k = int(np.bincount(best[shifted] + 2).argmax()) - 2
    rows = shifted[best[shifted] == k]
    was, there = total[rows].sum() / count[rows].sum(), gap[rows].mean()
    among = int((long | (best != 0)).sum())
    text = f"the columns are moved against each other in {len(shifted):,} of {among:,} responses: best at {k:+d}, mean |d| {there:.3g} there, {was:.3g} as given"
    tokens = np.flatnonzero(np.isin(row, rows))
    return Finding("shift", k, text, token=int(tokens[0]), tokens=tokens)


def definitions(trainer: np.ndarray, rollout: np.ndarray, row: np.ndarray) -> list[Finding]:
    """Other weights, a temperature, a truncation or an offset on one side; nothing for noise."""
    x, y = rollout.astype(float), trainer.astype(float)
    d = y - x
    if len(d) < 20:
        return _constant(d)
    middle = float(np.median(np.abs(d)))
    if middle > OTHER_WEIGHTS:
        return [
            Finding(
                "other weights",
                middle,
                f"half of all gaps are above {middle:.3g} nats: other weights or other tokens, not noise that can be replayed",
            )
        ]
    levels = [_mean(z, row) for z in (d, np.expm1(d), np.expm1(-d))]
    off = all(abs(mean) > LEVEL + ERRORS * error for mean, error in levels)
    kept, negative = 1 + levels[1][0], float((d < 0).mean())
    slope, steep = _slope(d, x, y, row)
    if steep and not (off and kept < 1 and negative > ONE_SIGN):
        side = "sharper" if slope > 1 else "flatter"
        text = f"the trainer is {side} than the rollout: slope {slope:.3f} (of noise at most 1 both ways), E[e^d] {kept:.2f}: a temperature on one side, not noise"
        return [Finding("temperature", slope, text)]
    if not off:
        return []
    numbers = (
        f"E[e^d] = {kept:.3f} (1 for noise), mean d {levels[0][0]:.3f}, {negative:.0%} below 0"
    )
    if kept < 1:
        return [
            Finding(
                "truncation",
                kept,
                f"{numbers}: top-p, top-k or min-p on the rollout side, which keeps {kept:.2f} of the mass, or a constant offset; not noise",
            )
        ]
    return [
        Finding(
            "offset",
            levels[0][0],
            f"{numbers}: no distribution gives more than 1, so one side has an offset; not noise",
        )
    ]


def _constant(d: np.ndarray) -> list[Finding]:
    """Of few tokens, a gap that is the same everywhere is all that can be said."""
    if len(d) < 3 or np.ptp(d) > 1e-6 or abs(d[0]) <= LEVEL:
        return []
    kept = float(np.exp(d[0]))
    text = f"all {len(d):,} gaps are {d[0]:.4g} nats: a constant, such as the log of the mass {kept:.3g} that top-p or top-k keeps; not noise"
    return [Finding("truncation", kept, text) if kept < 1 else Finding("offset", float(d[0]), text)]


def _mean(x: np.ndarray, row: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error, by token or by response, whichever is larger."""
    mean = float(x.mean())
    return mean, _error(x - mean, row) / len(x)


def _error(x: np.ndarray, row: np.ndarray) -> float:
    """Standard deviation of a sum of centred numbers."""
    sums = np.bincount(row, x)
    sums = sums[np.bincount(row) > 0]
    clustered = float((sums**2).sum()) if len(sums) >= 20 else 0.0
    return float(np.sqrt(max(float((x**2).sum()), clustered)))


def _slope(d: np.ndarray, x: np.ndarray, y: np.ndarray, row: np.ndarray) -> tuple[float, bool]:
    """Slope of y on x, and whether one of the two slopes is above 1 by more than noise explains."""
    steep = []
    for sign, z in ((1, x), (-1, y)):
        z = z - z.mean()
        total = float((z**2).sum())
        if total == 0:
            return 1.0, False
        excess = float((z * d).sum()) / total  # of the slope over 1
        rest = d - d.mean() - excess * z
        noise = float((rest**2).sum()) / total
        error = _error(z * rest, row) / total
        steep.append(sign * excess > SLOPE + NOISE * noise + ERRORS * error)
        if sign == 1:
            slope = 1 + excess
    return slope, any(steep)
