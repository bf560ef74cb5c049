"""Claim 13. Small identities that the neighbours of SAT rest on.

(ESTR)  Logits moved by iid noise eta of variance s^2: to first order delta(y) = eta_y - sum_w p_w eta_w
        (the Jacobian of log-softmax), so E_{y~p, eta} delta^2 = s^2 sum_y p_y |e_y - p|^2
        = s^2 (1 - sum p^2). ESTR divides by the entropy H instead; 1 - sum p^2 <= H since
        -log p >= 1 - p, and the two are not proportional.
(ASymPO) sum_i A_i l_i / sg[l_i] = sum_i A_i = 0 when advantages balance: the value vanishes, the
        gradient sum_i A_i grad l_i / l_i in general does not.
(EWMA)  W <- b W + 1, theta_prox <- (b W_prev theta_prox + theta)/W is sum_k b^(t-k) theta_k over
        sum_k b^(t-k); its centre of mass tends to b/(1-b), which is W_stale/2 at b = W_stale/(W_stale+2).
(prox)  A proximal policy between mu and pi only moves the bounds on r = pi/mu. Log-linear, per
        sampled token and not normalised (A-3PO), mu^a pi^(1-a): pi/pi_prox = r^a, so [1-e, 1+e] becomes [(1-e)^(1/a), (1+e)^(1/a)]. Arithmetic a mu + (1-a) pi:
        pi/pi_prox = r/(a + (1-a) r), so r <= a(1+e)/(1 - (1-a)(1+e)) where that is positive.
(k3)    k3(x) = x - 1 - log x satisfies k3(BU) = k3(B) + k3(U) + (B-1)(U-1).
"""

from __future__ import annotations

import numpy as np

from theory.search import Side
from theory.tables import softmax

NUMBER, TITLE = 13, "Scaling laws and re-mappings"
STATEMENT = (
    r"$E \delta^2 = s^2 (1 - \sum_a p_a^2) \le s^2 H$; ASymPO, EWMA, proximal and $k_3$ identities"
)
SHAPES = [{"V": V} for V in (2, 4, 12)]


def size(shape: dict) -> int:
    """Logits, then ten free numbers."""
    return shape["V"] + 10


def decode(shape: dict, x: np.ndarray) -> dict:
    """{"p", "theta", "l", "A", "beta", "a", "eps", "B", "U"}."""
    V = shape["V"]
    p, y = softmax(x[:V]), x[V:]
    unit = 1 / (1 + np.exp(-y))
    A = y[:4] - y[:4].mean()
    return {
        "p": p, "theta": y, "l": 0.01 + np.exp(y[:4]), "A": A,
        "beta": 0.02 + 0.96 * unit[4], "a": 0.05 + 0.9 * unit[5], "eps": 0.02 + 0.5 * unit[6],
        "B": float(np.exp(np.clip(y[7], -5, 5))), "U": float(np.exp(np.clip(y[8], -5, 5))),
    }  # fmt: skip


def ewma(theta: np.ndarray, beta: float) -> float:
    """The bias-corrected recursion of PPO-EWMA."""
    W, prox = 1.0, theta[0]
    for x in theta[1:]:
        W_new = beta * W + 1
        prox, W = (beta * W * prox + x) / W_new, W_new
    return float(prox)


def k3(x: float) -> float:
    """x - 1 - log x."""
    return x - 1 - np.log(x)


def arithmetic_bounds(a: float, eps: float) -> tuple[float, float]:
    """Bounds on r = pi/mu when the clip is on pi / (a mu + (1-a) pi); the upper may be infinite."""
    left = 1 - (1 - a) * (1 + eps)
    return a * (1 - eps) / (1 - (1 - a) * (1 - eps)), a * (1 + eps) / left if left > 0 else np.inf


def asympo(A: np.ndarray, losses: np.ndarray, stopped: np.ndarray) -> float:
    """sum_i A_i l_i / sg[l_i]."""
    return float((A * losses / stopped).sum())


def second_moment(p: np.ndarray, tiny: float = 1e-4) -> float:
    """E_{y~p} of delta(y)^2 / s^2 for noise +-s on one logit after another, s = tiny, exactly."""
    moved = [softmax(np.log(p) + s * row) for row in np.eye(len(p)) for s in (tiny, -tiny)]
    return float(sum((p * np.log(x / p) ** 2).sum() for x in moved)) / (2 * tiny**2)


def sides(instance: dict) -> list[Side]:
    """The identities; entropy against Gini."""
    p, theta, A = (np.asarray(instance[k]) for k in ("p", "theta", "A"))
    p = np.maximum(p, 1e-12) / np.maximum(p, 1e-12).sum()
    losses, beta = np.asarray(instance["l"]), instance["beta"]
    a, eps, B, U = (instance[k] for k in ("a", "eps", "B", "U"))
    gini, H = float(1 - (p**2).sum()), float(-(p * np.log(p)).sum())
    weights = beta ** np.arange(len(theta))[::-1]
    ages = np.arange(100_000 if beta > 0.95 else 5_000)
    mass = float((ages * beta**ages).sum() / (beta**ages).sum())
    W = 2 * beta / (1 - beta)  # the window whose middle this beta aims at
    mu = 0.1  # pi = r mu at the ends of the re-mapped band
    pi = mu * np.array([(1 - eps) ** (1 / a), (1 + eps) ** (1 / a)])
    loglinear = np.abs(pi / (mu**a * pi ** (1 - a)) - [1 - eps, 1 + eps]).max()
    ends = [r / (a + (1 - a) * r) for r in arithmetic_bounds(a, eps) if np.isfinite(r)]
    arithmetic = sum(abs(u - e) for u, e in zip(ends, (1 - eps, 1 + eps), strict=False))
    slopes = [
        asympo(A, losses * (1 + h), losses) / (h.max() * losses[i])
        for i, h in enumerate(np.eye(4) / 64)
    ]
    gap = np.abs(np.array(slopes) - A / losses).max() / (1 + np.abs(A / losses).max())
    averaged = float((weights * theta).sum() / weights.sum())
    return [
        Side("ESTR: E delta^2 is 1 - sum p^2 to first order", abs(second_moment(p) - gini), 1e-6),
        Side("1 - sum p^2 <= H", gini, H),
        Side("ASymPO: value 0", asympo(A, losses, losses), 0.0, True),
        Side("ASymPO: d loss / d l_i = A_i / l_i", float(gap), 1e-9),
        Side("EWMA = closed form", ewma(theta, beta), averaged, True),
        Side("EWMA centre of mass = W/2", mass, W / 2, True),
        Side("log-linear: pi/pi_prox is 1 -+ eps at its ends", float(loglinear), 0.0, True),
        Side("arithmetic: its ratio is 1 -+ eps at its ends", float(arithmetic), 0.0, True),
        Side(
            "k3(BU) = k3(B) + k3(U) + (B-1)(U-1)",
            k3(B * U),
            k3(B) + k3(U) + (B - 1) * (U - 1),
            True,
        ),
    ]


def tight():
    """Two equal tokens: 1/2 against log 2, the largest ratio of Gini to entropy."""
    return [(decode({"V": 2}, np.zeros(12)), "1 - sum p^2 <= H", 0.5 / np.log(2))]
