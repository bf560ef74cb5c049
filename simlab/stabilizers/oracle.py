"""Oracle trust region: S = r A, but 0 if TV(mu, pi) at the state exceeds delta and A (r - 1) > 0, r = pi/mu.

Source: TRPO's state divergence (SAT, Table 3), as a gate.

What every rule that sees one sampled token approximates. It reads `tv`, the total variation over the whole vocabulary, which the simulator knows and an engine
does not. delta has no published value here; SAT's page draws 0.1.

Gradient weight on grad log pi: r A, 0 on gated tokens.
"""

from __future__ import annotations

from math import inf

from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import AtLeast0, clipped


def surrogate(b: TokenBatch, *, delta: AtLeast0 = 0.1) -> Surrogate:
    """Needs `tv`."""
    d, A = log_ratio(b), on_mask(b, b.advantage)
    gated = (on_mask(b, b.need("tv", "oracle")) > delta) & (A * d.detach() > 0)
    S, active, shares = clipped(d, A, 0, inf, (~gated).to(d.dtype))
    shown = {"gate_rate": Diagnostic(gated, "mean"), "overflow": shares["overflow"]}
    return Surrogate(S, active, shown)
