"""Our aggregations, KL terms, statistics, advantages and averages against those of the peers."""

from __future__ import annotations

from dataclasses import dataclass

import peers
import polgrad
import pytest
import torch
from pairs import (
    BOTH,
    HORIZON,
    NEAR,
    NOTHING,
    SEEDS,
    WIDE,
    Call,
    Deviation,
    Padded,
    Pair,
    check,
    draw,
    fold,
    moved,
    ours,
)
from peers import trl
from polgrad import GroupNormConfig
from torch import Tensor

from simlab.core import kl
from simlab.core.advantages import ADVANTAGES
from simlab.core.aggregate import mean
from simlab.core.mismatch import mismatch
from simlab.core.state import ewma_start, ewma_step
from simlab.core.tokens import log_ratio, ratio
from simlab.stabilizers import bind


# ---------------------------------------------------------------- aggregations
def undefined(loss):
    """NaN with the gradient of loss."""
    return lambda x: loss(x) + torch.nan


EMPTY = "a batch without tokens is NaN, with us 0; both gradients are 0"


def aggregated(how: str) -> Call:
    """-A log pi under one of our aggregations."""
    return Call(f"aggregation {how}", ours("none", how).function)


def micro(how: str) -> Call:
    """The same over two micro-batches: sums and counts are added before the division."""

    def loss(x: Padded) -> Tensor:
        parts = []
        for rows in (slice(0, 2), slice(2, None)):
            cut = {name: getattr(x, name)[rows] for name in ("lp", "mu", "prox", "A", "mask")}
            b = moved(x, **cut, order=torch.arange(cut["mask"].numel())).flat()
            parts.append(fold(how, bind("none").surrogate(b).S, b))
        return -sum(total for total, _ in parts) / sum(count for _, count in parts)

    return Call(f"aggregation {how} of micro-batches", loss)


def mode(how: str) -> str:
    """verl's name of our aggregation."""
    return how.replace("_", "-")


AGGREGATED = [
    Pair(
        aggregated(how),
        peers.verl_agg(mode(how), **extra),
        paper,
        deviations=(Deviation(EMPTY, NOTHING, undefined(aggregated(how))), *more),
    )
    for how, extra, paper, more in (
        ("token_mean", {}, "both: DAPO", ()),
        ("seq_mean_token_mean", {}, "both: GRPO", ()),
        ("seq_mean_token_sum", {}, "both", ()),
        (
            "seq_mean_token_sum_norm",
            {"loss_scale_factor": HORIZON},
            "ours: Dr. GRPO divides by a constant",
            (
                Deviation(
                    "without loss_scale_factor it divides by the padded width",
                    BOTH,
                    lambda x: aggregated("seq_mean_token_sum")(x) / x.mask.shape[1],
                    peer=peers.verl_agg("seq-mean-token-sum-norm"),
                ),
            ),
        ),
    )
]
MICRO = [
    Pair(micro(how), peers.verl_agg_micro(mode(how)), "both")
    for how in (
        "token_mean",
        "seq_mean_token_mean",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
    )
]


# ---------------------------------------------------------------- KL terms
def kl_term(label: str, function) -> Call:
    """A KL term per token, 0 behind the mask."""
    return Call(f"`kl.{label}`", lambda x: torch.where(x.mask, function(x.lp, x.ref), 0.0))


def kl_loss(function, *, by_ratio: bool = False):
    """The token mean of a KL term as a loss, or of r times it."""

    def loss(x: Padded) -> Tensor:
        b = x.flat(logp_ref=x.ref)
        term = torch.where(b.mask, function(b.logp, b.logp_ref), 0.0)
        return mean(*fold("token_mean", ratio(log_ratio(b)) * term if by_ratio else term, b))

    return loss


NO_A = tuple(moved(x, A=torch.zeros_like(x.A)) for x in BOTH)
KL = [
    Pair(kl_term("k1", kl.k1), peers.verl_kl("k1"), "both", BOTH + WIDE),
    Pair(kl_term("k2", kl.k2), peers.verl_kl("k2"), "both", BOTH + WIDE),
    Pair(kl_term("abs", kl.absolute), peers.verl_kl("abs"), "no paper: verl's own", BOTH + WIDE),
    Pair(
        kl_term("low_var", kl.low_var),
        peers.verl_kl("low_var_kl"),
        "neither: the k3 of GRPO has no limit",
        BOTH + WIDE,
    ),
    Pair(
        kl_term("k3", kl.k3),
        peers.verl_kl("k3"),
        "ours: the k3 of GRPO has no limit",
        NEAR,
        (Deviation("its k3 is low_var: held at 10", WIDE, kl_term("low_var", kl.low_var)),),
    ),
    Pair(
        kl_term('unbiased("k1")', kl.unbiased("k1")),
        peers.verl_kl("k1+"),
        "no paper: verl's own",
        BOTH + WIDE,
    ),
    Pair(
        kl_term('unbiased("low_var")', kl.unbiased("low_var")),
        peers.verl_kl("k3+"),
        "no paper: verl's own",
        BOTH + WIDE,
    ),
    Pair(kl_term("k1", kl.k1), peers.polgrad_kl("K1"), "both", BOTH + WIDE),
    Pair(kl_term("k2", kl.k2), peers.polgrad_kl("K2"), "both", BOTH + WIDE),
    Pair(kl_term("k3", kl.k3), peers.polgrad_kl("K3"), "both", BOTH + WIDE),
    Pair(
        Call("`kl.k3` as a loss, token_mean", kl_loss(kl.k3)),
        trl("dapo", beta=1.0, bias_kl=False),
        "both",
        NO_A,
    ),
    Pair(
        Call("r times `kl.k3` as a loss, token_mean", kl_loss(kl.k3, by_ratio=True)),
        trl("dapo", beta=1.0),
        "neither: GRPO has no r; TRL's default",
        NO_A,
    ),
]


# ---------------------------------------------------------------- statistics
def statistic(name: str) -> Call:
    """One number of `mismatch`."""
    return Call(f'`mismatch([b])["{name}"]`', lambda x: mismatch([x.flat()])[name].detach())


def ess_share(x: Padded) -> Tensor:
    """VCPO's ESS / B of uncapped weights, read off its learning-rate factor."""
    method = bind("vcpo", cap=1e30, rule="linear")
    return method.stats([x.flat()])["lr_factor"].detach()


def without_guard(x: Padded) -> Tensor:
    """The same without the 1e-8 in its denominator."""
    w = torch.where(x.mask, (x.lp - x.mu).detach(), 0.0).sum(1).exp()
    return ess_share(x) * (1 + 1e-8 / (w**2).sum())


TWO_ROWS = (draw(80, gap=0.1, lengths=(4, 1)),)
STATISTICS = [
    Pair(statistic("k1"), peers.verl_metric("kl"), "both", gradient=False),
    Pair(statistic("k3"), peers.verl_metric("k3_kl"), "both", gradient=False),
    Pair(statistic("chi2"), peers.verl_metric("chi2_token"), "both", gradient=False),
    Pair(statistic("ess"), peers.polgrad_ess("token"), "both", gradient=False),
    Pair(
        Call('`vcpo(cap=inf)` "lr_factor", linear: ESS / B', ess_share),
        peers.polgrad_ess("sequence"),
        "ours: 1e-8 in the denominator, from its official code",
        deviations=(
            Deviation("our denominator has 1e-8 more, seen with two rows", TWO_ROWS, without_guard),
        ),
        gradient=False,
    ),
]


# ---------------------------------------------------------------- advantages
@dataclass(frozen=True)
class Rewards:
    """Rewards and lengths `[P, G]` of the answers to P prompts."""

    reward: Tensor
    length: Tensor


def rewards(seed: int, P=4, G=5) -> Rewards:
    """Whole rewards, so that groups have ties; lengths from 1."""
    rng = torch.Generator().manual_seed(seed)
    reward = torch.randint(0, 4, (P, G), generator=rng).double() + 0.25
    return Rewards(reward, torch.randint(1, 9, (P, G), generator=rng))


GROUPS = tuple(rewards(seed) for seed in SEEDS)
SINGLE = (rewards(9, P=6, G=1),)
FLAT = Rewards(torch.full((2, 3), 1.25, dtype=torch.float64), torch.tensor([[1, 2, 3], [2, 2, 5]]))


def raw(x: Rewards) -> Tensor:
    """The reward itself."""
    return x.reward


FLOAT32_ONE = float(torch.tensor(1.0) + 1e-6)  # verl's deviation of a group of one


def advantage(name: str) -> Call:
    """One of our advantages."""
    return Call(f"advantage `{name}`", lambda x: ADVANTAGES[name](x.reward, x.length))


def other_eps(eps: float):
    """GRPO's advantage with another eps beside the standard deviation."""
    return lambda x: (
        (x.reward - x.reward.mean(1, keepdim=True)) / (x.reward.std(1, keepdim=True) + eps)
    )


def bessel(x: Rewards) -> Tensor:
    """spo_pp with the variance and the guard of verl's whitening."""
    A, T, n = ADVANTAGES["dr_grpo"](x.reward, x.length), x.length, x.length.sum()
    m = (T * A).sum() / n
    v = (T * (A - m) ** 2).sum() / n * (n / (n - 1))  # the quotient of counts is a float32
    return (A - m) / (v + 1e-8).sqrt()


ADVANTAGE = [
    Pair(
        advantage("grpo"),
        peers.verl_advantage("grpo"),
        "not said",
        (*GROUPS, FLAT),
        (
            Deviation(
                "a group of one keeps its reward, with us 0",
                SINGLE,
                lambda x: x.reward / FLOAT32_ONE,
            ),
        ),
        gradient=False,
    ),
    Pair(
        advantage("dr_grpo"),
        peers.verl_advantage("grpo", norm_adv_by_std_in_grpo=False),
        "not said",
        (*GROUPS, FLAT),
        (Deviation("a group of one keeps its reward, with us 0", SINGLE, raw),),
        gradient=False,
    ),
    Pair(
        advantage("rloo"),
        peers.verl_advantage("rloo"),
        "not said",
        (*GROUPS, FLAT),
        (Deviation("a group of one keeps its reward, with us 0", SINGLE, raw),),
        gradient=False,
    ),
    Pair(
        advantage("rloo"),
        peers.verl_advantage("rloo_vectorized"),
        "both",
        (*GROUPS, FLAT, *SINGLE),
        gradient=False,
    ),
    Pair(
        advantage("spo_pp"),
        peers.verl_advantage("reinforce_plus_plus_baseline"),
        "known from a secondary source only",
        (),
        (
            Deviation(
                "the variance has Bessel's correction and the guard is 1e-8, ours 1e-6",
                GROUPS,
                bessel,
            ),
        ),
        gradient=False,
    ),
    Pair(
        advantage("grpo"),
        peers.trl_advantage("group"),
        "neither: eps is not given",
        (FLAT, *SINGLE),
        (Deviation("where a group is not flat, eps is 1e-4, ours 1e-6", GROUPS, other_eps(1e-4)),),
        gradient=False,
    ),
    Pair(
        advantage("dr_grpo"),
        peers.trl_advantage("none"),
        "both",
        (*GROUPS, FLAT, *SINGLE),
        gradient=False,
    ),
    Pair(advantage("rloo"), peers.trl_rloo(), "both", (*GROUPS, FLAT, *SINGLE), gradient=False),
    Pair(
        advantage("grpo"),
        peers.polgrad_advantage(polgrad.grpo_advantages, GroupNormConfig(eps=1e-6)),
        "both",
        (*GROUPS, FLAT),
        gradient=False,
    ),
    Pair(
        advantage("dr_grpo"),
        peers.polgrad_advantage(polgrad.grpo_advantages, GroupNormConfig(scale="none")),
        "both",
        (*GROUPS, FLAT),
        gradient=False,
    ),
    Pair(
        advantage("rloo"),
        peers.polgrad_advantage(polgrad.rloo_advantages),
        "both",
        (*GROUPS, FLAT),
        gradient=False,
    ),
]


# ---------------------------------------------------------------- across steps
@dataclass(frozen=True)
class Path:
    """A weight over the steps, from the start on, and the decay."""

    path: Tensor
    beta: float


def averages(x: Path) -> Tensor:
    """Our Ewma after each step."""
    state = ewma_start({"w": x.path[:1]})
    found = []
    for theta in x.path[1:]:
        state = ewma_step(state, {"w": theta.view(1)}, x.beta)
        found.append(state.weights["w"])
    return torch.cat(found)


def lerp(x: Path) -> Tensor:
    """Ours times 1 - beta^(t+1), and the start for the rest: the plain moving average."""
    share = x.beta ** torch.arange(2.0, len(x.path) + 1, dtype=torch.float64)
    return (1 - share) * averages(x) + share * x.path[0]


WALK = torch.tensor([0.0, 1, 2, 3, 4, 5], dtype=torch.float64)
EWMA = Pair(
    Call("`across_steps.Ewma`", averages),
    peers.torchrl_ewma(),
    "ours: the sums of PPO-EWMA are normalised",
    (Path(torch.full((6,), 2.5, dtype=torch.float64), 0.9),),
    (Deviation("no bias correction: the start keeps the weight beta^t", (Path(WALK, 0.9),), lerp),),
    gradient=False,
)
PAIRS = [*AGGREGATED, *MICRO, *KL, *STATISTICS, *ADVANTAGE, EWMA]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p.ours.label} - {p.peer.label}")
def test_a_pair(pair, rows):
    """Value and gradient agree where they should, and differ as described where they do not."""
    check(pair)
    rows.add(pair.ours.label, pair.peer.label, pair.verdict, pair.paper)
