"""The record's working dtype over every mixture, constant weights, and log-probs above 0."""

from dataclasses import replace

import pytest
import torch
from batches import graded, ragged, tokens

from simlab.core.aggregate import reduce_diagnostics, token_mean
from simlab.core.tokens import KINDS, ROUNDING, log_ratio, on_mask, weighted
from simlab.stabilizers import STABILIZERS, bind
from simlab.stabilizers.fused import fuse, terms

OPEN = {"seqclip": {"low": 0.5, "high": 2.0}, "spo_scaled": {"alpha": 0.5}}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
every = pytest.mark.parametrize("name", STABILIZERS)
FEW = ("ppo", "sat", "gspo", "centering")  # compiled in every run of the tests
COMPILED = [x if x in FEW else pytest.param(x, marks=pytest.mark.slow) for x in STABILIZERS]


def mixtures():
    """Dtypes of (log-probs under training, all other log-probs, advantage)."""
    for advantage in (*FLOATS, torch.int64):
        for logp in FLOATS:
            yield logp, torch.float32, advantage
    yield from ((torch.float32, other, torch.float32) for other in FLOATS)


def mixed(b, logp, other, advantage):
    """b in these dtypes. Integer advantages are 1 and -1 by the sign."""
    sign = b.advantage.sign() if advantage == torch.int64 else b.advantage
    floats = {name: x.to(other) for name, x in b.held().items() if x.is_floating_point()}
    return replace(b, **floats | {"logp": b.logp.to(logp), "advantage": sign.to(advantage)})


def in_one(b, dtype):
    """The numbers of b, all fields that are not indices in one dtype."""
    keep = (*KINDS, "uniform")
    return replace(b, **{k: x.to(dtype) for k, x in b.held().items() if k not in keep})


def test_float64_rewards_beside_float32_log_probs():
    """logp -1, logp_mu -1.05 in float32, A = 0.3 in float64: 0.3 e^0.05 = 0.31538, active; so for any A,
    whichever way its product is rounded."""
    A = torch.tensor([0.3, 0.1, 0.2, 0.7, -0.3, -0.1, 1 / 3, -2 / 3]).double() * (1 + 1e-9)
    b = replace(tokens([0.05] * 8, mu=-1.05, dtype=torch.float32), advantage=A)
    out, grad = graded(bind("ppo"), b)
    assert float(grad[0]) == pytest.approx(0.31538, abs=5e-6)
    torch.testing.assert_close(grad, (A * 1.0512711).float(), rtol=1e-5, atol=0)
    assert out.active.all()
    fused = fuse(bind("ppo"), backend="eager")(b)
    assert fused.active.all()
    assert float(fused.total) == pytest.approx(float(A.sum()) * 1.0512711, rel=1e-5)


@every
def test_every_mixture_of_dtypes_is_the_widest_of_them(name):
    """Value, gradient weight and active are those of the same numbers, all in the working dtype."""
    bound, wide = bind(name, **OPEN.get(name, {})), ragged(3, by_token=True)
    for dtypes in mixtures():
        b = mixed(wide, *dtypes)
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        assert b.dtype == dtype
        (got, grad), (want, right) = graded(bound, b), graded(bound, in_one(b, dtype))
        assert got.S.dtype == dtype
        assert torch.equal(got.S, want.S), dtypes
        assert torch.equal(got.active, want.active), dtypes
        assert torch.equal(grad, right.to(grad.dtype)), dtypes
        assert want.active.any()


@pytest.mark.parametrize("name", COMPILED)
def test_a_fused_loss_takes_mixtures(name):
    """The compiled pass is one graph and has the eager numbers with float64 and int advantages."""
    torch.compiler.reset()
    bound = bind(name, **OPEN.get(name, {}))
    run = fuse(bound, backend="eager")
    for advantage in (torch.float64, torch.int64):
        b = mixed(ragged(3, by_token=True), torch.float32, torch.float32, advantage)
        stats = bound.stats([b])
        got, want = run(b, **stats), terms(bound, token_mean, True, b, **stats)
        torch.testing.assert_close(got.total, want.total)
        assert torch.equal(got.active, want.active)


def test_a_draw_does_not_widen_the_loss():
    """`uniform` is compared, never multiplied: float64 draws leave a float32 loss as it is."""
    b = replace(tokens([0.1], dtype=torch.float32), uniform=torch.tensor([0.5]).double())
    assert b.dtype == torch.float32
    assert replace(b, tv=b.uniform).dtype == torch.float64


def test_a_weight_is_constant():
    """`weighted` lets no gradient through its weight: d S / d logp = w."""
    b = tokens([0.3])
    b.logp.requires_grad_()
    w = log_ratio(b).exp() * on_mask(b, b.advantage)
    (grad,) = torch.autograd.grad(weighted(b, w, {}).S.sum(), b.logp)
    assert torch.equal(grad, w.detach())


@every
def test_no_gradient_reaches_a_field_but_logp(name):
    """Not the advantage either, which a critic may have made."""
    bound, b = bind(name, **OPEN.get(name, {})), ragged(3, by_token=True)
    b.logp.requires_grad_()
    b.advantage.requires_grad_()
    stats = {k: x.detach() if torch.is_tensor(x) else x for k, x in bound.stats([b]).items()}
    S = bound.surrogate(b, **stats).S.sum()
    _, grad = torch.autograd.grad(S, (b.logp, b.advantage), allow_unused=True)
    assert grad is None or not grad.any()


@pytest.mark.parametrize("field", ["logp", "logp_mu", "logp_prox", "logp_ref"])
def test_a_log_prob_above_0_is_counted_and_named(field):
    """What rounding explains stays; more is impossible and leaves the mask, counted by its field."""
    b = tokens([0.0] * 4, mu=[-1.0, -1.0, -1.0, -1.0])
    high = torch.tensor([-1.0, 6e-8, 2 * ROUNDING, 5.0]).double()
    kept, counts = replace(b, **{field: high}).screen()
    assert kept.mask.tolist() == [True, True, False, False]
    assert {name: int(n) for name, n in counts.items() if n} == {field: 2}


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_above_0_is_an_ordinary_token(name, dtype):
    """Log-probs of 6e-8 and of ROUNDING above 0: value and gradient are finite."""
    b = ragged(3, by_token=True)
    for field, value in (("logp", 6e-8), ("logp_mu", 6e-8), ("logp", ROUNDING)):
        x = getattr(b, field).clone()
        x[::3] = value
        b = replace(b, **{field: x})
    out, grad = graded(bind(name, **OPEN.get(name, {})), in_one(b, dtype))
    assert out.S.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("divergence", ["kl", "tv"])
@pytest.mark.parametrize("top", [0.0, 6e-8, 1e-4])
def test_dppo_cuts_a_token_whose_log_prob_rounds_above_0(divergence, top):
    """0.2 -> 1 with A = 1 has a divergence far above delta, also where the 1 is e^6e-8."""
    mu = torch.tensor([0.2]).log()
    b = replace(tokens([0.0], dtype=torch.float32), logp=torch.tensor([top]), logp_mu=mu)
    out, grad = graded(bind("dppo", divergence=divergence), b)
    assert not out.active.any()
    assert float(grad) == 0


@pytest.mark.parametrize("form", ["pg", "ppo"])
def test_dppo_counts_only_tokens_that_lose_a_gradient(form):
    """A token without advantage is cut by nothing: of 0.6 -> 0.1 with A = 0 and -1, half is counted."""
    mu, pi = torch.tensor([[0.6, 0.6], [0.1, 0.1]]).double().log()
    b = replace(tokens([0.0, 0.0], [0.0, -1.0]), logp=pi, logp_mu=mu)
    shown = reduce_diagnostics(b, bind("dppo", form=form)(b).diagnostics)
    assert float(shown["clip_low"]) == 0.5
