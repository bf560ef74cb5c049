"""KL terms by exact enumeration: values, gradients as a loss, gradients in the reward, extremes."""

import math

import pytest
import torch
from batches import ragged

from simlab.core.kl import KL, LIMIT, absolute, k1, k2, k3, low_var, overflow, unbiased
from simlab.core.tokens import LOG_RATIO_CAP, on_mask

UNBIASED = {f"{kind}+": unbiased(kind) for kind in KL}


def binary():
    """C070: logit of p = 0.8, and the two log-probs of the reference (0.5, 0.5)."""
    z = torch.tensor(math.log(4), dtype=torch.float64, requires_grad=True)
    return z, torch.full((2,), 0.5, dtype=torch.float64).log()


def outcomes(z):
    return torch.stack([z, -z]).sigmoid().log()


def as_loss(f, logits, logp_ref, log=torch.log_softmax):
    """E_pi of the gradient of f, the samples' probabilities held."""
    logp = log(logits, -1)
    p = logp.detach().exp()
    return torch.autograd.grad((p * f(logp, logp_ref)).sum(), logits)[0]


def in_reward(f, logits, logp_ref, log=torch.log_softmax):
    """E_pi of value grad log pi."""
    logp = log(logits, -1)
    p, value = logp.detach().exp(), f(logp, logp_ref).detach()
    return torch.autograd.grad((p * value * logp).sum(), logits)[0]


def exact(logits, logp_ref):
    """KL(pi||ref), its gradient, and the gradient of KL(ref||pi)."""
    logp = logits.log_softmax(-1)
    reverse = (logp.exp() * (logp - logp_ref)).sum()
    forward = (logp_ref.exp() * (logp_ref - logp)).sum()
    grads = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (reverse, forward)]
    return float(reverse.detach()), *grads


def six_words(seed=0):
    """Logits of a policy over six words and the log-probs of a reference two nats away or so."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 6, generator=rng, dtype=torch.float64)
    return x[0].requires_grad_(), x[1].log_softmax(-1)


@pytest.mark.parametrize(
    ("f", "loss", "reward"),
    [
        (k1, 0.0, 0.22181),
        (k2, 0.22181, -0.04949),
        (k3, 0.30000, -0.07819),
        (low_var, 0.30000, -0.07819),
        (absolute, 0.32, -0.07141),
        *[(f, 0.22181, None) for f in UNBIASED.values()],
    ],
)
def test_c070_binary_policy(f, loss, reward):
    """p = 0.8 against 0.5 by the logit: the table of the module, in both uses."""
    z, logp_ref = binary()

    def log(z, _):
        return outcomes(z)

    assert float(as_loss(f, z, logp_ref, log)) == pytest.approx(loss, abs=5e-6)
    if reward is not None:
        assert float(in_reward(f, z, logp_ref, log)) == pytest.approx(reward, abs=5e-6)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_in_expectation(seed):
    """Six words: zero, reverse, forward as a loss; reverse, their difference in the reward."""
    logits, logp_ref = six_words(seed)
    _, reverse, forward = exact(logits, logp_ref)
    torch.testing.assert_close(as_loss(k1, logits, logp_ref), torch.zeros_like(logits))
    torch.testing.assert_close(as_loss(k2, logits, logp_ref), reverse)
    torch.testing.assert_close(as_loss(k3, logits, logp_ref), forward)
    torch.testing.assert_close(in_reward(k1, logits, logp_ref), reverse)
    torch.testing.assert_close(in_reward(k3, logits, logp_ref), reverse - forward)
    assert not torch.allclose(reverse, forward, rtol=0.1)


def test_k2_in_the_reward_is_of_second_order():
    """Half the distance to the reference, a quarter of k2's reward gradient (half of k1's)."""
    logits, logp_ref = six_words()
    step = (logits.detach() - logp_ref) * 1e-3
    near, half = [(logp_ref + c * step).requires_grad_() for c in (1.0, 0.5)]
    size = {
        f: float(in_reward(f, near, logp_ref).norm() / in_reward(f, half, logp_ref).norm())
        for f in (k1, k2)
    }
    assert size[k1] == pytest.approx(2, rel=1e-2)
    assert size[k2] == pytest.approx(4, rel=1e-2)


@pytest.mark.parametrize("seed", range(3))
def test_values_in_expectation(seed):
    """k1 and k3 have mean KL(pi||ref) under pi, k2 has not."""
    logits, logp_ref = six_words(seed)
    kl, *_ = exact(logits, logp_ref)
    logp = logits.detach().log_softmax(-1)
    mean = {f: float((logp.exp() * f(logp, logp_ref)).sum()) for f in (k1, k2, k3)}
    assert mean[k1] == pytest.approx(kl)
    assert mean[k3] == pytest.approx(kl)
    assert abs(mean[k2] / kl - 1) > 0.02


@pytest.mark.parametrize("f", [k1, k3])
def test_stale_samples_need_the_ratio(f):
    """Samples from mu: r k1 and r k3 with r's gradient give the reverse KL's, k2 alone not."""
    logits, logp_ref = six_words()
    mu = six_words(1)[1]
    _, reverse, _ = exact(logits, logp_ref)
    logp = logits.log_softmax(-1)
    weighted = mu.exp() * (logp - mu).exp() * f(logp, logp_ref)
    torch.testing.assert_close(torch.autograd.grad(weighted.sum(), logits)[0], reverse)
    plain = mu.exp() * k2(logits.log_softmax(-1), logp_ref)
    assert not torch.allclose(torch.autograd.grad(plain.sum(), logits)[0], reverse, rtol=0.1)


def test_the_absolute_log_ratio_differentiates_to_the_total_variation():
    """As a loss twice the gradient of TV(pi, ref); a token with equal log-probs has none."""
    logits, logp_ref = six_words(1)
    (twice,) = torch.autograd.grad((logits.softmax(-1) - logp_ref.exp()).abs().sum(), logits)
    torch.testing.assert_close(as_loss(absolute, logits, logp_ref), twice)
    same = torch.tensor([-1.0], requires_grad=True)
    assert torch.autograd.grad(absolute(same, torch.tensor([-1.0])), same)[0] == 0


@pytest.mark.parametrize("kind", KL)
def test_unbiased_has_the_value_of_its_kind_and_the_gradient_of_k2(kind):
    """Token by token, also where low_var is held."""
    logp = torch.tensor([-1.0, -2.0, -9.0, -1.0], dtype=torch.float64, requires_grad=True)
    logp_ref = torch.tensor([-1.0, -1.0, -1.0, -30.0], dtype=torch.float64)
    value = unbiased(kind)(logp, logp_ref)
    assert torch.equal(value, KL[kind](logp, logp_ref))
    (grad,) = torch.autograd.grad(value.sum(), logp)
    assert torch.equal(grad, logp.detach() - logp_ref)


def test_unbiased_names_what_there_is():
    """A wrong kind fails at once, in one sentence."""
    with pytest.raises(ValueError, match=r"'k4'; there are k1, k2, k3, low_var"):
        unbiased("k4")


def test_policy_triangle():
    """k3 of pi/mu = k3 of pi_old/mu + k3 of pi/pi_old + (B - 1)(U - 1), for any three policies."""
    mu, old, pi = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).double() - 3
    B, U = (old - mu).exp(), (pi - old).exp()
    sides = k3(mu, old) + k3(old, pi)
    torch.testing.assert_close(k3(mu, pi), sides + (B - 1) * (U - 1))
    assert not torch.allclose(k3(mu, pi), sides, atol=0.1)


def test_k3_by_hand():
    """ref / pi = 2 gives 1 - ln 2; equal log-probs give 0; a far reference costs x - 1."""
    x = torch.tensor([-math.log(2), 0.0, 50.0], dtype=torch.float64)
    got = k3(x - 60, torch.full_like(x, -60))
    torch.testing.assert_close(got, torch.tensor([1 - math.log(2), 0, 49.0]).double())


def test_k3_of_a_small_gap_is_not_rounding():
    """x = 1e-4 in float32: x^2 / 2 to a thousandth, where exp(-x) - 1 + x is off by a factor."""
    x = torch.tensor([1e-4, -1e-4])
    torch.testing.assert_close(k3(x, torch.zeros(2)), x**2 / 2, rtol=2e-3, atol=0)
    naive = (-x).exp() - 1 + x
    assert (naive / (x**2 / 2) - 1).abs().min() > 0.1


def test_low_var_is_verls_and_slimes():
    """Over x in [-25, 25]: verl's first clamp of x to +-20 changes no value and no gradient."""
    x = torch.linspace(-25, 25, 2001, dtype=torch.float64, requires_grad=True)
    y = (-x).clamp(-20, 20)
    verl, slime = [(y.exp() - y - 1).clamp(-10, 10) for y in (y, -x)]
    ours = low_var(x, torch.zeros_like(x))
    (grad,) = torch.autograd.grad(ours.sum(), x, retain_graph=True)
    for other in (verl, slime):
        torch.testing.assert_close(ours, other)
        torch.testing.assert_close(grad, torch.autograd.grad(other.sum(), x, retain_graph=True)[0])
    held = x.detach()[(grad == 0) & (x != 0)]
    assert ours.max() == LIMIT
    assert float(held[held < 0].max()) == pytest.approx(-2.625, abs=0.026)
    assert float(held[held > 0].min()) == pytest.approx(11.0, abs=0.026)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("f", [*KL.values(), *UNBIASED.values()])
@pytest.mark.parametrize("x", [-700.0, 700.0, -LOG_RATIO_CAP, LOG_RATIO_CAP])
def test_a_huge_gap_is_finite(f, x, dtype):
    """Log-ratios of 700 nats either way: finite value and gradient, in at least float32."""
    logp = torch.tensor([x - 701], dtype=dtype, requires_grad=True)
    value = f(logp, torch.tensor([-701.0], dtype=dtype))
    (grad,) = torch.autograd.grad(value.sum(), logp)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isfinite(value).all()
    assert torch.isfinite(grad).all()


def test_overflow_is_where_k3_is_held():
    """Beyond LOG_RATIO_CAP, not before, the value stands still, the gradient is 0, the token is found."""
    logp = torch.tensor([-69.0, -71.0, -700.0, 0.0], dtype=torch.float64, requires_grad=True)
    logp_ref = torch.tensor([0.0, 0.0, 0.0, -700.0], dtype=torch.float64)
    value = k3(logp, logp_ref)
    (grad,) = torch.autograd.grad(value.sum(), logp)
    assert overflow(logp, logp_ref).tolist() == [False, True, True, False]
    assert (grad != 0).tolist() == [True, False, False, True]
    assert value[1] == value[2] == math.expm1(LOG_RATIO_CAP) - LOG_RATIO_CAP


@pytest.mark.parametrize("f", [*KL.values(), *UNBIASED.values()])
def test_no_gradient_reaches_the_reference(f):
    """A reference that is itself a parameter is a constant here."""
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    logp_ref = torch.tensor([-2.0, -1.5], requires_grad=True)
    f(logp, logp_ref).sum().backward()
    assert logp_ref.grad is None
    assert logp.grad is not None


@pytest.mark.parametrize("f", [*KL.values(), *UNBIASED.values()])
def test_selected_away_a_masked_nan_stays_there(f):
    """The recipe of the module: on_mask before, then value and gradient are 0 on masked tokens."""
    b = ragged(0)
    logp = torch.where(b.mask, b.logp, torch.nan).requires_grad_()
    reference = torch.where(b.mask, b.logp_mu, torch.inf)
    value = f(on_mask(b, logp), on_mask(b, reference))
    (grad,) = torch.autograd.grad(value.sum(), logp)
    for x in (value, grad):
        assert torch.isfinite(x).all()
        assert (x[~b.mask] == 0).all()
    assert (grad[b.mask] != 0).any()
    assert torch.equal(value[b.mask], f(b.logp, b.logp_mu)[b.mask])


@pytest.mark.parametrize("f", [*KL.values(), *UNBIASED.values()])
def test_no_token_is_ordinary(f):
    """An empty batch gives an empty term that can be differentiated."""
    logp = torch.zeros(2, 0, requires_grad=True)
    f(logp, torch.zeros(2, 0)).sum().backward()
    assert logp.grad.shape == (2, 0)
