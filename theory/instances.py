"""Real vectors -> pairs of policies with a reward, shared by the claims on improvement bounds."""

from __future__ import annotations

import numpy as np

from theory.tables import Pair, policy, prefixes

# horizon and vocabulary small enough for enumeration; how the reward is made
SHAPES = [
    {"V": V, "T": T, "reward": reward}
    for V, T in ((2, 1), (2, 2), (3, 2), (2, 3), (3, 3), (2, 5))
    for reward in ("free", "sparse", "adversarial")
]


def size(shape: dict) -> int:
    """Logits of mu, their change, and a reward per answer."""
    return 2 * prefixes(shape["V"], shape["T"]) + shape["V"] ** shape["T"]


def decode(shape: dict, x: np.ndarray) -> dict:
    """{"mu", "pi", "R"}: R in [-1, 1]; "adversarial" takes the sign that hurts most, "sparse" also
    forbids tokens with small logits in both policies, so that prefixes are unreachable."""
    V, T = shape["V"], shape["T"]
    n = prefixes(V, T)
    z = x[:n]
    if shape["reward"] == "sparse":
        top = z.reshape(-1, V).max(-1, keepdims=True)
        z = np.where(z.reshape(-1, V) < top - 1.5, -np.inf, z.reshape(-1, V)).ravel()
    mu, pi = policy(V, T, z), policy(V, T, z + x[n : 2 * n])
    R = np.tanh(x[2 * n :])
    if shape["reward"] == "sparse":
        R = (R > 0.5).astype(float)
    if shape["reward"] == "adversarial":
        R = np.sign(Pair(mu, pi, R).remainder)
    return {"mu": mu, "pi": pi, "R": R}


def two_token_example(d: float = 0.2) -> dict:
    """T = 2, mu uniform, pi moved by d everywhere, R = the sign of the remainder: (33) is attained."""
    return homogeneous(np.array([0.5, 0.5]), np.array([0.5 + d, 0.5 - d]), 2)


def rare_token_example(T: int, p: float = 1e-3, d: float = 2e-5) -> dict:
    """A rare token (probability p) made likelier by d << p << 1/T everywhere: (33) is approached."""
    return homogeneous(np.array([1 - p, p]), np.array([1 - p - d, p + d]), T)


def homogeneous(m: np.ndarray, q: np.ndarray, T: int) -> dict:
    """mu = m and pi = q at every prefix, R = the sign of the remainder."""
    return hurt(*([np.tile(x, (len(m) ** t, 1)) for t in range(T)] for x in (m, q)))


def rare_prefix_example(T: int, e: float = 1e-2) -> dict:
    """Three tokens, pi differs from mu by TV e at the first token, and then after the two rare ones
    (probability e) only: D_max is e everywhere that matters, S/T far smaller. (33) is attained at T = 2."""
    mu, pi = ([np.array([row])] for row in ([1 - 2 * e, e, e], [1 - 2 * e, 0, 2 * e]))
    flat, moved = np.array([1 - e, e, 0]), np.array([1 - 2 * e, 2 * e, 0])
    for t in range(1, T):
        rare = np.arange(3**t) // 3 ** (t - 1) > 0
        mu.append(np.tile(flat, (3**t, 1)))
        pi.append(np.where(rare[:, None], moved, flat))
    return hurt(mu, pi)


def half_example(T: int, e: float = 1e-9) -> dict:
    """mu_1 = (1-e, e), pi_1 = (e, 1-e), after token 1 the same again, after token 0 both uniform, and
    pi = mu from the third token on: 4 xi S is never met by more than half, and by half here."""
    mu, pi, half = np.array([1 - e, e]), np.array([e, 1 - e]), np.array([0.5, 0.5])
    later = [np.full((2**t, 2), 0.5) for t in range(2, T)]
    return hurt([mu[None], np.stack([half, mu]), *later], [pi[None], np.stack([half, pi]), *later])


def hurt(mu: list, pi: list) -> dict:
    """Two policies, with R = the sign of the remainder, which makes Delta largest."""
    return {
        "mu": mu,
        "pi": pi,
        "R": np.sign(Pair(mu, pi, np.zeros(len(mu[0][0]) ** len(mu))).remainder),
    }
