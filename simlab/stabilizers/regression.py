"""Regression: S = A log pi - (tau/2) L^2, L the log-ratio log(pi/mu) that is regressed on A / tau.

Source: Kimi k1.5 (2501.12599) eq. (3); verl `dro` (its beta is tau, without a default); ROLL kimi15 (0.1, taken here).

No ratio weighs anything, so any lag is allowed; tau pulls back to mu. `level`:

    token      L = d of the token, as verl and ROLL have it        weight A - tau d
    sequence   L = D, the sum over the response, as the papers do;  weight A - tau D
               L^2 counts once, 1/T of it on each token

The token form drops every cross term d_s d_t of the papers' square. With tau = 1 / t at level sequence the
weight is t times that of prime-rl's pmd_mean (2602.05933), A / t - D. A is the reward less its group
mean in Kimi. Equal to OAPL's in the limit of equal rewards up to its factor.

Gradient weight on grad log pi: A - tau L.
"""

from __future__ import annotations

from typing import Annotated

import torch

from simlab.core.arguments import Interval
from simlab.core.per_response import response_lengths, response_sums, to_tokens
from simlab.core.tokens import Surrogate, TokenBatch, graded, log_ratio, on_mask
from simlab.stabilizers.parts import Level


def surrogate(
    b: TokenBatch,
    *,
    tau: Annotated[float, Interval("[0, inf)")] = 0.1,
    level: Level = "token",
) -> Surrogate:
    """tau in reward units a nat."""
    A, logp = on_mask(b, b.advantage), on_mask(b, b.logp)
    with torch.no_grad():
        L = log_ratio(b)
        square = L.square()
        if level == "sequence":
            L = to_tokens(b, response_sums(b, L))
            square = L.square() / to_tokens(b, response_lengths(b)).clamp(min=1)
        S, w = A * logp - tau / 2 * square, torch.where(b.mask, A - tau * L, 0.0)
    return Surrogate(graded(logp, S, w), w != 0, {})
