"""Claim 12. The bias of each stabilizer's expected gradient, exactly, with the registry's own functions.

World: one prompt, all V**T answers enumerated, a tabular softmax policy, rewards in [0, 1], float64.
mu is the policy at some weights with Gaussian logit noise; pi is `lag` exact ascent steps on J later.
The advantage is R(y) - J(mu), GRPO's in the limit of a large group, without the division.

    g(method) = grad_theta E_{y~mu} sum_t S_t,   true gradient = grad_theta J(pi)
    bias = g(method) - grad J
         = [g(pg) - grad J]  prefix and continuation: a token ratio corrects neither which prefixes are
           reached nor what follows the token; equal to grad Delta of SAT (31)
         + sum over tokens of (w_method - w_pg) grad log pi, one term a token:
           outward (A d > 0) or pull-back (A d <= 0), each cut (no gradient) or reweighted
         + sum over tokens that were not sampled: the gradient on the head (core/head.py)

What the claim says, and `sides` checks: the first part is grad Delta, by finite differences of the tables of
theory/; at equal policies there is no outward part and, but for BIASED_ON_POLICY, no bias; PPO cuts outward tokens
and changes nothing else, `none` (no ratio) reweighs both sides and cuts nothing; the parts add up. Whole-batch numbers are those of a batch of COPIES answers in which
every answer is as frequent as mu says.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from simlab.core.tokens import OPTIONAL, TokenBatch, log_ratio
from simlab.simulator.sample import Answers, full_distribution
from simlab.stabilizers import STABILIZERS, bind
from theory.search import Side
from theory.tables import Pair, policy, prefixes

V, T, ASCENT, COPIES = 3, 3, 1.0, 10_000
ROUNDING = 1e-9  # of the parts of a bias, relative to |grad J|
# methods whose expected gradient is not that of J at equal policies, and why
BIASED_ON_POLICY = {
    "asympo": "divides by the mean -log pi of the response",
    "clip_cov": "drops tokens",
    "gepo": "weighs a response by its likelihood",
    "luspo": "weighs a response by its length",
    "oapl": "fits a target, and scales the gradient by 2 beta2",
    "opmd": "shrinks the gradient",
    "spo_scaled": "weighs the two signs apart",
}
PARTS = (
    "prefix and continuation",
    "outward cut",
    "outward reweighted",
    "pull-back cut",
    "pull-back reweighted",
    "other tokens",
)


def slots() -> Tensor:
    """Index of (prefix, token) in the flat logits for each token of each answer `[V**T, T]`."""
    y = torch.arange(V**T)
    first = [sum(V**k for k in range(t)) for t in range(T)]
    return torch.stack([(first[t] * V) + y // V ** (T - t - 1) for t in range(T)], -1)


def log_probs(theta: Tensor) -> Tensor:
    """log pi of each token of each answer `[V**T, T]` from flat logits."""
    return torch.log_softmax(theta.view(-1, V), -1).flatten()[slots()]


def exact_gradient(theta: Tensor, R: Tensor) -> Tensor:
    """grad J."""
    theta = theta.detach().requires_grad_()
    J = (log_probs(theta).sum(-1).exp() * R).sum()
    return torch.autograd.grad(J, theta)[0]


def batch(
    theta: Tensor, start: Tensor, mu: Tensor, R: Tensor, age: int = 0
) -> tuple[TokenBatch, Tensor]:
    """Every token of every answer as one batch, and the probability mu(y) of each answer."""
    p_mu = mu.sum(-1).exp()
    A = (R - (p_mu * R).sum()).unsqueeze(-1).expand(V**T, T)
    slot, logp = slots().flatten(), log_probs(theta).flatten()
    table = torch.log_softmax(theta.view(1, -1, V), -1)
    tables = {
        "logp": table,
        "logp_mu": torch.empty_like(theta).index_put((slot,), mu.flatten()).view(1, -1, V),
        "logp_prox": torch.log_softmax(start.view(1, -1, V), -1),
    }
    answers = Answers(slot.unsqueeze(0), R)
    seen = full_distribution(tuple(OPTIONAL), answers, tables, T)
    b = TokenBatch(
        logp=logp,
        logp_mu=mu.flatten(),
        advantage=A.flatten(),
        mask=torch.ones(V**T * T, dtype=torch.bool),
        response=torch.arange(V**T).repeat_interleave(T),
        logp_prox=log_probs(start).flatten(),
        age=torch.full((V**T * T,), age),
        reward=R.repeat_interleave(T),
        group=torch.zeros(V**T * T, dtype=torch.int64),
        position=torch.arange(T).repeat(V**T),
        uniform=torch.from_numpy(np.random.default_rng(12).random(len(slot))),
        **{name: x.squeeze(0) for name, x in seen.items()},
    )
    return b, p_mu


def as_frequent(b: TokenBatch, p_mu: Tensor) -> TokenBatch:
    """A batch of about COPIES answers in which each is as frequent as its probability says."""
    answers = torch.arange(V**T).repeat_interleave((p_mu * COPIES).round().long())
    index = (answers.unsqueeze(-1) * T + torch.arange(T)).flatten()
    response = torch.arange(len(answers)).repeat_interleave(T)
    return replace(b.take(index), response=response, n_responses=len(answers))


def gradients(
    name: str, theta: Tensor, start: Tensor, mu: Tensor, R: Tensor, age: int = 0, **arguments
) -> dict[str, Tensor]:
    """Weights w on grad log pi `[N]`, `active`, the batch and the gradient of one method, and of the
    latter what comes through the head."""
    theta = theta.detach().requires_grad_()
    b, p_mu = batch(theta, start, mu, R, age)
    method = bind(name, **arguments)
    S, active, _ = method.surrogate(b, **method.stats([as_frequent(b, p_mu)]))
    top = b.need("topk", name)
    loss = (p_mu.repeat_interleave(T) * S).sum()
    g, w, c = torch.autograd.grad(
        loss, (theta, b.logp, top), retain_graph=True, materialize_grads=True
    )
    (head,) = torch.autograd.grad(top, theta, c)
    found = {"g": g, "w": w, "active": active, "d": log_ratio(b).detach(), "A": b.advantage}
    return found | {"head": head}


def study(lags: tuple[int, ...] = (0, 1, 4, 16), seeds: int = 8, noise: float = 0.05) -> list[dict]:
    """One row per method and lag: size and direction of the bias, and its parts, means over seeds."""
    methods = {name: (name, {}) for name in STABILIZERS}
    methods |= {"sat-gspo": ("sat", {"level": "sequence"})}
    methods |= {"spo_scaled": ("spo_scaled", {"alpha": 0.5})}  # no published value
    rows = []
    for lag in lags:
        comparisons: dict[str, list] = {name: [] for name in methods}
        for seed in range(seeds):
            rng = np.random.default_rng([seed, 12])
            start = torch.from_numpy(rng.standard_normal(prefixes(V, T)))
            R = torch.from_numpy(rng.random(V**T))
            mu = log_probs(start + noise * torch.from_numpy(rng.standard_normal(len(start))))
            theta = start
            for _ in range(lag):
                theta = theta + ASCENT * exact_gradient(theta, R)
            truth = exact_gradient(theta, R)
            plain = gradients("pg", theta, start, mu, R)
            for label, (name, arguments) in methods.items():
                own = gradients(name, theta, start, mu, R, lag, **arguments)
                comparisons[label].append(compare(own, plain, theta, truth))
        for name, values in comparisons.items():
            means = {key: float(np.mean([v[key] for v in values])) for key in values[0]}
            rows.append({"method": name, "lag": lag} | means)
    return rows


def compare(own: dict, plain: dict, theta: Tensor, truth: Tensor) -> dict[str, float]:
    """Sizes relative to |grad J|: the bias, the cosine, the parts, and the rounding of their sum."""
    bias, parts = own["g"] - truth, parts_of(own, plain, theta, truth)
    size = truth.norm()
    out = {"bias": bias.norm() / size, "cosine": own["g"] @ truth / (own["g"].norm() * size)}
    out |= {name: x.norm() / size for name, x in parts.items()}
    out["sum_error"] = (sum(parts.values()) - bias).norm() / size
    return {name: float(x) for name, x in out.items()}


def parts_of(own: dict, plain: dict, theta: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """The parts of a bias, vectors."""
    parts = {"prefix and continuation": plain["g"] - truth}
    outward = own["A"] * own["d"] > 0
    for side, chosen in (("outward", outward), ("pull-back", ~outward)):
        for what, kind in (("cut", ~own["active"]), ("reweighted", own["active"])):
            w = torch.where(chosen & kind, own["w"] - plain["w"], 0)
            parts[f"{side} {what}"] = push(theta, w)
    parts["other tokens"] = own["head"]
    return parts


def sides(rows: list[dict], seed: int = 0) -> list[Side]:
    """What claim 12 says of `rows` of the study, and of one more, at equal policies."""
    found = [
        Side("the parts add up", max(row["sum_error"] for row in rows), ROUNDING),
        Side("bias of pg = grad Delta", remainder_error(seed), 1e-7),
    ]
    for row in study(lags=(0,), seeds=1, noise=0.0):
        outward = row["outward cut"] + row["outward reweighted"]
        found.append(Side(f"{row['method']}: nothing outward at d = 0", outward, ROUNDING))
        if row["method"] not in BIASED_ON_POLICY:
            found.append(Side(f"{row['method']}: no bias on policy", row["bias"], ROUNDING))
    last = {row["method"]: row for row in rows if row["lag"] == rows[-1]["lag"]}
    for name, own in (("ppo", ("outward cut",)), ("none", PARTS[2:5:2])):
        rest = sum(last[name][part] for part in PARTS[1:] if part not in own)
        found.append(Side(f"{name}: {' and '.join(own)} only", rest, ROUNDING))
        found += [Side(f"{name}: some {part}", 1e-6, last[name][part]) for part in own]
    return found


def remainder_error(seed: int) -> float:
    """Largest difference between g(pg) - grad J and grad Delta by central differences of theory/tables."""
    rng = np.random.default_rng([seed, 12])
    n = prefixes(V, T)
    start, change, R = rng.standard_normal(n), 0.3 * rng.standard_normal(n), rng.random(V**T)

    def delta(z: np.ndarray) -> float:
        return Pair(policy(V, T, start), policy(V, T, z), R).Delta

    z = start + change
    numeric = [(delta(z + 1e-5 * e) - delta(z - 1e-5 * e)) / 2e-5 for e in np.eye(n)]
    theta, begin, reward = (torch.from_numpy(x) for x in (z, start, R))
    plain = gradients("pg", theta, begin, log_probs(begin), reward)
    parts = parts_of(plain, plain, theta, exact_gradient(theta, reward))
    return float((parts[PARTS[0]] - torch.tensor(numeric)).abs().max())


def push(theta: Tensor, w: Tensor) -> Tensor:
    """sum over tokens of w grad log pi."""
    theta = theta.detach().requires_grad_()
    return torch.autograd.grad((log_probs(theta).flatten() * w).sum(), theta)[0]
