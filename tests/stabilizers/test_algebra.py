"""Compositions: the numbers of hand-worked cases, bit-equality with files, laws, the denominator."""

import math
from dataclasses import replace

import pytest
import torch
from batches import graded, ragged

from simlab.contract.batches import by_response, on_ranks
from simlab.contract.promises import APART, PROMISES, check
from simlab.core.aggregate import AGGREGATIONS, mean, reduce_diagnostics, token_mean
from simlab.core.kl import KL
from simlab.core.tokens import TokenBatch
from simlab.stabilizers import STABILIZERS, bind, needs
from simlab.study.specs import parse


def composed(spec):
    """The stabilizer of a spec."""
    _, name, _, arguments = parse(spec)
    return bind(name, **arguments)


def response(k, u=(0.0, 0.0), A=1.0):
    """One response: log pi/prox = u, prox/mu = k, advantages A."""
    k, u = torch.tensor(k, dtype=torch.float64), torch.tensor(u, dtype=torch.float64)
    logp = torch.full_like(u, -1.0)
    return TokenBatch(
        logp=logp,
        logp_mu=logp - u - k.log(),
        logp_prox=logp - u,
        advantage=torch.full_like(u, A),
        mask=torch.ones_like(u, dtype=torch.bool),
        response=torch.zeros_like(u, dtype=torch.int64),
    )


def weights(spec, b):
    """Gradient weight of each token, before aggregation."""
    bound = composed(spec)
    return graded(bound, b)[1].tolist()


PRODUCTS = "gspo:eps_low=.2,eps_high=.2+tis"
GOLDEN = [  # k = (1, 3), u = 0 unless said
    ("ppo", (1, 0)),
    ("ppo:proximal=mu", (1, 0)),
    ("ppo:proximal=step", (1, 1)),
    ("ppo+tis", (1, 2)),
    ("ppo+tis:level=sequence", (2, 2)),
    ("ppo+icepop", (1, 3)),
    ("ppo+mis", (1, 0)),
    ("ppo+keep:of=k,level=mean,min=0.99,max=1.01", (0, 0)),
    ("ppo+keep:of=k,level=mean,min=0.5,max=2", (1, 1)),
    ("ppo+tis+norm", (2 / 3, 4 / 3)),
    (PRODUCTS, (1.5, 1.5)),
    (PRODUCTS.replace("+", ",per_token=true+"), (1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "want"), GOLDEN, ids=[x for x, _ in GOLDEN])
def test_weights_worked_out_by_hand(spec, want):
    """One response of two tokens with prox/mu = (1, 3)."""
    assert weights(spec, response((1.0, 3.0))) == pytest.approx(want, rel=1e-12)


def test_gspo_with_tis():
    """The row of SAT's Table 1: the mean of u is shared, so the weights of other tokens enter."""
    b = response((1.0, 3.0), (0.2, -0.1))
    shared, own = weights(PRODUCTS, b), weights(PRODUCTS.replace("+", ",per_token=true+"), b)
    assert shared == pytest.approx([1.5769066, 1.5769066], abs=1e-7)
    assert own == pytest.approx([1.0512711, 2.1025422], abs=1e-7)
    assert sum(shared) == pytest.approx(3.1538133, abs=1e-7)
    assert weights(PRODUCTS, response((1.0, 3.0), (0.3, 0.3))) == [0, 0]


def test_a_shrinking_mask_changes_later_statistics():
    """k = (1, 8): the geometric mean of both is sqrt 8, of what a token band has left it is 1."""
    b = response((1.0, 8.0))
    spec = "ppo+keep:of=k,min=0.5,max=2{}+keep:of=k,level=mean,min=0.99,max=1.01"
    assert weights(spec.format(""), b) == [0, 0]
    assert weights(spec.format(",denominator=drop"), b) == [0, 0]
    assert weights(spec.format(",denominator=shrink"), b) == [1, 0]


def test_the_denominator():
    """A token band on (1, 3) leaves one token: the mean is 1/2 over both, 1 over those kept."""
    b = response((1.0, 3.0))
    logp = torch.zeros_like(b.logp).requires_grad_()
    shifted = replace(b, logp=logp, logp_prox=b.logp_prox + 1, logp_mu=b.logp_mu + 1)
    for how, want in (("keep", 0.5), ("drop", 1.0), ("shrink", 1.0)):
        bound = composed(f"ppo+band:of=k,high=2,denominator={how}")
        loss = mean(*token_mean(bound(shifted).S, bound.counted(shifted)))
        (grad,) = torch.autograd.grad(loss, logp)
        assert grad.tolist() == [want, 0]


@pytest.mark.parametrize(
    ("spec", "name", "arguments"),
    [
        ("ppo+tis", "tis", {}),
        ("ppo+tis:level=sequence,cap=3", "tis", {"level": "sequence", "cap": 3}),
        ("ppo+cap:of=k,max=2", "tis", {}),
        ("none+cap:max=2", "tis", {"form": "pg"}),
        ("none+cap:max=2,level=sum", "tis", {"form": "pg", "level": "sequence"}),
        ("ppo+icepop", "icepop", {}),
        ("ppo+icepop:weighted=false", "icepop", {"weighted": False}),
        ("ppo+icepop:band=total", "icepop", {"band": "total"}),
        ("ppo+band:of=k,low=0.5,high=5", "icepop", {}),
        ("ppo+mis:veto=0.5", "mis", {"veto": 0.5}),
        ("ppo+mis:level=geometric,low=0.8,high=1.25", "mis", {"level": "geometric", "low": 0.8, "high": 1.25}),
        ("ppo+keep:of=k,level=mean,min=0.8,max=1.25,weight=sum", "mis",
         {"level": "geometric", "weight": "sequence", "low": 0.8, "high": 1.25}),
        ("ppo+kpop:phi=0.01", "kpop", {"phi": 0.01}),
        ("ppo+opsm", "opsm", {}),
        ("ppo+keep:gate=k1,level=mean,min=-1e-4,side=negative", "opsm", {}),
        ("gspo:eps_low=0.2,eps_high=0.2+seqclip:low=0.8,high=1.25", "seqclip", {"low": 0.8, "high": 1.25}),
        ("gspo:eps_low=0.2,eps_high=0.2+keep:level=mean,min=0.8,max=1.25", "seqclip", {"low": 0.8, "high": 1.25}),
        ("ppo+dppo:delta_low=0.02,delta_high=0.02", "dppo", {"form": "ppo", "delta_low": 0.02, "delta_high": 0.02}),
        ("ppo+two_factor:repair=clamp", "two_factor", {"repair": "clamp"}),
        ("ppo+clamp:of=k,high=5", "decoupled", {}),
        ("none+cap:max=1e4+ipo:eps=0.02", "ipo", {"eps": 0.02}),
        ("none+cap:max=1e4+keep:gate=tv,max=0.02", "ipo", {"eps": 0.02}),
        ("none+dis", "dis", {}),
        ("none+band:low=0.7,high=6,strict=true", "dis", {}),
        ("none+flash_reinforce+cap", "flash_reinforce", {}),
        ("none+keep:gate=binary_kl,level=mean,max=3e-3,weight=token", "flash_reinforce", {}),
        ("ppo:proximal=step", "decoupled", {"weight": "none"}),
        ("tis:proximal=mu", "ppo", {}),
        ("ppo:proximal=mu", "ppo", {}),
        ("ppo+keep:max=inf,min=0", "ppo", {}),
        ("ppo+contract", "sat", {}),
        ("ppo:dual_clip=3+contract:alpha=0.5,shape=linear", "sat", {"alpha": 0.5, "shape": "linear", "dual_clip": 3}),
    ],
)  # fmt: skip
def test_a_composition_is_the_file_bit_for_bit(spec, name, arguments):
    """S, active and the gradient of an aggregated loss, in float64 and float32."""
    for seed, dtype in ((1, torch.float64), (2, torch.float32)):
        b = ragged(seed, lanes=(2,), by_token=seed == 1, dtype=dtype)
        results = []
        for bound in (composed(spec), bind(name, **arguments)):
            logp = b.logp.clone().requires_grad_()
            out = bound(replace(b, logp=logp))
            loss = mean(*AGGREGATIONS["seq_mean_token_mean"](out.S, bound.counted(b))).sum()
            results.append((out, torch.autograd.grad(loss, logp)[0]))
        (got, got_grad), (want, want_grad) = results
        assert torch.equal(got.S, want.S)
        assert torch.equal(got.active, want.active)
        assert torch.equal(got_grad, want_grad)


LAWFUL = [
    PRODUCTS,
    "pg+keep:gate=binary_kl,level=mean,max=0.003",
    "none+cap:max=2+keep:gate=tv,max=0.3+kl:coef=2e-3",
    "sat+tis",
    "sat:level=sequence,proximal=step+icepop:denominator=shrink+norm",
    "cispo+keep:of=u,gate=k3,level=max,max=0.1,scope=response",
    "sapo+kpop+veto:min=0.5,denominator=drop",
    "m2po+keep:gate=difference,max=0.05,side=outward,strict=true",
    "vaco+mis:level=geometric,low=0.5,high=2,denominator=shrink+keep:of=r,gate=k2,level=min,max=0.5",
    "ppo+clamp:of=k,low=0.5,high=2,level=mean+norm:over=all,level=response+kl:coef=0.1,kind=k3,to=ref",
    "tis+keep:gate=reverse_kl,level=sum,max=0.5",
    "drpo:delta=0.2+contract:factor=0+kl:coef=0.1+keep:gate=tv,level=prefix,max=0.3",
    "spo:proximal=step+contract:shape=linear",
    "ppo:proximal=step+contract+cap:of=k,level=prefix,max=3",
    "cispo+dppo+contract+support",
]


@pytest.mark.parametrize("spec", LAWFUL)
def test_a_composition_keeps_every_promise(spec):
    """Those of simlab/contract: ranks, micro-batches, masked NaN, overflow and the others."""
    check(composed(spec), PROMISES)


@pytest.mark.parametrize("spec", [LAWFUL[4], LAWFUL[-1]])
@pytest.mark.slow
def test_a_composition_is_one_graph(spec):
    """With a swapped ratio, a shrinking mask and a whole-batch number."""
    check(composed(spec), APART)


UNLAWFUL = [
    ("ppo+cap:max=2", "weigh once, by k"),
    ("gspo:proximal=mu+tis", "tis reads k = prox/mu, and with proximal=mu the ratio of gspo is pi/mu"),
    ("tis+cap:of=k,max=2", "tis has a weight of its own"),
    ("none+cap:max=2+band:of=k", "twice"),
    ("none:proximal=step", "none has no ratio"),
    ("ppo+foo", "no correction 'foo'; there are band"),
    ("ppo+keep", "give min or max"),
    ("ppo+keep:max=1,min=2", "give min or max, and min below max"),
    ("ppo+keep:gate=entropy,max=1", "gate must be ratio, difference, tv"),
    ("ppo+kl", "kl needs coef"),
    ("ppo+norm", "add a correction"),
    ("estr+tis", "estr reads entropy_mu, and no batch has that of prox"),
    ("ppo+tis:denominator=gone", "denominator must be keep, drop or shrink"),
    ("gspo+contract", "contract shrinks a radius, and no part has one"),
    ("ppo+contract+dppo:denominator=drop", "dppo rejects by a contracted limit"),
    ("ppo+contract+contract", "contract is written twice"),
    ("tis+support", "logp_prox is not renormalised"),
    ("ppo:proximal=old", "proximal must be mu, batch"),
    ("ppo+tis@2", "the stream stands behind the first name"),
    ("grpo+tis", "no stabilizer 'grpo'"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "says"), UNLAWFUL)
def test_an_unlawful_composition_is_refused_with_the_cure(spec, says):
    """One sentence that names the term."""
    with pytest.raises(ValueError, match=says) as error:
        composed(spec)
    assert "\n" not in str(error.value)


def test_a_contracted_radius_worked_out_by_hand():
    """|d| = (0.1, 0.2, 0.4), q = 0.2 at alpha 1/2: c = 1 / (1 + 2^2) = 1/5 on the last token alone."""
    b = response((1.0,) * 3, (0.1, -0.2, 0.4))
    r, mu = math.exp(0.4), math.exp(-1.4)
    linear = "+contract:alpha=0.5"
    for spec, want in (
        ("spo", r * (1 - (r - 1) / 0.04)),
        ("drpo:delta=0.2", r * (1 - mu * (r - 1) / 0.04)),
        ("dppo", 0.0),  # |pi - mu| = 0.121 is inside of 0.2, and outside of 0.04
        ("ppo+dppo", 0.0),
        ("none+kl:coef=0.1", 1 - 5 * 0.1 * 0.4),
    ):
        got, plain = weights(spec + linear, b), weights(spec, b)
        assert got[:2] == plain[:2]
        assert got[2] == pytest.approx(want)
        assert plain[2] != pytest.approx(want) or spec == "ppo+dppo"  # there PPO's clip binds
    assert float(composed("spo" + linear).stats([b])["contract_q"]) == pytest.approx(0.2)


def test_the_product_up_to_a_token():
    """d = (0.1, -0.3, 0.2) has prefix sums (0.1, -0.2, 0), whatever the order of the tokens."""
    b = response((1.0,) * 3, (0.1, -0.3, 0.2))
    b = replace(b, position=torch.tensor([0, 1, 2])).take(torch.tensor([2, 0, 1]))
    want = [1.0, math.exp(0.1), math.exp(-0.2)]
    assert weights("none+cap:level=prefix", b) == pytest.approx(want)
    assert weights("none+keep:level=prefix,min=0.9", b) == [1, 1, 0]
    with pytest.raises(ValueError, match="needs position"):
        composed("none+cap:level=prefix")(replace(b, position=None))


def test_support_is_replayed_before_anything_else():
    """pi on three tokens, mu its first two renormalised: the ratio is 1, and no gradient on the third."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    mu = torch.tensor([0.625, 0.375], dtype=torch.float64).log()
    one = torch.ones(1, dtype=torch.float64)
    b = TokenBatch(
        p[:1], mu[:1], one, one > 0, torch.zeros(1, dtype=torch.int64),
        topk=p[1:2].unsqueeze(0), topk_mu=mu[1:2].unsqueeze(0),
    )  # fmt: skip
    out = composed("pg+support")(b)
    assert out.S.tolist() == pytest.approx([1.0])
    assert composed("pg")(b).S.tolist() == pytest.approx([0.8])


def test_none_may_be_a_word():
    """A spec writes the mode none as it writes nothing at all."""
    for spec, key, want in (
        ("ppo+centering:mode=none", "centering.mode", "none"),
        ("decoupled:weight=none", "weight", "none"),
        ("ppo:dual_clip=none", "dual_clip", None),
    ):
        assert composed(spec).settings[key] == want
    for mode in ("none", "cap", "clamp", "band", "ipo", "clip"):
        assert composed(f"ppo+centering:mode={mode}").settings["centering.mode"] == mode


def test_a_base_that_shares_its_gradient_must_take_weights(monkeypatch):
    """Multiplied afterwards, weights of other tokens would enter `active` wrongly."""

    class Shared:
        """A response mean without an argument W."""

        @staticmethod
        def surrogate(b):
            return STABILIZERS["gspo"].surrogate(b, eps_low=0.2, eps_high=0.2)

    monkeypatch.setitem(STABILIZERS, "shared", Shared)
    with pytest.raises(ValueError, match="shared spreads a gradient over its response"):
        bind("shared+tis")


def test_what_a_composition_reads():
    """`logp_prox` where it reads k or its ratio is pi/prox, and not where prox is mu."""
    assert needs(bind("gspo+tis")) == ("logp_prox",)
    assert needs(bind("ppo", proximal="step")) == ("logp_prox",)
    for name in ("ppo", "tis", "decoupled", "minirl"):
        assert needs(bind(name, proximal="mu")) == ()
    with pytest.raises(ValueError, match=r"gspo\+tis needs logp_prox"):
        bind("gspo+tis")(replace(ragged(), logp_prox=None))


def test_the_mean_weight_is_that_of_the_whole_batch():
    """Over micro-batches and ranks, of accepted tokens; `all` counts the rejected ones too."""
    b = ragged(3, sizes=(5, 9, 2, 30))
    micros = by_response(b, [[0, 2], [1], [3], []])
    for spec in (
        "ppo+mis+norm",
        "ppo+mis+norm:over=all",
        "ppo+tis:level=sequence+norm:level=response",
    ):
        bound = composed(spec)
        want = bound.stats([b])["mean_weight"]
        for shard in on_ranks(
            2, lambda i, reduce, m=bound: m.stats(micros[2 * i : 2 * i + 2], reduce)
        ):
            torch.testing.assert_close(shard["mean_weight"], want, rtol=1e-12, atol=0)
    k = (b.logp_prox - b.logp_mu).exp()[b.mask]
    kept = k[(k >= 0.5) & (k <= 2)]
    assert float(bind("ppo+mis+norm").stats([b])["mean_weight"]) == pytest.approx(
        float(kept.mean())
    )
    over_all = composed("ppo+mis+norm:over=all").stats([b])["mean_weight"]
    assert float(over_all) == pytest.approx(float(kept.sum() / len(k)))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_added_kl_has_the_gradient_of_its_estimator(kind):
    """On rejected tokens too, and whatever W is."""
    b = ragged(5, by_token=True)
    bound = composed(f"none+keep:max=0.9+kl:coef=0.3,kind={kind},to=ref")
    logp = b.logp.clone().requires_grad_()
    plain = bind("none+keep", **{"keep.max": 0.9})
    (base,) = torch.autograd.grad(plain(replace(b, logp=logp)).S.sum(), logp)
    term = torch.where(b.mask, KL[kind](logp, b.logp_ref), 0).sum()
    want = base - 0.3 * torch.autograd.grad(term, logp)[0]
    torch.testing.assert_close(graded(bound, b)[1], want, rtol=1e-12, atol=1e-14)


def test_shares_of_two_corrections_are_joined():
    """Two keeps report the share of tokens that either rejects."""
    b = ragged(4)
    one, two = (
        bind("ppo+keep", **{f"keep.{end}": 1.0})(b).diagnostics["rejected"].value
        for end in ("max", "min")
    )
    both = composed("ppo+keep:max=1+keep:min=1")
    share = reduce_diagnostics(b, both(b).diagnostics)["rejected"]
    assert float(share) == pytest.approx(float(((one | two) & b.mask).sum() / b.mask.sum()))


def test_distances_of_probabilities_do_not_cancel_or_overflow():
    """|pi - mu| of nearly equal and of very different log-probs."""
    from simlab.stabilizers.algebra.statistics import divergence

    b = response((1.0, 1.0, 1.0), (1e-12, 600.0, -600.0))
    b = replace(
        b,
        logp=torch.tensor([-1e-3, -1.0, -601.0]).double(),
        logp_mu=torch.tensor([-1e-3, -601.0, -1.0]).double(),
    )
    tv = divergence(replace(b, logp=b.logp + torch.tensor([1e-12, 0, 0])), "r", "tv", "x")
    assert tv[0].item() == pytest.approx(1e-12 * math.exp(-1e-3), rel=1e-3)
    assert tv[1:].tolist() == pytest.approx([math.exp(-1)] * 2)
