"""KPop: S = 1[D(p||m) <= phi] 1[D(m||p) <= phi] min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi/mu.

Source: Ling-2.6 report (2606.15079) sec. 3.2; SAT (43).

With p = pi(token), m = mu(token): D(p||m) = p log(p/m) + (1-p) log((1-p)/(1-m)), in nats.

phi has no published value that fits the published mask rates: .1 (prime-rl, taken as default), 2
(AReaL), .1 to 2 (the authors' blog), .02 (SAT's page), and about 1e-3 would be needed for the
reported 22-34 % of masked tokens. Calibrate it to a mask rate. Probabilities are held above 1e-8.
`anchor="prox"` tests pi_old (`logp_prox`) against mu instead of the current pi.

Gradient weight on grad log pi: r A inside, 0 outside the band or where the clip binds.
"""

from __future__ import annotations

from torch import Tensor

from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask

FLOOR = 1e-8


def bernoulli_kl(logp: Tensor, logm: Tensor) -> Tensor:
    """D(p||m) in nats of the events "this token" and "any other", from log-probs."""
    p, m = logp.exp().clamp(FLOOR, 1 - FLOOR), logm.exp().clamp(FLOOR, 1 - FLOOR)
    rest_p, rest_m = ((-x.expm1()).clamp(min=FLOOR) for x in (logp, logm))
    return p * (p / m).log() + rest_p * (rest_p / rest_m).log()


def surrogate(
    b: TokenBatch,
    *,
    phi: float = 0.1,
    direction: str = "both",
    anchor: str = "current",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Surrogate:
    """`direction`: both, forward (D(pi||mu)) or reverse (D(mu||pi)); phi in nats, inclusive."""
    check_radii("kpop", eps_low, eps_high)
    if not phi >= 0:
        raise ValueError(f"kpop: phi must be at least 0, got {phi}")
    if direction not in ("both", "forward", "reverse"):
        raise ValueError(f"kpop: direction must be both, forward or reverse, got {direction!r}")
    if anchor not in ("current", "prox"):
        raise ValueError(f"kpop: anchor must be current or prox, got {anchor!r}")
    tested = b.logp if anchor == "current" else b.need("logp_prox", "kpop")
    logp, logm = on_mask(b, tested).detach(), on_mask(b, b.logp_mu)
    forward, reverse = bernoulli_kl(logp, logm) <= phi, bernoulli_kl(logm, logp) <= phi
    inside = {"both": forward & reverse, "forward": forward, "reverse": reverse}[direction]
    d, A = log_ratio(b), on_mask(b, b.advantage)
    S, active, diagnostics = clipped(d, A, 1 - eps_low, 1 + eps_high, inside.to(d.dtype))
    return Surrogate(S, active, diagnostics | {"out_of_band": Diagnostic(~inside, "mean")})
