"""SAT's open variants: S = min(r A, clip(r, 1 - eps_low c_-, 1 + eps_high c_+) A), another gate for c.

Source: the open questions and falsifiers around SAT (2607.18722); none is in the paper.

Everything but the gate is sat.py's: c = 1 / (1 + (u/q)^2) on gated tokens, on the side of sign(d).

    mass      u = |pi - mu|, q its alpha-quantile, gate u > q: the mass a token moves, not its ratio
    stratum   q is the alpha-quantile of |d| within the token's `stratum` (turn or position)
    fixed     q = `threshold` nats, gate |d| > q: nothing adapts to the batch
    age       gate `age` > `threshold` steps, q as in SAT
    random    gate `uniform` < `rate`, q as in SAT: a placebo that contracts as many tokens
    inverted  as many tokens as SAT's gate, but those of smallest |d|: a placebo at the wrong end

u is |d| unless said; no token is gated where its q is 0. `factor` replaces the kernel by a constant,
which makes the placebos as strong as the real gate (at the wrong end the kernel hardly contracts).

Gradient weight: r A, 0 where the contracted clip binds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from simlab.quantile import Reduce, abs_quantile, order_statistic
from simlab.stabilizers.ppo import check_radii
from simlab.stabilizers.sat import contracted, kernel
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask

GATES = ("mass", "stratum", "fixed", "age", "random", "inverted")


def score(b: TokenBatch, gate: str) -> Tensor:
    """u `[..., N]`, 0 where masked."""
    if gate not in GATES:
        raise ValueError(f"sat_open: gate must be {', '.join(GATES)}, got {gate!r}")
    if gate == "mass":
        return (on_mask(b, b.logp.detach()).exp() - on_mask(b, b.logp_mu).exp()).abs()
    return log_ratio(b).detach().abs()


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    gate: str = "mass",
    alpha: float = 0.9,
    strata: int = 8,
    reduce: Reduce | None = None,
) -> dict[str, Tensor]:
    """{"q": `[...]`, or `[..., strata]`; "bottom": the largest |d| that the inverted gate takes}."""
    if not 0 < alpha <= 1:
        raise ValueError(f"sat_open: alpha must lie in (0, 1], got {alpha}")
    if not strata >= 1:
        raise ValueError(f"sat_open: strata must be at least 1, got {strata}")
    batches = list(batches)
    shards = [(score(b, gate), b.mask) for b in batches]
    if gate == "stratum":
        classes = [b.need("stratum", "sat_open").clamp(0, strata - 1) for b in batches]
        parts = [
            [(u, mask & (c == s)) for (u, mask), c in zip(shards, classes, strict=True)]
            for s in range(strata)
        ]
        return {"q": torch.stack([abs_quantile(x, alpha, reduce) for x in parts], -1)}
    q = abs_quantile(shards, alpha, reduce)
    if gate != "inverted":
        return {"q": q}
    n = sum((mask & (u > q.unsqueeze(-1))).sum(-1) for u, mask in shards)
    return {"q": q, "bottom": order_statistic(shards, reduce(n) if reduce else n, reduce)}


def surrogate(
    b: TokenBatch,
    *,
    q: Tensor,
    bottom: Tensor | None = None,
    gate: str = "mass",
    threshold: float | None = None,
    rate: float = 0.1,
    exponent: float = 2.0,
    factor: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Surrogate:
    """Given the numbers of `whole_batch`. Raises ValueError for impossible or missing values."""
    check_radii("sat_open", eps_low, eps_high)
    u = score(b, gate)
    if gate in ("fixed", "age") and (threshold is None or not threshold >= 0):
        raise ValueError(f"sat_open: gate {gate} needs threshold, at least 0, got {threshold}")
    if not 0 <= rate <= 1:
        raise ValueError(f"sat_open: rate must lie in [0, 1], got {rate}")
    q = q.to(u)
    if gate == "stratum":
        index = torch.where(b.mask, b.need("stratum", "sat_open"), 0)
        q = q.gather(-1, index.clamp(0, q.shape[-1] - 1))
    else:
        q = torch.full_like(u, threshold) if gate == "fixed" else q.unsqueeze(-1)
    if gate == "age":
        gated = b.need("age", "sat_open") > threshold
    elif gate == "random":
        gated = b.need("uniform", "sat_open") < rate
    elif gate == "inverted":
        bottom = bottom.to(u).unsqueeze(-1)
        gated = (u <= bottom) & (bottom > 0)
    else:
        gated = u > q
    gated = b.mask & gated & (q > 0)
    c = kernel("sat_open", u, q, exponent, factor)
    S, active, diagnostics = contracted(b, log_ratio(b), gated, c, eps_low, eps_high)
    return Surrogate(S, active, diagnostics | {"q": Diagnostic(q, "max")})
