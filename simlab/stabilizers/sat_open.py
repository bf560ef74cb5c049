"""SAT's open variants: S = min(r A, clip(r, 1 - eps_low c_-, 1 + eps_high c_+) A), another gate for c.

Source: the open questions and falsifiers around SAT (2607.18722); none is in the paper.

Everything but the gate is sat.py's: c = 1 / (1 + (u/q)^2) on gated tokens, on the side of sign(d).

    mass      u = |pi - mu|, q its alpha-quantile, gate u > q: the mass a token moves, not its ratio
    tv        u = `tv` of the token's state, q its alpha-quantile, gate u > q
    stratum   q is the alpha-quantile of |d| within the token's `stratum` (turn or position)
    group     q is that of the tokens whose `group` (prompt) leaves one remainder by `strata`: what a rank, or
              a micro-batch, that holds 1/strata of the prompts would compute
    fixed     q = `threshold` nats, gate |d| > q: nothing adapts to the batch
    age       gate `age` > `threshold` steps, q as in SAT
    random    gate `uniform` < `rate`, q as in SAT: a placebo that contracts as many tokens
    inverted  as many tokens as SAT's gate, but those of smallest |d|: a placebo at the wrong end

u is |d| unless said; no token is gated where its q is 0. Where equal |d| would let the inverted gate
take more tokens than SAT's, those of smallest `uniform` are taken. `factor` replaces the kernel by a
constant. At the wrong end the kernel hardly contracts, so a matched set of the three has one factor:
`sat:factor=0`, and here gate inverted and gate random, both with factor 0.

Gradient weight: r A, 0 where the contracted clip binds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.quantile import Reduce, abs_quantile, order_statistic, summed
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.contraction import contracted, kernel
from simlab.stabilizers.parts import Above0, AtLeast0, RadiusHigh, RadiusLow, Share

Gate = Literal["mass", "tv", "stratum", "group", "fixed", "age", "random", "inverted"]


def score(b: TokenBatch, gate: str) -> Tensor:
    """u `[..., N]`, 0 where masked."""
    if gate == "mass":
        return (on_mask(b, b.logp.detach()).exp() - on_mask(b, b.logp_mu).exp()).abs()
    if gate == "tv":
        return on_mask(b, b.need("tv", "sat_open"))
    return log_ratio(b).detach().abs()


def classes(b: TokenBatch, gate: str, strata: int) -> Tensor:
    """The class of a token `[..., N]`, 0 to strata - 1, within which q is taken."""
    if gate == "group":
        return torch.where(b.mask, b.need("group", "sat_open"), 0).remainder(strata)
    return torch.where(b.mask, b.need("stratum", "sat_open"), 0).clamp(0, strata - 1)


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    gate: Gate = "mass",
    alpha: Annotated[float, Interval("(0, 1]")] = 0.9,
    strata: Annotated[int, Interval("[1, inf)")] = 8,
    reduce: Reduce | None = None,
) -> dict[str, Tensor]:
    """{"q": `[...]`, or `[..., strata]` for gates stratum and group}, and for the inverted gate {"bottom": the largest |d| that it
    takes, "draw": the largest `uniform` among those}, each `[...]`."""
    batches = list(batches)
    shards = [(score(b, gate), b.mask) for b in batches]
    if gate in ("stratum", "group"):
        kinds = [classes(b, gate, strata) for b in batches]
        parts = [
            [(u, mask & (c == s)) for (u, mask), c in zip(shards, kinds, strict=True)]
            for s in range(strata)
        ]
        return {"q": torch.stack([abs_quantile(x, alpha, reduce) for x in parts], -1)}
    q = abs_quantile(shards, alpha, reduce)
    if gate != "inverted":
        return {"q": q}
    n = summed(((mask & (u > q.unsqueeze(-1))).sum(-1) for u, mask in shards), reduce)
    bottom = order_statistic(shards, n, reduce)
    level = bottom.unsqueeze(-1)
    left = n - summed(((mask & (u < level)).sum(-1) for u, mask in shards), reduce)
    tied = [
        (b.need("uniform", "sat_open"), mask & (u == level))
        for b, (u, mask) in zip(batches, shards, strict=True)
    ]
    draw = torch.where(left > 0, order_statistic(tied, left, reduce), -1)
    return {"q": q, "bottom": bottom, "draw": draw}


def surrogate(
    b: TokenBatch,
    *,
    q: Tensor,
    bottom: Tensor | None = None,
    draw: Tensor | None = None,
    gate: Gate = "mass",
    threshold: AtLeast0 | None = None,
    rate: Share = 0.1,
    exponent: Above0 = 2.0,
    factor: Share | None = None,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
) -> Surrogate:
    """Given the numbers of `whole_batch`. Raises ValueError where the gate misses its threshold or field."""
    if gate in ("fixed", "age") and threshold is None:
        raise ValueError(f"sat_open: gate {gate} needs a threshold")
    limit = torch.nan if threshold is None else threshold
    u = score(b, gate)
    q = q.to(u)
    if gate in ("stratum", "group"):
        q = q.gather(-1, classes(b, gate, q.shape[-1]))
    else:
        q = torch.full_like(u, limit) if gate == "fixed" else q.unsqueeze(-1)
    if gate == "age":
        gated = b.need("age", "sat_open") > limit
    elif gate == "random":
        gated = b.need("uniform", "sat_open") < rate
    elif gate == "inverted":
        if bottom is None or draw is None:
            raise ValueError("sat_open: gate inverted needs the numbers of `whole_batch`")
        bottom, uniform = bottom.to(u).unsqueeze(-1), b.need("uniform", "sat_open")
        gated = (u < bottom) | ((u == bottom) & (uniform <= draw.unsqueeze(-1)))
    else:
        gated = u > q
    gated = b.mask & gated & (q > 0)
    c = kernel(u, q, exponent, factor)
    S, active, diagnostics = contracted(b, log_ratio(b), gated, c, eps_low, eps_high)
    return Surrogate(S, active, diagnostics | {"q": Diagnostic(q, "max")})
