"""A third score tells decode from trainer: A at generation, B by the engine's prefill, C by the trainer.

B and C may be there twice; what a side says twice about the same tokens must be the same.
"""

from __future__ import annotations

import numpy as np

from simlab.audit.checks import Check
from simlab.audit.facts import Facts, Limits, cannot, quiet

SIDES = {
    "decode": "Compare kernels, batch shapes and caches of decode with those of prefill; log-probs may also be taken before or after the sampler's processors.",
    "prefill": "Look at what the prefill pass differs in (chunks, prefix cache, template); generation and trainer agree.",
    "trainer": "Engine and engine agree: look at the trainer's precision, masks, positions and weights.",
}


def odd_one(f: Facts, limits: Limits) -> Check:
    """Which of the three scores stands apart from the two others."""
    name, B = "third_score", f.t.extra.get("prefill")
    if B is None:
        return cannot(
            name,
            "decode and trainer cannot be told apart: log rollout_logprobs_prefill (the engine's prefill scores of the saved tokens)",
        )
    B, C = B[f.tokens], f.t.extra.get("before", f.t.trainer)[f.tokens].astype(float)
    A = f.t.rollout[f.tokens].astype(float)
    known = np.isfinite(B) & np.isfinite(C)
    if not known.any():
        return cannot(name, "no token has all three scores")
    gap = {
        "trainer": float(np.abs(A - B)[known].mean()),
        "decode": float(np.abs(B - C)[known].mean()),
        "prefill": float(np.abs(A - C)[known].mean()),
    }  # by the side that has no part in it
    odd = min(gap, key=lambda x: gap[x])
    rest = min(x for side, x in gap.items() if side != odd)
    ratio = rest / gap[odd] if gap[odd] else float("inf") if rest else 1.0
    if ratio < limits.odd:
        return quiet(name, "decode, prefill and trainer agree alike", ratio, limits.odd, "1")
    text = f"{odd} stands apart: mean |decode - prefill| {gap['trainer']:.4f}, |prefill - trainer| {gap['decode']:.4f}, |decode - trainer| {gap['prefill']:.4f}"
    return Check(name, "alarm", text, ratio, limits.odd, "1", "all tokens", SIDES[odd])


def repeats(f: Facts, limits: Limits) -> Check:
    """Two scores of one side, of the same tokens by the same weights."""
    name, extra = "repeats", f.t.extra
    pairs = {
        "engine": (extra.get("prefill"), extra.get("prefill_again")),
        "trainer": (extra.get("before", f.t.trainer), extra.get("trainer_again")),
    }
    gaps = {}
    for side, (one, again) in pairs.items():
        if one is not None and again is not None:
            gap = np.abs(one[f.tokens].astype(float) - again[f.tokens])
            if np.isfinite(gap).any():
                gaps[side] = gap
    if not gaps:
        return cannot(
            name,
            "whether a side repeats itself needs a second score (rollout_logprobs_prefill_again, trainer_logprobs_again)",
        )
    side = max(gaps, key=lambda x: np.nanmean(gaps[x]))
    value, worst = float(np.nanmean(gaps[side])), int(f.tokens[np.nanargmax(gaps[side])])
    if value <= limits.repeat:
        return quiet(name, f"{' and '.join(gaps)} repeat their scores", value, limits.repeat, "0")
    text = f"the {side} does not repeat itself: two scores of the same tokens differ by {value:.4g} nats on average"
    if side == "engine":
        other = np.nanmean(np.abs(extra["prefill_again"][f.tokens] - pairs["trainer"][0][f.tokens]))
        text += f" (the second against the trainer: {other:.2g})"
    cure = f"Make the {side} deterministic (batch-invariant kernels, no dropout, a fixed order of reduction) before anything else is measured."
    return Check(name, "alarm", text, value, limits.repeat, "0", f.t.place(worst), cure)
