"""Two logs, before and after a fix: how far each number moved, with intervals over responses.

Responses are drawn again, with replacement, from each log. An interval is difference -+ c standard errors, c the
95 % quantile of the largest departure of all rows at once, so that one of twenty pairs of equal logs shows
any difference at all; for few responses or heavy tails it is somewhat more (docs/audit.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simlab.audit.audit import MOST, Audit
from simlab.audit.batch import batch_of, of_responses
from simlab.audit.measure import BAND, FAR
from simlab.audit.methods import SHOWN, signed, weights
from simlab.stabilizers import bind
from simlab.study.intervals import RESAMPLES

LEVEL = 0.95
LEAST = 8  # responses of a log that can be drawn again
MOST_DRAWN = 4096  # that are; of a longer log runs of neighbours are drawn together
Specs = Sequence[tuple[str, str, dict]]


def compare(before: Audit, after: Audit, methods: Specs | None = None) -> dict:
    """Rows {name, before, after, difference, low, high, verdict}, and what fired in one log only."""
    fired = [{x.metric for x in audit.findings if x.status != "note"} for audit in (before, after)]
    out: dict = {
        "before": before.result["log"],
        "after": after.result["log"],
        "gone": sorted(fired[0] - fired[1]),
        "new": sorted(fired[1] - fired[0]),
        "still": sorted(fired[0] & fired[1]),
        "rows": [],
    }
    for audit in (before, after):
        if not audit.keep.any():
            return out | {
                "not_computable": f"{audit.result['log']} has no token that can be measured"
            }
    specs = [(name, name, {}) for name in SHOWN] if methods is None else list(methods)
    sums = [_sums(audit, specs) for audit in (before, after)]
    names = [x for x in sums[0] if x in sums[1]]
    rng = np.random.default_rng(0)
    values, drawn = zip(*(_statistics(x, names, rng) for x in sums), strict=True)
    rows = [x for x in names if x in values[0]]
    difference = np.array([values[1][x] - values[0][x] for x in rows])
    enough = all(x is not None for x in drawn)
    half = _half(drawn, rows, difference) if enough else np.full(len(rows), np.inf)
    for i, name in enumerate(rows):
        low, high = difference[i] - half[i], difference[i] + half[i]
        verdict = "lower" if high < 0 else "higher" if low > 0 else "not separated"
        row = {"name": name, "before": values[0][name], "after": values[1][name]}
        row |= {"difference": float(difference[i]), "low": float(low), "high": float(high)}
        out["rows"].append(row | {"verdict": verdict if enough else "too few responses"})
    return out


def _half(drawn: Sequence, rows: list[str], difference: np.ndarray) -> np.ndarray:
    """Half widths of intervals that hold for all rows at once."""
    again = np.stack([drawn[1][x] - drawn[0][x] for x in rows], 1)
    error = again.std(0, ddof=1)
    some = error > 0
    if not some.any():
        return np.zeros(len(rows))
    largest = (np.abs(again - difference)[:, some] / error[some]).max(1)
    return error * np.quantile(largest, LEVEL)


def _sums(audit: Audit, specs: Specs) -> dict[str, np.ndarray]:
    """Sums over the tokens of each response `[R]`, by the number that they make."""
    t, tokens = audit.tokens, np.flatnonzero(audit.keep)
    pi, mu = (np.minimum(x[tokens], 0).astype(float) for x in (t.trainer, t.rollout))
    _, response = np.unique(t.responses[tokens], return_inverse=True)
    d = pi - mu
    r = np.exp(np.minimum(d, 70))
    each = {
        "tokens": np.ones(len(d)),
        "d_bar": np.abs(d),
        "d_mean": d,
        "k3": r - 1 - d,
        "ess": r,
        "squares": r**2,
        "mult_prob_error": np.exp(np.minimum(np.abs(d), 70)),
        "probs_diff": np.abs(np.exp(pi) - np.exp(mu)),
        "outside": np.abs(r - 1) > BAND,
        "far": np.abs(d) > FAR,
    }
    before = t.extra.get("before")
    if before is not None and np.isfinite(before[tokens]).all():
        each |= {"d_policy": np.abs(pi - before[tokens]), "d_engine": np.abs(before[tokens] - mu)}
    out: dict[str, np.ndarray] = {name: np.bincount(response, x) for name, x in each.items()}
    some = of_responses(t, tokens, MOST)
    b = batch_of(t, some)
    _, own = np.unique(b.response.numpy(), return_inverse=True)
    A = t.extra.get("advantage")
    parts = signed(b, A is not None and bool(np.isfinite(A[some]).all()))
    for label, name, arguments in specs:
        try:
            cut = np.mean([weights(bind(name, **arguments), x, False).cut for x in parts], 0)
        except ValueError:  # a field that the log lacks
            continue
        share = np.bincount(own, cut) / np.bincount(own)
        out[f"cut by {label}"] = share if len(share) == len(out["tokens"]) else _spread(share, out)
    return out


def _spread(share: np.ndarray, out: dict[str, np.ndarray]) -> np.ndarray:
    """The shares of evenly spaced responses for all of them."""
    R = len(out["tokens"])
    return share[np.arange(R) * len(share) // R]


def _statistics(
    sums: dict[str, np.ndarray], names: list[str], rng: np.random.Generator
) -> tuple[dict[str, float], dict[str, np.ndarray] | None]:
    """The numbers of a log, and `[RESAMPLES]` of each of logs drawn again."""
    n = sums["tokens"]
    sums = {k: sums[k] * n if k.startswith("cut by") else sums[k] for k in names}
    R = len(n)
    if R > MOST_DRAWN:
        block = np.arange(R) * MOST_DRAWN // R
        sums = {name: np.bincount(block, x) for name, x in sums.items()}
        R = MOST_DRAWN
    value = {name: float(x) for name, x in _ratios({k: x.sum() for k, x in sums.items()}).items()}
    if R < LEAST:
        return value, None
    table = np.stack(list(sums.values()), 1)
    weight = rng.multinomial(R, np.full(R, 1 / R), RESAMPLES).astype(float)
    totals = weight @ table
    return value, _ratios({name: totals[:, i] for i, name in enumerate(sums)})


def _ratios(total: dict) -> dict:
    n = total["tokens"]
    out = {name: x / n for name, x in total.items() if name not in ("tokens", "squares", "ess")}
    return out | {"ess": total["ess"] ** 2 / (n * total["squares"])}
