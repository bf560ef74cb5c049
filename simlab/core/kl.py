"""KL(pi || ref) per token, in nats, from the log-probs of the sampled token alone.

Every entry of `KL` maps logp `[...]` and logp_ref `[...]` to `[...]` in at least float32; no
gradient reaches the reference. With x = log pi - log ref and samples from pi, the expected
gradient is

              value             as a loss: E grad value     in the reward: E value grad log pi
    k1        x                 0                           grad KL(pi || ref)
    k2        x^2 / 2           grad KL(pi || ref)          second order in x
    k3        exp(-x) - 1 + x   grad KL(ref || pi)          grad KL(pi || ref) - grad KL(ref || pi)
    low_var   min(k3, 10)       k3's, 0 beyond the limit    k3's, with the value held
    abs       |x|               2 grad TV(pi, ref)          grad E|x| - 2 grad TV(pi, ref)

so k2 is the one to differentiate and k1 the one to put in the reward. Binary policy 0.8 against 0.5,
by its logit (the true gradient is 0.22181): as a loss 0, 0.22181, 0.30000 and, of `abs`, 0.32; in the
reward 0.22181, -0.04949, -0.07819, -0.07141, where the last three push away from the reference. Samples from another mu need the
ratio r = pi / mu: r k1 and r k3, r with its gradient, differentiate to grad KL(pi || ref).
Estimators: Schulman 2020; their gradients: OpenRLHF #1309.

Inputs are finite. A masked token's log-probs are selected away before, not after (`on_mask` on
both); its KL is then 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from simlab.core.tokens import LOG_RATIO_CAP, widen

LIMIT = 10.0  # of low_var


def k1(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """x: unbiased value. Expected gradient as a loss 0, in the reward that of KL(pi||ref)."""
    return widen(logp) - widen(logp_ref.detach())


def k2(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """x^2 / 2: biased value. Expected gradient as a loss that of the reverse KL(pi||ref), in the
    reward of second order in x and no KL's."""
    return k1(logp, logp_ref) ** 2 / 2


def k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """exp(-x) - 1 + x: unbiased value. Expected gradient as a loss that of the forward KL(ref||pi),
    in the reward that of KL(pi||ref) minus that of KL(ref||pi).

    Held without gradient where -x > LOG_RATIO_CAP; `overflow` finds those tokens. verl's "k3" is `low_var`.
    """
    y = (-k1(logp, logp_ref)).clamp(max=LOG_RATIO_CAP)
    return torch.expm1(y) - y


def low_var(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """min(k3, 10), the low_var_kl of verl and slime. As a loss it has k3's gradient (the forward
    KL's), but none on tokens with x < -2.61 or x > 11; in the reward k3's, with the value held.

    Both clamp the value to [-10, 10], of which only the upper end can bind. verl 0.9.1 clamps x to
    [-20, 20] before: this changes neither value nor gradient, as the value is above 10 there, but
    it spares the overflow of exp, which without it makes the gradient NaN below x = -88 (float32).
    """
    return k3(logp, logp_ref).clamp(max=LIMIT)


def absolute(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """|x|, verl's "abs": no estimate of a KL. As a loss its expected gradient is twice that of the
    total variation between pi and ref; a token with x = 0 has none."""
    return k1(logp, logp_ref).abs()


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var": low_var,
    "abs": absolute,
}


def unbiased(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The value of KL[kind] with the gradient of k2, the reverse KL's as a loss (verl's "k3+").

    Raises ValueError for an unknown kind.
    """
    if kind not in KL:
        raise ValueError(f"no KL term {kind!r}; there are {', '.join(KL)}")

    def straight_through(logp: Tensor, logp_ref: Tensor) -> Tensor:
        gradient = k2(logp, logp_ref)
        return KL[kind](logp, logp_ref).detach() + (gradient - gradient.detach())

    return straight_through


def overflow(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Tokens `[...]` (bool) on which k3 is held at exp(LOG_RATIO_CAP) and has no gradient."""
    return -k1(logp.detach(), logp_ref) > LOG_RATIO_CAP
