"""KPop: S = 1[D(p||m) <= phi] 1[D(m||p) <= phi] min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi/mu.

Source: Ling-2.6 report (2606.15079) sec. 3.2; SAT (43).

With p = pi(token), m = mu(token): D(p||m) = p log(p/m) + (1-p) log((1-p)/(1-m)), in nats.

phi has no published value that fits the published mask rates: 0.1 (prime-rl, taken as default), 2
(AReaL), 0.1 to 2 (the authors' blog), 0.02 (SAT's page), and about 1e-3 would be needed for the
reported 22-34 % of masked tokens. Calibrate it to a mask rate. Probabilities are held above 1e-8.
`anchor="prox"` tests pi_old (`logp_prox`) against mu instead of the current pi.

Gradient weight on grad log pi: r A inside, 0 outside the band or where the clip (or the dual clip, ppo.py) binds.
"""

from __future__ import annotations

from typing import Literal

from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.algebra.corrections import Correction
from simlab.stabilizers.algebra.statistics import bernoulli_kl
from simlab.stabilizers.parts import AtLeast0, DualClip, RadiusHigh, RadiusLow, clipped

FLOOR = 1e-8
Direction = Literal["both", "forward", "reverse"]
Anchor = Literal["current", "prox"]


def correction(
    b: TokenBatch,
    *,
    phi: AtLeast0 = 0.1,
    direction: Direction = "both",
    anchor: Anchor = "current",
) -> Correction:
    """rejects a token whose Bernoulli KL between the {anchor} policy and mu is above {phi} nats, direction {direction}"""
    tested = b.logp if anchor == "current" else b.need("logp_prox", "kpop")
    logp, logm = on_mask(b, tested).detach(), on_mask(b, b.logp_mu)
    forward, reverse = (bernoulli_kl(x, y, FLOOR) <= phi for x, y in ((logp, logm), (logm, logp)))
    inside = {"both": forward & reverse, "forward": forward, "reverse": reverse}[direction]
    outside = {"out_of_band": Diagnostic(~inside, "mean")}
    return Correction("r" if anchor == "current" else "k", None, inside, outside)


def surrogate(
    b: TokenBatch,
    *,
    phi: AtLeast0 = 0.1,
    direction: Direction = "both",
    anchor: Anchor = "current",
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
    dual_clip: DualClip = None,
) -> Surrogate:
    """`direction`: both, forward (D(pi||mu)) or reverse (D(mu||pi)); phi in nats, inclusive."""
    c = correction(b, phi=phi, direction=direction, anchor=anchor)
    d, A = log_ratio(b), on_mask(b, b.advantage)
    S, active, shares = clipped(d, A, 1 - eps_low, 1 + eps_high, c.W, dual_clip)
    return Surrogate(S, active, shares | c.diagnostics)
