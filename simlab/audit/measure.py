"""How far apart the two columns of a whole log are."""

from __future__ import annotations

import numpy as np

from simlab.audit.batch import ages
from simlab.audit.blocks import blocks, gaps, per_response
from simlab.core.columns import MISMATCH, Column
from simlab.core.mismatch import LEVELS
from simlab.token_log.tokens import Tokens

BAND = 0.1  # |r - 1| beyond which a token is counted as outside
FAR = 1.0  # nats
NUMBERS = MISMATCH | {
    "d_se": Column("nats", "standard error of d_bar over responses"),
    "r_mean": Column("", "mean of r, 1 for any noise when tokens were drawn from mu", "verl `rollout_is_mean`, SkyRL `is_ratio_mean`"),
    "mult_prob_error": Column("", "mean of e^\\|d\\|", "NeMo-RL `token_mult_prob_error` (alarm above 1.05)"),
    "probs_diff": Column("", "mean of \\|pi - mu\\|", "verl `training/rollout_probs_diff_mean`"),
    "outside": Column("fraction", f"tokens with r outside of 1 -+ {BAND}"),
    "far": Column("fraction", f"tokens with \\|d\\| above {FAR:g} nat"),
}  # fmt: skip


def numbers(t: Tokens, tokens: np.ndarray) -> dict[str, float]:
    """Every number of NUMBERS that this log has, of its tokens `[n]`: those of core/mismatch.py, in blocks."""
    if not len(tokens):
        return {"tokens": 0}
    n, d = len(tokens), gaps(t, tokens, positive=False)
    before = t.extra.get("before")
    if before is not None and not np.isfinite(before[tokens]).all():
        before = None
    shift, total = max(float(d.max()), 0.0), np.zeros(12)
    age = _ages(t, tokens)
    parts = np.zeros(2)
    for block in blocks(t, tokens):
        pi, mu = (np.minimum(x[block], 0).astype(float) for x in (t.trainer, t.rollout))
        own = pi - mu
        size, r1 = np.abs(own), np.expm1(np.minimum(own, 70))
        r = r1 + 1
        scaled = r * np.exp(-shift) if shift < 70 else np.exp(own - shift)
        total += (
            size.sum(), own.sum(), own @ own, (r1 - own).sum(), (r1 * (r1 + 2)).sum(), r.sum(),
            np.where(own > 0, r, 1 / np.maximum(r, 1e-30)).sum(), np.abs(np.exp(mu) * r1).sum(),
            np.count_nonzero(np.abs(r1) > BAND), np.count_nonzero(size > FAR), scaled.sum(), scaled @ scaled,
        )  # fmt: skip
        if before is not None:
            then = np.minimum(before[block], 0)
            parts += np.abs(pi - then).sum(), np.abs(then - mu).sum()
    mean = total / n
    out: dict[str, float] = {"tokens": n}
    names = ("d_bar", "d_mean", "k2", "k3", "chi2", "r_mean", "mult_prob_error", "probs_diff", "outside", "far")  # fmt: skip
    out |= dict(zip(names, mean.tolist(), strict=False))
    out["k1"], out["k2"] = -out["d_mean"], out["k2"] / 2
    out["ess"] = float(total[10] ** 2 / (n * total[11]))
    out |= {"age": float(age.mean()), "age_max": float(age.max())} if age is not None else {}
    if before is not None:
        out["d_policy"], out["d_engine"] = (parts / n).tolist()
    d = np.abs(d)
    places = [max(int(np.ceil(n * level / 100)) - 1, 0) for level in LEVELS]
    out["d_se"] = _error_of_mean(t, tokens, out["d_bar"])
    out |= _kurtosis(t, tokens, out["d_mean"], float(d.max()))
    d.partition([*places, n - 1])
    out |= {f"d_q{level}": float(d[i]) for level, i in zip(LEVELS, places, strict=True)}
    out["d_max"] = float(d[-1])
    return {name: out[name] for name in NUMBERS if name in out}


def _ages(t: Tokens, tokens: np.ndarray) -> np.ndarray | None:
    """`ages` as numbers `[n]`."""
    age = ages(t, tokens)
    return None if age is None else age.numpy()


def _kurtosis(t: Tokens, tokens: np.ndarray, mean: float, largest: float) -> dict[str, float]:
    second = fourth = 0.0
    for block in blocks(t, tokens):
        z = (np.minimum(t.trainer[block], 0).astype(float) - np.minimum(t.rollout[block], 0) - mean) ** 2  # fmt: skip
        second, fourth = second + float(z.sum()), fourth + float(z @ z)
    wide = np.result_type(t.trainer, t.rollout, np.float32)
    if np.sqrt(second / len(tokens)) <= 4 * np.finfo(wide).eps * largest:
        return {"d_kurtosis": 0.0}  # equal gaps differ by rounding only
    return {"d_kurtosis": fourth * len(tokens) / second**2}


def _error_of_mean(t: Tokens, tokens: np.ndarray, mean: float) -> float:
    """Standard error of mean |d|, by token or by response, whichever is larger."""
    n, total = per_response(t, tokens)
    sums = (total - mean * n)[n > 0]
    variance = 0.0
    for block in blocks(t, tokens):
        z = np.abs(t.trainer[block].astype(float) - t.rollout[block]) - mean
        variance += float(z @ z)
    if len(sums) > 1:
        variance = max(variance, float(sums @ sums) * len(sums) / (len(sums) - 1))
    return float(np.sqrt(variance)) / max(len(tokens), 1)
