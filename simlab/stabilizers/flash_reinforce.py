"""FlashREINFORCE: S = sg[1[mean_t B_t <= delta] r] A log pi, B = D(mu||pi) of "this token" and "any other", r = pi/mu.

Source: FlashREINFORCE, code (yifanzhang-pro/FlashREINFORCE) and OpenRLHF #1339, #1354.

A response is admitted whole, by the mean over its tokens of a Bernoulli KL in nats, and then weighed by its
token ratios without a clip. Rejected responses stay in the mean. delta is 3e-3 (Qwen2.5-Math), or 5e-3
(R1-distilled 1.5B). Probabilities are held in [1e-6, 1 - 1e-6]. Its advantage is R minus the mean of R over the whole
batch; aggregate by seq_mean_token_mean. The filter of low-entropy tokens in failed responses is left out.

It is the setting level seq, mode mask, gate binary_kl of OpenRLHF's three knobs: `pg+keep` has the others.

Gradient weight on grad log pi: r A, 0 in a rejected response.
"""

from __future__ import annotations

from simlab.core.tokens import Surrogate, TokenBatch, on_mask, weighted
from simlab.stabilizers.algebra.corrections import Correction, keep
from simlab.stabilizers.parts import AtLeast0


def correction(b: TokenBatch, *, delta: AtLeast0 = 3e-3) -> Correction:
    """rejects a response whose mean of D(mu||pi) of "this token" and "any other" is above {delta} nats"""
    return keep(b, gate="binary_kl", level="mean", max=delta)


def surrogate(b: TokenBatch, *, delta: AtLeast0 = 3e-3) -> Surrogate:
    """delta in nats a token."""
    c = keep(b, gate="binary_kl", level="mean", max=delta, weight="token")
    return weighted(b, c.W * on_mask(b, b.advantage), c.diagnostics)
