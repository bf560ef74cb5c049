"""Two autoregressive policies over a small vocabulary as tables, and everything about them, exactly.

Answers are all V**T strings of T tokens; a prefix of length t is a number in base V. A policy is a
list of T arrays, `p[t]` of shape `[V**t, V]`, rows summing to 1. R is `[V**T]`, |R| <= xi.
Symbols follow the paper behind SAT (2607.18722): r = pi/mu, J, L', Delta, TV.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

Policy = list[np.ndarray]


def softmax(z: np.ndarray) -> np.ndarray:
    """Over the last axis; -inf is probability 0."""
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def prefixes(V: int, T: int) -> int:
    """Number of (prefix, token) logits of a policy."""
    return sum(V**t for t in range(T)) * V


def policy(V: int, T: int, z: np.ndarray) -> Policy:
    """A policy from `prefixes(V, T)` logits, shortest prefixes first."""
    cut = np.cumsum([V**t * V for t in range(T)])[:-1]
    return [softmax(part.reshape(-1, V)) for part in np.split(np.asarray(z, float), cut)]


def tv(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Total variation (1/2) sum |p - q| over the last axis."""
    return np.abs(p - q).sum(-1) / 2


class Pair:
    """mu (what sampled) and pi (what is judged) with a reward: J, L', Delta and the distances.

    Raises ValueError for shapes that are not those of two policies and a reward.
    """

    def __init__(self, mu: Policy, pi: Policy, R: np.ndarray):
        self.mu, self.pi, self.R = mu, pi, np.asarray(R, float)
        self.T, self.V = len(mu), mu[0].shape[-1]
        for name, p in (("mu", mu), ("pi", pi)):
            wanted = [(self.V**t, self.V) for t in range(self.T)]
            if (shapes := [x.shape for x in p]) != wanted:
                raise ValueError(f"{name} has the shapes {shapes}, not {wanted}")
        if self.R.shape != (self.V**self.T,):
            raise ValueError(f"R has the shape {self.R.shape}, not {(self.V**self.T,)}")
        self.xi = float(np.abs(self.R).max())

    def need_support(self) -> None:
        """Raises ValueError unless pi << mu at every prefix that mu reaches."""
        for seen, m, p in zip(self.visits, self.mu, self.pi, strict=True):
            if ((seen[:, None] > 0) & (m == 0) & (p > 0)).any():
                raise ValueError("the claim needs pi << mu, and mu misses a token that pi has")

    def along(self, p: Policy) -> np.ndarray:
        """Probability of each token of each answer `[V**T, T]`."""
        y = np.arange(self.V**self.T)
        later = [self.V ** (self.T - t) for t in range(self.T)]
        rows = [y // n for n in later]
        tokens = [y // (n // self.V) % self.V for n in later]
        return np.stack([p[t][rows[t], tokens[t]] for t in range(self.T)], -1)

    @cached_property
    def p_mu(self) -> np.ndarray:
        """mu(y) `[V**T]`."""
        return self.along(self.mu).prod(-1)

    @cached_property
    def p_pi(self) -> np.ndarray:
        """pi(y) `[V**T]`."""
        return self.along(self.pi).prod(-1)

    @cached_property
    def r(self) -> np.ndarray:
        """Ratios of sampled tokens `[V**T, T]`; 1 where mu cannot draw the token (never weighted)."""
        m = self.along(self.mu)
        return np.where(m > 0, self.along(self.pi) / np.where(m > 0, m, 1), 1.0)

    @cached_property
    def dJ(self) -> float:
        """J(pi) - J(mu)."""
        return float(((self.p_pi - self.p_mu) * self.R).sum())

    @cached_property
    def L(self) -> float:
        """L'_mu(pi) = E_mu[R sum_t (r_t - 1)], (3)."""
        return float((self.p_mu * self.R * (self.r - 1).sum(-1)).sum())

    @cached_property
    def remainder(self) -> np.ndarray:
        """sum_t (r_t - 1)(1 - prod_{j>t} r_j) `[V**T]`; Delta = E_mu[R times it], (31)."""
        ones = np.ones((len(self.r), 1))
        future = np.concatenate([self.r[:, ::-1].cumprod(-1)[:, ::-1][:, 1:], ones], -1)
        return ((self.r - 1) * (1 - future)).sum(-1)

    @cached_property
    def Delta(self) -> float:
        """Delta(mu, pi) of (31)."""
        return float((self.p_mu * self.R * self.remainder).sum())

    @cached_property
    def visits(self) -> list[np.ndarray]:
        """P(prefix) under mu, `[V**t]` for each t."""
        out = [np.ones(1)]
        for t in range(self.T - 1):
            out.append((out[t][:, None] * self.mu[t]).ravel())
        return out

    @cached_property
    def tvs(self) -> list[np.ndarray]:
        """D_TV at each prefix, `[V**t]` for each t."""
        return [tv(m, p) for m, p in zip(self.mu, self.pi, strict=True)]

    @cached_property
    def tv_mean(self) -> np.ndarray:
        """E_mu D_TV[s_t] `[T]`; its sum is S."""
        return np.array([(v * d).sum() for v, d in zip(self.visits, self.tvs, strict=True)])

    @property
    def S(self) -> float:
        """Expected sum of one-step TV along an answer."""
        return float(self.tv_mean.sum())

    @cached_property
    def tv_max(self) -> float:
        """Largest TV at a prefix that mu reaches."""
        return max(float(d[v > 0].max()) for v, d in zip(self.visits, self.tvs, strict=True))

    @cached_property
    def tv_answers(self) -> float:
        """TV of the two distributions over whole answers."""
        return float(tv(self.p_mu, self.p_pi))
