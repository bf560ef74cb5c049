"""Bias of our methods, by martingale's exact bench, by its own estimators, and by simlab.verify.bias.

The bench enumerates every trajectory of small MDPs in rational arithmetic. Its behaviour policy at
lag n is the target after n exact ascent steps, its advantage the total return. Our methods join as
estimators through the weight that autograd puts on each log-prob.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from martingale.estimators import on_policy_gradient
from martingale.exact import bench, check_unbiased, defendants
from martingale.exact.random_mdp import make_mdp, make_policy, make_stale_policy
from martingale.mdp import MDP, enumerate_trajectories
from pairs import show

from simlab.core.tokens import TokenBatch
from simlab.stabilizers import STABILIZERS, bind
from simlab.verify import bias
from theory.tables import prefixes

SIZES = ((2, 2, 2), (3, 2, 2), (2, 3, 2), (2, 2, 3))  # states, actions, horizon
CONFIGS, LAGS = 12, (0, 1, 4)
ROUNDING = 1e-12  # relative to the true gradient
F64 = torch.float64


class Ours:
    """A method as an estimator of the bench: (trajectory, target, behaviour) -> gradient.

    pi_old is mu, or pi itself where the trainer recomputes it before the step (`prox`).
    """

    def __init__(self, name: str, prox: str = "mu", **arguments):
        self.method, self.prox = bind(name, **arguments), prox
        anchor = "" if prox == "mu" else ", pi_old = pi"
        self.label = f"`{name}({show(arguments)})`{anchor}"

    def __call__(self, trajectory, target, behavior) -> dict:
        steps = [(s, a) for s, a, _, _ in trajectory["steps"]]
        pi, mu, tv = (
            torch.tensor([float(f(s, a)) for s, a in steps], dtype=F64)
            for f in (target.prob, behavior.prob, lambda s, _: total_variation(target, behavior, s))
        )
        lp = pi.log().requires_grad_()
        b = TokenBatch(
            logp=lp,
            logp_mu=mu.log(),
            advantage=torch.full_like(pi, float(trajectory["return"])),
            mask=torch.ones(len(steps), dtype=torch.bool),
            response=torch.zeros(len(steps), dtype=torch.long),
            logp_prox=(mu if self.prox == "mu" else pi).log(),
            entropy_mu=torch.ones_like(pi),  # read by ESTR, whose score is 0 where it is asked
            tv=tv,
            uniform=torch.full_like(pi, 0.5),
            reward=torch.full_like(pi, float(trajectory["return"])),
            group=torch.zeros(len(steps), dtype=torch.long),
            position=torch.arange(len(steps)),
            topk=torch.full((len(steps), 1), -torch.inf, dtype=F64),
            topk_mu=torch.full((len(steps), 1), -torch.inf, dtype=F64),
        )
        S = self.method.surrogate(b, **self.method.stats([b])).S
        (weights,) = torch.autograd.grad(S.sum(), lp)
        found = {}
        for key, p, w in zip(steps, pi.tolist(), weights.tolist(), strict=True):
            found[key] = found.get(key, 0.0) + w / p
        return found


def total_variation(target, behavior, s: int) -> Fraction:
    """Half the summed distance of two policies at a state."""
    rows = target.as_dict()[s], behavior.as_dict()[s]
    return sum(abs(rows[0][a] - rows[1][a]) for a in rows[0]) / 2


HALF, TWO, FIFTH = Fraction(1, 2), Fraction(2), Fraction(1, 5)
ESTIMATORS = {
    "unweighted": (defendants.unweighted, Ours("none")),
    "seq_is": (defendants.seq_is, Ours("vcpo", cap=1e9, baseline=False)),
    "token_is": (defendants.token_is, Ours("pg")),
    "seq_truncated_is(2)": (
        defendants.seq_truncated_is(TWO),
        Ours("tis", form="pg", level="sequence"),
    ),
    "token_truncated_is(2)": (defendants.token_truncated_is(TWO), Ours("tis", form="pg")),
    "seq_masked_is(1/2, 2)": (
        defendants.seq_masked_is(HALF, TWO),
        Ours("mis", level="sequence", low=0.5, prox="pi"),
    ),
    "token_masked_is(1/2, 2)": (defendants.token_masked_is(HALF, TWO), Ours("mis", prox="pi")),
    "seq_ppo_clip(1/5)": (defendants.seq_ppo_clip(FIFTH), None),
    "token_ppo_clip(1/5)": (defendants.token_ppo_clip(FIFTH), Ours("ppo")),
    "seq_cispo(1/5, 1/5)": (defendants.seq_cispo(FIFTH, FIFTH), None),
    "token_cispo(1/5, 1/5)": (defendants.token_cispo(FIFTH, FIFTH), Ours("cispo", eps_low=0.2)),
}
SHARED = {name: both for name, both in ESTIMATORS.items() if both[1]}


def certificates(estimator) -> list:
    """What the bench finds, by MDP and lag."""
    return check_unbiased(
        estimator, n_configs=CONFIGS, lags=LAGS, sizes=SIZES, name="estimator"
    ).certificates


def distance(first: dict, second: dict) -> float:
    """Euclidean distance of two gradients."""
    return sum(float(first[key] - second[key]) ** 2 for key in second) ** 0.5


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_table_of_the_bench(name, rows):
    """Our method has the bias of martingale's estimator on every MDP, and so the same verdict."""
    theirs, mine = ESTIMATORS[name]
    exact = certificates(theirs)
    if mine:
        for want, got in zip(exact, certificates(mine), strict=True):
            size = float(want.sq_true_norm) ** 0.5
            assert distance(got.bias, want.bias) < ROUNDING * size
            assert (float(got.sq_bias) ** 0.5 < ROUNDING * size) == want.is_unbiased
    count = {lag: sum(c.is_unbiased for c in exact if c.lag == lag) for lag in LAGS}
    assert count[0] == CONFIGS
    assert (count[1], count[4]) == (CONFIGS, CONFIGS) or name != "seq_is"
    assert (count[1], count[4]) == (0, 0) or name.startswith("seq")
    assert count[4] < CONFIGS or name == "seq_is" or name.startswith("seq_truncated")
    label = mine.label if mine else "none of ours"
    rows.unbiased[name] = [label, *(f"{count[lag]} of {CONFIGS}" for lag in LAGS)]


def signed(i: int) -> tuple[MDP, object, bytes]:
    """The i-th random MDP with rewards shifted below 0, its target policy and its seed."""
    seed = f"signed {i}".encode()
    mdp = make_mdp(seed, *SIZES[i % len(SIZES)])
    shifted = {
        s: {a: {t: r - Fraction(3, 2) for t, r in row.items()} for a, row in rows.items()}
        for s, rows in mdp.rewards.items()
    }
    mdp = MDP(mdp.states, mdp.actions, mdp.transitions, shifted, mdp.horizon)
    return mdp, make_policy(seed + b"pi", mdp.states, mdp.actions), seed


def expected(estimator, i: int, lag: int) -> tuple[dict, dict, float]:
    """(its expected gradient, the true one, the size of the true one) on a signed MDP."""
    mdp, target, seed = signed(i)
    behavior = make_stale_policy(target, mdp, lag, bench.DEFAULT_ALPHA, seed + b"lag")
    true = on_policy_gradient(mdp, target)
    size = sum(float(g) ** 2 for g in true.values()) ** 0.5
    return bench.expected_gradient(mdp, estimator, target, behavior), true, size


def test_returns_have_both_signs():
    """The bench's own rewards are never negative; the shifted ones reach both sides of a clip."""
    for i in range(len(SIZES)):
        mdp, target, _ = signed(i)
        found = [t["return"] for s in mdp.states for t in enumerate_trajectories(mdp, target, s)]
        assert min(found) < 0 < max(found)


@pytest.mark.parametrize("name", SHARED)
def test_the_same_with_negative_returns(name):
    """With returns of both signs the expected gradients are martingale's too."""
    theirs, mine = SHARED[name]
    for i in range(len(SIZES)):
        for lag in (1, 6):
            want, _, size = expected(theirs, i, lag)
            got, _, _ = expected(mine, i, lag)
            assert distance(got, want) < ROUNDING * size


# ---------------------------------------------------------------- against simlab.verify.bias
ARGUMENTS = {"spo_scaled": {"alpha": 0.5}, "vcpo": {"cap": 1e9, "baseline": False}}
# these compare answers, by covariance or within a group, and the bench has one at a time
APART = ("asymre", "clip_cov", "gepo")
METHODS = [(name, ARGUMENTS.get(name, {})) for name in STABILIZERS if name not in APART]
METHODS += [("tis", {"form": "pg", "level": "sequence", "cap": 1e9}), ("tis", {"form": "pg"})]


def unbiased_there(name: str, arguments: dict, lag: int) -> bool:
    """simlab.verify.bias without engine noise: the size of the bias below rounding for each seed."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        start = torch.from_numpy(rng.standard_normal(prefixes(bias.V, bias.T)))
        R = torch.from_numpy(rng.random(bias.V**bias.T))
        theta = start
        for _ in range(lag):
            theta = theta + bias.ASCENT * bias.exact_gradient(theta, R)
        truth = bias.exact_gradient(theta, R)
        found = bias.gradients(name, theta, start, bias.log_probs(start), R, lag, **arguments)
        if (found["g"] - truth).norm() >= ROUNDING * truth.norm():
            return False
    return True


def unbiased_here(name: str, arguments: dict, lag: int) -> bool:
    """The bench on signed MDPs, the same criterion."""
    method = Ours(name, **arguments)
    for i in range(len(SIZES)):
        got, true, size = expected(method, i, lag)
        if distance(got, true) >= ROUNDING * size:
            return False
    return True


@pytest.mark.parametrize(("name", "arguments"), METHODS, ids=str)
def test_the_verdict_of_simlab_bias(name, arguments):
    """Biased or not is the same in both worlds: on-policy, and at lags where a method's numbers
    are not those of a whole batch, which the bench has not."""
    by_sequence = arguments.get("cap") == 1e9
    alone = by_sequence or not bind(name, **arguments).whole_batch
    for lag in (0, 1, 4) if alone else (0,):
        here, there = unbiased_here(name, arguments, lag), unbiased_there(name, arguments, lag)
        assert here == there == (by_sequence or (lag == 0 and name not in bias.BIASED_ON_POLICY))
