"""TROLL: S = A pi~/mu - alpha KL(pi || pi~), pi~_v from (log pi_v + eta log mu_v) / (1 + eta), KL(pi~ || mu) <= eps.

Source: TROLL (2510.03817), from notes; prime-rl's trpl_loss, whose eps 0.05 and alpha 1 are taken here.

pi~ is the distribution nearest to pi, by KL(. || pi), within eps nats of mu, by KL(. || mu), at every state:
the multiplier eta >= 0 is 0 inside of the ball, where S is A pi/mu without a clip. The first term learns on the
projection, the second pulls pi onto it; pi~ is a constant there, and eta in both. (The paper's eta is one over
the code's; the projections are the same.)

The distributions are those of the head (core/head.py), the sampled token and one bucket for the rest: exact
where the head is the whole vocabulary, as in the simulator; on engines mu's K likeliest tokens, where the code
joins those of pi. A log-prob of a token is held above -27.6, as in the code, and where the bucket of either
policy has mass, both above 1e-6.

With t = 1 / (1 + eta) the gradient weight on each event v, the sampled one a, is
A t (pi~_a/mu_a) (1[v = a] - pi~_v) - alpha pi_v (log(pi_v/pi~_v) - KL), and that of the bucket is passed on to
the tokens by its mass 1 - sum pi.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.core.head import Columns, graded_head, head
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, on_mask
from simlab.stabilizers.coefficients import LEAST
from simlab.stabilizers.parts import AtLeast0

LOWEST = -27.6  # nats, of the log-prob of a token
NOTHING = -1e4  # nats, of an event that a row does not have
HALVINGS = 40


def events(top: Tensor, own: Tensor, bucket: Tensor, rest: Tensor) -> Tensor:
    """Log-probs `[..., N, K + 2]` of the head, the sampled token and, where `bucket` says so, the rest."""
    last = torch.where(bucket, rest.clamp(min=LEAST).log(), NOTHING)
    named = torch.cat([top, own.unsqueeze(-1)], -1).clamp(min=LOWEST)
    named[..., :-1].masked_fill_(top == -torch.inf, NOTHING)
    return torch.cat([named, last.unsqueeze(-1)], -1).log_softmax(-1)


def share_of_pi(log_pi: Tensor, log_mu: Tensor, eps: float) -> Tensor:
    """t = 1 / (1 + eta) in [0, 1] `[..., N, 1]`, the feasible end of a bisection; 1 inside of the ball."""

    def too_far(t: Tensor) -> Tensor:
        y = torch.log_softmax(t * log_pi + (1 - t) * log_mu, -1)
        return (y.exp() * (y - log_mu)).sum(-1, keepdim=True) > eps

    low = torch.zeros_like(log_pi[..., :1])
    inside = ~too_far(low + 1)
    for n in range(HALVINGS):
        middle = low + 0.5 ** (n + 1)
        low = torch.where(too_far(middle), low, middle)
    return torch.where(inside, 1.0, low)


def surrogate(
    b: TokenBatch, *, eps: AtLeast0 = 0.05, alpha: AtLeast0 = 1.0, columns: Columns = None
) -> Surrogate:
    """eps in nats. Needs `topk` and `topk_mu`, and reads the first `columns` of them (None: all)."""
    tops, own, A = head(b, "troll", columns), on_mask(b, b.logp), on_mask(b, b.advantage)
    with torch.no_grad():
        own_mu = on_mask(b, b.logp_mu)
        p, q = tops.logp.exp(), tops.logp_mu.exp()
        rest, rest_mu = 1 - own.exp() - p.sum(-1), 1 - own_mu.exp() - q.sum(-1)
        bucket = (rest > LEAST) | (rest_mu > LEAST)
        log_pi = events(tops.logp, own, bucket, rest)
        log_mu = events(tops.logp_mu, own_mu, bucket, rest_mu)
        t = share_of_pi(log_pi, log_mu, eps).detach()
        near = torch.where(t == 1, log_pi, t * log_pi + (1 - t) * log_mu).log_softmax(-1)
        ratio = (near - log_mu)[..., -2].exp()
        gap = log_pi - torch.where(t == 1, log_pi, near).detach()
        pi, kl = log_pi.exp(), (log_pi.exp() * gap).sum(-1)
        S = A * ratio - alpha * kl
        a = torch.zeros_like(pi)
        a[..., -2] = 1
        pull = pi * (gap - kl.unsqueeze(-1))
        g = (A * ratio).unsqueeze(-1) * t * (a - near.exp()) - alpha * pull
        # the bucket's log-prob moves by -p_v / rest with that of a token
        passed = torch.where(bucket & (rest > LEAST), g[..., -1] / rest.clamp(min=LEAST), 0.0)
        w = torch.where(own > LOWEST, g[..., -2], 0.0) - passed * own.exp()
        c = torch.where(tops.logp > LOWEST, g[..., :-2], 0.0) - passed.unsqueeze(-1) * p
        w, c = torch.where(b.mask, w, 0.0), torch.where(b.mask.unsqueeze(-1), c, 0.0)
    diagnostics = {
        "projected": Diagnostic(t.squeeze(-1) < 1, "mean"),
        "head_mass": Diagnostic(1 - rest_mu - torch.where(tops.sampled, 0.0, own_mu.exp()), "mean"),
    }
    S = graded_head(own, tops.logp, S, w, c)
    return Surrogate(S, (w != 0) | (c != 0).any(-1), diagnostics)
