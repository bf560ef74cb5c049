"""Our losses against those of verl, TRL, torchrl, polgrad and martingale.

Every pair is one test. What it has shown becomes a row of docs/conformance.md (test_table.py).
"""

from __future__ import annotations

from dataclasses import replace
from math import log

import peers
import polgrad
import pytest
import torch
from pairs import (
    BOTH,
    BY_ROW,
    BY_TOKEN,
    EMPTY_ROW,
    NEAR,
    NEAR_BY_TOKEN,
    SEEDS,
    SEQ,
    Call,
    Deviation,
    Padded,
    Pair,
    check,
    draw,
    fold,
    moved,
    ours,
    shifted,
)
from peers import polgrad_loss, torchrl_clip, torchrl_llm, trl, verl, verl_bypass
from polgrad import Aggregation, ClipConfig, ISCorrectionConfig, PolicyLossConfig
from polgrad import RatioKind as Ratio
from polgrad import SurrogateKind as Kind
from torch import Tensor

from simlab.core.aggregate import mean
from simlab.core.tokens import log_ratio
from simlab.stabilizers import bind

PLAIN = {"clip_ratio_c": 1e9}  # verl's dual clip, out of the way
BEYOND = (shifted(25.0, 0.1, -0.3, A=-1.0),)
FAR_ROWS = (shifted(12.0, 0.1, -0.3, A=-1.0),)


def held(limit: float):
    """x with its log-ratio held at +-limit, without gradient beyond."""
    return lambda x: moved(x, lp=x.mu + (x.lp - x.mu).clamp(-limit, limit))


def after(change, loss):
    """loss of the changed batch."""
    return lambda x: loss(change(x))


def all_rows(loss):
    """The mean over responses with an empty row counted as one."""
    return lambda x: loss(x) * x.mask.any(1).sum() / x.rows


def kept_only(name: str, how: str, keep, **arguments):
    """Our loss divided by the tokens or responses that `keep` leaves, as if they were the batch."""
    loss = ours(name, how, **arguments)
    return lambda x: loss(moved(x, mask=x.mask & keep(x)))


# ---------------------------------------------------------------- verl: policy losses
CAP_TIE = (shifted(log(4.0), log(4.0), A=-1.5),)
VERL = [
    Pair(ours("none"), verl("gpg"), "both"),
    Pair(
        ours("ppo"),
        verl("vanilla", **PLAIN),
        "ours: no limit on the ratio",
        deviations=(
            Deviation(
                "beyond a log-ratio of 20 the ratio is held, without gradient",
                BEYOND,
                after(held(20.0), ours("ppo")),
            ),
        ),
    ),
    Pair(
        ours("ppo", SEQ, eps_low=0.1, eps_high=0.28, dual_clip=1.5),
        verl(
            "vanilla",
            "seq-mean-token-mean",
            clip_ratio_low=0.1,
            clip_ratio_high=0.28,
            clip_ratio_c=1.5,
        ),
        "both",
    ),
    Pair(
        ours("ppo", dual_clip=3.0),
        verl("vanilla"),
        "both: dual clip; PPO has none, verl always applies one",
        deviations=(
            Deviation(
                "a ratio exactly at the cap keeps half of its gradient, with us all of it",
                CAP_TIE,
                lambda x: (lambda y: (y + y.detach()) / 2)(ours("ppo", dual_clip=4.0)(x)),
                ours("ppo", dual_clip=4.0),
                verl("vanilla", clip_ratio_c=4.0),
            ),
        ),
    ),
    Pair(
        ours("gspo", SEQ, per_token=True),
        verl("gspo", "seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4),
        "both: GSPO-token",
        NEAR + NEAR_BY_TOKEN + BOTH,
    ),
    Pair(
        ours("gspo", SEQ, per_token=True, eps_low=0.2, eps_high=0.2),
        verl("gspo", "seq-mean-token-mean"),
        "ours: no limit on the ratio",
        deviations=(
            Deviation(
                "beyond a mean log-ratio of 10 the ratio is held, without gradient",
                FAR_ROWS,
                after(held(10.0), ours("gspo", SEQ, per_token=True, eps_low=0.2, eps_high=0.2)),
            ),
        ),
    ),
    Pair(
        ours("gspo", SEQ),
        verl("gspo", "seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4),
        "it has both: verl's is GSPO-token, ours GSPO",
        NEAR + BY_ROW,
        (
            Deviation(
                "where advantages vary inside a response, as it is GSPO-token",
                NEAR_BY_TOKEN,
                ours("gspo", SEQ, per_token=True),
            ),
        ),
    ),
    Pair(
        ours("dppo", cap=3.0),
        verl("dppo_tv"),
        "form: both; cap: 5 in its runs, 10 in its code, 3 by verl's default",
    ),
    Pair(
        ours("dppo", cap=20.0, delta_low=0.15, delta_high=0.1),
        verl("dppo_tv", clip_ratio_low=0.15, clip_ratio_high=0.1, clip_ratio_c=20.0),
        "both",
    ),
    Pair(
        ours("dppo", divergence="kl"),
        verl("dppo_kl", clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=10.0),
        "both",
    ),
    Pair(
        ours("cispo"),
        verl("cispo", clip_ratio_low=10),
        "both: no lower bound",
    ),
    Pair(
        ours("cispo", eps_low=0.2),
        verl("cispo"),
        "neither: no lower bound, which verl's default has",
    ),
    Pair(
        ours("sapo", SEQ),
        verl("sapo", "seq-mean-token-mean"),
        "both",
        deviations=(
            Deviation(
                "asked for token-mean it still averages by response",
                BOTH,
                ours("sapo", SEQ),
                ours("sapo"),
                verl("sapo", "token-mean"),
            ),
        ),
    ),
    Pair(
        ours("gmpo", SEQ),
        verl("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4),
        "both: advantages are per response there",
        BY_ROW,
        (
            Deviation(
                "empty rows count in the mean",
                EMPTY_ROW,
                all_rows(ours("gmpo", SEQ)),
            ),
            Deviation(
                "a token with advantage 0 in a response with others leaves the geometric mean",
                BY_TOKEN,
                lambda x: ours("gmpo", SEQ)(moved(x, lp=torch.where(x.A == 0, x.mu, x.lp))),
            ),
        ),
    ),
]

ALL_COV = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0}  # no draw is left
VERL += [
    Pair(
        ours("regression", tau=0.3),
        verl("dro", policy_loss={"dro_beta": 0.3}),
        "neither: the square of the response's sum",
    ),
    Pair(
        ours("clip_cov", rate=1.0, low=0.1, high=2.0),
        verl("clip_cov", policy_loss=ALL_COV),
        "both: a share of all, so that nothing is drawn",
    ),
    Pair(
        ours("kl_cov", rate=0.1, coef=0.5),
        verl("kl_cov", policy_loss={"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.5}),
        "both; coefficient: 1 there and in verl's function, .1 in verl's configuration",
    ),
]

# ---------------------------------------------------------------- verl: rollout correction


def truncate(level: str, threshold) -> dict:
    """verl's arguments of a weight: a number caps it, "low_high" drops what lies outside."""
    return {"rollout_is": level, "rollout_is_threshold": threshold}


def reject(kind: str, threshold: str) -> dict:
    """verl's arguments of a rejection."""
    return {"rollout_rs": kind, "rollout_rs_threshold": threshold}


SUM = "token_sum"
DENOMINATOR = "rejected tokens leave the denominator, with us they stay"


def geo(x: Padded, low: float, high: float, num: str = "prox") -> Tensor:
    """Rows `[B, 1]` whose geometric mean ratio lies in the band."""
    d = torch.where(x.mask, (getattr(x, num) - x.mu).detach(), 0.0)
    k = (d.sum(1, keepdim=True) / x.mask.sum(1, keepdim=True)).exp()
    return (k >= low) & (k <= high)


def per_token(x: Padded, low: float, high: float, num: str = "prox") -> Tensor:
    """Tokens `[B, T]` whose ratio lies in the band."""
    k = (getattr(x, num) - x.mu).detach().exp()
    return (k >= low) & (k <= high)


GEO = {"level": "geometric", "low": 0.8, "high": 1.25}
TOKEN = {"level": "token", "low": 0.5, "high": 2.0, "weighted": False}
TOTAL = {"band": "total", "weighted": False, "low": 0.5, "high": 2.0, "prox": "mu"}
SEQCLIP = {"low": 0.8, "high": 1.25}
CORRECTED = [
    Pair(ours("tis"), verl("vanilla", **PLAIN, correct=truncate("token", 2.0)), "both"),
    Pair(
        ours("tis", SEQ, level="sequence", cap=3.0),
        verl("vanilla", "seq-mean-token-mean", **PLAIN, correct=truncate("sequence", 3.0)),
        "both",
    ),
    Pair(
        ours("decoupled", SEQ, dual_clip=3.0),
        verl("vanilla", "seq-mean-token-mean", correct=truncate("token", 5.0)),
        "both: AReaL",
    ),
    Pair(
        ours("decoupled", weight="mask", low=0.5, high=2.0),
        verl("vanilla", **PLAIN, correct=truncate("token", "0.5_2.0")),
        "both",
    ),
    Pair(
        ours("icepop", SEQ),
        verl("vanilla", "seq-mean-token-mean", **PLAIN, correct=truncate("token", "0.5_5.0")),
        "both: zero weight, denominators untouched",
    ),
    Pair(
        ours("two_factor", c=2.0),
        verl("vanilla", **PLAIN, correct=truncate("token", "0.5_2.0") | {"rollout_rs": None}),
        "its band constant is not known to us",
    ),
    Pair(
        ours("mis"),
        verl("vanilla", **PLAIN, correct=truncate("token", "0.5_2")),
        "both",
    ),
    Pair(
        ours("mis", SEQ, level="sequence", low=0.25, high=4.0),
        verl("vanilla", "seq-mean-token-mean", **PLAIN, correct=truncate("sequence", "0.25_4")),
        "both",
    ),
    Pair(
        ours("mis", SUM, **TOKEN),
        verl("vanilla", "token-sum", **PLAIN, correct=reject("token_k1", "0.5_2.0")),
        "not said",
        deviations=(
            Deviation(
                f"under token-mean {DENOMINATOR}",
                BOTH,
                kept_only("mis", "token_mean", lambda x: per_token(x, 0.5, 2.0), **TOKEN),
                ours("mis", **TOKEN),
                verl("vanilla", **PLAIN, correct=reject("token_k1", "0.5_2.0")),
            ),
        ),
    ),
    Pair(
        ours("mis", SUM, level="sequence", low=0.25, high=2.0, weighted=False),
        verl("vanilla", "token-sum", **PLAIN, correct=reject("seq_sum_k1", "0.5_4.0")),
        "ours: the limits of verl's k1 are those of mu / pi_old, here 1/2 and 1/0.25",
    ),
    Pair(
        ours("mis", SUM, **GEO),
        verl("vanilla", "token-sum", **PLAIN, correct=reject("seq_mean_k1", "0.8_1.25")),
        "not said",
        deviations=(
            Deviation(
                f"under token-mean {DENOMINATOR}",
                BOTH,
                kept_only("mis", "token_mean", lambda x: geo(x, 0.8, 1.25), **GEO),
                ours("mis", **GEO),
                verl("vanilla", **PLAIN, correct=reject("seq_mean_k1", "0.8_1.25")),
            ),
        ),
    ),
    Pair(
        ours("trm", SUM, delta=0.05),
        verl("vanilla", "token-sum", **PLAIN, correct=reject("seq_mean_k3", 0.05)),
        "a token's divergence, mean or max; the estimate k3 is verl's",
    ),
    Pair(
        ours("trm", SUM, reduce="max", statistic="k2", delta=0.5),
        verl("vanilla", "token-sum", **PLAIN, correct=reject("seq_max_k2", 0.5)),
        "the same",
    ),
    Pair(
        ours("seqclip", SUM, **SEQCLIP),
        verl("gspo", "token-sum", correct=reject("seq_mean_k1", "0.8_1.25"), of=("lp", "mu")),
        "ours: dropped responses stay in the mean",
        BY_ROW,
        (
            Deviation(
                f"under seq-mean-token-mean {DENOMINATOR}",
                BY_ROW,
                kept_only("seqclip", SEQ, lambda x: geo(x, 0.8, 1.25, "lp"), **SEQCLIP),
                ours("seqclip", SEQ, **SEQCLIP),
                verl(
                    "gspo",
                    "seq-mean-token-mean",
                    correct=reject("seq_mean_k1", "0.8_1.25"),
                    of=("lp", "mu"),
                ),
            ),
        ),
    ),
    Pair(
        ours("icepop", SUM, **TOTAL),
        verl_bypass(
            "token-sum", loss_type="ppo_clip", **reject("token_k1", "0.5_2.0"), rollout_is=None
        ),
        "neither: IcePop tests pi_old / mu",
        deviations=(
            Deviation(
                f"under token-mean {DENOMINATOR}",
                BOTH,
                kept_only("icepop", "token_mean", lambda x: per_token(x, 0.5, 2.0, "lp"), **TOTAL),
                ours("icepop", **TOTAL),
                verl_bypass(loss_type="ppo_clip", **reject("token_k1", "0.5_2.0"), rollout_is=None),
            ),
        ),
    ),
    Pair(
        ours("tis", form="pg", cap=1.5),
        verl_bypass(loss_type="reinforce", **truncate("token", 1.5)),
        "both: SAT (41)",
    ),
    Pair(
        ours("tis", SEQ, form="pg", level="sequence"),
        verl_bypass("seq-mean-token-mean", loss_type="reinforce"),
        "both",
    ),
    Pair(
        ours("vcpo", "seq_mean_token_sum", baseline=False),
        verl_bypass("seq-mean-token-sum", loss_type="reinforce", **truncate("sequence", 8.0)),
        "both; the baseline and the learning rate have no code here",
    ),
]


# ---------------------------------------------------------------- TRL
def weighted(mode: str, low: float | None, high: float) -> Call:
    """TRL's DAPO loss times its weight for a sampler that differs."""
    return trl("dapo", weight=(mode, low, high))


TRL = [
    Pair(
        ours("ppo", SEQ),
        trl("grpo"),
        "both",
        deviations=(
            Deviation("empty rows count in the mean", EMPTY_ROW, all_rows(ours("ppo", SEQ))),
        ),
    ),
    Pair(ours("ppo", eps_high=0.28), trl("dapo", eps_high=0.28), "both"),
    Pair(ours("ppo"), trl("bnpo"), "both"),
    Pair(
        ours("ppo", "seq_mean_token_sum_norm"),
        trl("dr_grpo"),
        "both: a constant length",
        deviations=(
            Deviation(
                "empty rows count in the mean",
                EMPTY_ROW,
                all_rows(ours("ppo", "seq_mean_token_sum_norm")),
            ),
        ),
    ),
    Pair(ours("ppo", dual_clip=2.0), trl("dapo", delta=2.0), "both: dual clip under another name"),
    Pair(
        ours("gspo", SEQ),
        trl("grpo", level="sequence", eps=3e-4, eps_high=4e-4, by_token=False),
        "both",
        NEAR + BY_ROW,
    ),
    Pair(
        ours("gspo", SEQ, eps_low=0.1, eps_high=0.2),
        trl("grpo", level="sequence", eps=0.1, eps_high=0.2),
        "both",
        BOTH,
    ),
    Pair(
        ours("cispo"),
        trl("cispo", eps_high=1.2),
        "both; TRL's epsilon_high is the cap itself",
        deviations=(
            Deviation(
                "left at its default, epsilon_high caps every ratio at 0.2",
                BOTH,
                lambda x: -mean(*fold("token_mean", *capped(x, 0.2))),
                peer=trl("cispo"),
            ),
        ),
    ),
    Pair(ours("sapo", SEQ), trl("sapo"), "both"),
    Pair(
        ours("luspo", SEQ, eps_low=0.2, eps_high=0.2),
        trl("luspo", level="sequence"),
        "both: the response times its length",
        deviations=(
            Deviation(
                "empty rows count in the mean",
                EMPTY_ROW,
                all_rows(ours("luspo", SEQ, eps_low=0.2, eps_high=0.2)),
            ),
        ),
    ),
    Pair(
        ours("vespo"), trl("vespo"), "both; the docstring of the official code has other constants"
    ),
    Pair(ours("opsm", SEQ, delta=0.1), trl("grpo", opsm=0.1), "both"),
    Pair(
        ours("gmpo", SEQ),
        trl("gmpo", eps=0.4, by_token=False),
        "both",
        BY_ROW,
        (
            Deviation(
                "empty rows count in the mean, each with minus its advantage",
                EMPTY_ROW,
                lambda x: all_rows(ours("gmpo", SEQ))(x) - x.A[~x.mask.any(1), 0].sum() / x.rows,
            ),
        ),
    ),
    Pair(ours("tis", cap=3.0), weighted("token_truncate", None, 3.0), "both"),
    Pair(
        ours("tis", level="sequence", cap=3.0),
        weighted("sequence_truncate", None, 3.0),
        "both",
    ),
    Pair(ours("icepop"), weighted("token_mask", 0.5, 5.0), "both"),
    Pair(ours("mis"), weighted("token_mask", 0.5, 2.0), "both"),
    Pair(
        ours("mis", level="sequence", high=3.0),
        weighted("sequence_mask", None, 3.0),
        "both: TRL's default correction",
    ),
    Pair(
        ours("two_factor", c=2.0, repair="clamp"),
        weighted("token_truncate", 0.5, 2.0),
        "its band constant is not known to us",
    ),
]


def capped(x: Padded, cap: float) -> tuple:
    """min(r, cap) A log pi, and the batch."""
    b = x.flat()
    w = log_ratio(b).detach().exp().clamp(max=cap)
    return torch.where(b.mask, w * b.advantage * b.logp, 0.0), b


# ---------------------------------------------------------------- torchrl
def total_cap(cap: float) -> Call:
    """Decoupled PPO whose weight k is cut where u k exceeds the cap: the total ratio is capped."""

    def loss(x: Padded) -> Tensor:
        k, u = (x.prox - x.mu).exp(), (x.lp.detach() - x.prox).exp()
        w = torch.minimum(k, cap / u).reshape(-1)[x.order]
        b = x.flat()
        S = w * bind("decoupled", weight="none").surrogate(b).S
        return -mean(*fold("token_mean", S, b))

    return Call("", loss)


def clipped_ratio(x: Padded) -> Tensor:
    """-clip(r) A, differentiated through the clip."""
    b = x.flat()
    return -mean(*fold("token_mean", log_ratio(b).exp().clamp(0.8, 1.2) * b.advantage, b))


def gradient_only(call: Call) -> Call:
    """The same gradient, the value 0."""
    return Call(call.label + ", its gradient", lambda x: (lambda y: y - y.detach())(call(x)))


INSIDE = tuple(draw(70 + seed, gap=0.07, by_token=True) for seed in SEEDS)  # no ratio beyond 0.2


def uniform_entropy(how: str, tau: float) -> Call:
    """ESTR where every state has the same entropy: its limit is then one on d^2."""
    method = bind("estr", tau=tau, eps=0.01)

    def loss(x: Padded) -> Tensor:
        b = x.flat(entropy_mu=torch.full_like(x.A, 0.99))
        S = method.surrogate(b, **method.stats([b])).S
        return -S.sum() if how == SUM else -mean(*fold(how, S, b))

    return Call(f"`estr(tau={tau:g})` at entropy 0.99, {how}", loss)


def kept(x: Padded) -> Tensor:
    """torchrl's mask: half the squared log-ratio is at most 0.05."""
    return (x.lp - x.mu).detach() ** 2 / 2 <= 0.05


TORCHRL = [
    Pair(
        ours("decoupled", high=float("inf"), eps_high=0.28),
        torchrl_clip(decoupled=True, eps=(0.2, 0.28)),
        "torchrl's cap is that of PPO-EWMA's code, ours AReaL's",
        deviations=(
            Deviation(
                "max_importance_ratio caps the total ratio pi / mu, ours the weight prox / mu",
                BOTH,
                total_cap(1.5),
                ours("decoupled", high=1.5),
                torchrl_clip(decoupled=True, cap=1.5),
            ),
        ),
    ),
    Pair(ours("ppo"), torchrl_clip(decoupled=False), "both"),
    Pair(ours("ppo", eps_high=0.28), torchrl_llm(peers.Grpo, eps=(0.2, 0.28)), "both"),
    Pair(
        ours("ppo", SEQ),
        torchrl_llm(peers.Grpo, "prompt_mean"),
        "both",
        deviations=(
            Deviation("empty rows count in the mean", EMPTY_ROW, all_rows(ours("ppo", SEQ))),
        ),
    ),
    Pair(
        gradient_only(ours("cispo", eps_low=0.2)),
        gradient_only(torchrl_llm(peers.Cispo)),
        "ours: log pi carries the gradient",
        INSIDE,
        (
            Deviation(
                "the value is -clip(r) A without log pi, and a clipped token has no gradient",
                BOTH,
                clipped_ratio,
                ours("cispo", eps_low=0.2),
                torchrl_llm(peers.Cispo),
            ),
        ),
    ),
    Pair(
        uniform_entropy(SUM, 0.1),
        Call(
            torchrl_llm(peers.Grpo, kl_mask=0.05).label + ", times the tokens kept",
            lambda x: torchrl_llm(peers.Grpo, kl_mask=0.05)(x) * (x.mask & kept(x)).sum(),
        ),
        "ours: the mean is over all tokens",
        deviations=(
            Deviation(
                f"in the mean {DENOMINATOR}",
                BOTH,
                lambda x: uniform_entropy("token_mean", 0.1)(moved(x, mask=x.mask & kept(x))),
                uniform_entropy("token_mean", 0.1),
                torchrl_llm(peers.Grpo, kl_mask=0.05),
            ),
        ),
    ),
]


# ---------------------------------------------------------------- polgrad, martingale
def config(ratio, kind, clip=None, aggregation=Aggregation.TOKEN_MEAN, **more) -> PolicyLossConfig:
    """A configuration that is not in polgrad's registry."""
    return PolicyLossConfig(ratio, kind, clip, aggregation, **more)


BAND = ClipConfig(0.2, 0.2)
PG = config(Ratio.TOKEN, Kind.PG)
DUAL = config(Ratio.TOKEN, Kind.PG_CLIP, ClipConfig(0.2, 0.28, ratio_cap=2.0))
TWO_SIDED = config(Ratio.TOKEN, Kind.CISPO, BAND)
TIS = replace(polgrad.ALGORITHMS["grpo_tis"].loss, kl=None)
SEQ_TIS = replace(TIS, is_correction=ISCorrectionConfig(3.0, "sequence"))
OTHERS = [
    Pair(ours("pg"), polgrad_loss("PG, token ratio", PG), "both"),
    Pair(
        ours("ppo", eps_high=0.28, dual_clip=2.0),
        polgrad_loss("PG_CLIP, ratio_cap 2", DUAL),
        "both",
    ),
    Pair(
        ours("cispo", eps_low=0.2),
        polgrad_loss("CISPO, two-sided", TWO_SIDED),
        "neither: no lower bound",
    ),
    Pair(
        ours("tis", SEQ, cap=10.0),
        polgrad_loss("grpo_tis without its KL term", TIS, "prox"),
        "both",
    ),
    Pair(
        ours("tis", SEQ, level="sequence", cap=3.0),
        polgrad_loss("grpo_tis by sequence, cap 3", SEQ_TIS, "prox"),
        "both",
    ),
    Pair(ours("ppo", eps_low=0.3, eps_high=0.3), peers.martingale_ppo(0.3), "both"),
    Pair(ours("cispo", eps_low=0.2), peers.martingale_cispo(0.2, 0.2), "neither: no lower bound"),
    Pair(ours("tis", form="pg"), peers.martingale_tis(2.0), "both"),
]

PAIRS = [*VERL, *CORRECTED, *TRL, *TORCHRL, *OTHERS]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p.ours.label} - {p.peer.label}")
def test_a_pair(pair, rows):
    """Value and gradient agree where they should, and differ as described where they do not."""
    check(pair)
    rows.add(pair.ours.label, pair.peer.label, pair.verdict, pair.paper)
