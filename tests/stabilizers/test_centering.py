"""Score centering against exact enumeration: every token of a state drawn once, gradients in the logits."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from simlab.contract.promises import check
from simlab.core.head import head, on_support
from simlab.core.tokens import TokenBatch, on_mask
from simlab.stabilizers import bind, centering

P, Q = (0.5, 0.3, 0.2), (0.4, 0.4, 0.2)
RULES = {
    "none": lambda r, A: 1.0,
    "cap": lambda r, A: min(r, 1.1),
    "clamp": lambda r, A: min(max(r, 0.8), 1.3),
    "band": lambda r, A: r if 0.6 <= r <= 1.5 else 0.0,
    "clip": lambda r, A: 0.0 if (A > 0 and r > 1.2) or (A < 0 and r < 0.8) else r,
}
ARGUMENTS = {
    "none": {},
    "cap": {"cap": 1.1},
    "clamp": {"low": 0.8, "high": 1.3},
    "band": {"low": 0.6, "high": 1.5},
    "clip": {},
}


def drawn(z, q, A, heads):
    """One token for each a: its log-probs, and those of its head, from the logits z `[V, V]`."""
    V = len(q)
    log_p, log_q = torch.log_softmax(z, -1), torch.tensor(q, dtype=torch.float64).log().expand(V, V)
    own = torch.eye(V, dtype=torch.bool)
    index = torch.tensor([list(h) for h in heads])
    top, top_mu = (x.masked_fill(own, -torch.inf).gather(-1, index) for x in (log_p, log_q))
    return TokenBatch(
        logp=log_p.diagonal(),
        logp_mu=log_q.diagonal(),
        advantage=torch.as_tensor(A, dtype=torch.float64).expand(V),
        mask=torch.ones(V, dtype=torch.bool),
        response=torch.arange(V),
        uniform=torch.linspace(0, 0.99, V),
        topk=top,
        topk_mu=top_mu,
    )


def rows(p, q, heads, A=1.0, loss=None, support=False, **arguments):
    """dS/dz `[V, V]` of each draw a, as if each had been the only one."""
    z = torch.tensor(p, dtype=torch.float64).log().repeat(len(p), 1).requires_grad_()
    b = drawn(z, q, A, heads)
    b = on_support(b) if support else b
    S = (loss or (lambda x: bind("centering", **arguments)(x).S))(b)
    return torch.autograd.grad(S.sum(), z)[0].numpy()


WHOLE = [(0, 1, 2)] * 3
GOLDEN = [  # formulas_2 section 3, 1 to 7: arguments, head of each draw, rows, their mean under q
    ({}, WHOLE, [(0.6, -0.4, -0.2), (-0.4, 0.6, -0.2), (-0.4, -0.4, 0.8)], (0, 0, 0)),
    ({}, [(0,)] * 3, [(0.6, -0.36, -0.24), (-0.4, 0.64, -0.24), (-0.4, -0.36, 0.76)], (0, 0.04, -0.04)),
    ({}, [(0, 1)] * 3, [(0.6, -0.4, -0.2), (-0.4, 0.6, -0.2), (-0.4, -0.4, 0.8)], (0, 0, 0)),
    *(({"mode": "cap", "cap": 1.0}, h, [(0.55, -0.33, -0.22), (-0.325, 0.495, -0.17), (-0.45, -0.33, 0.78)], (0, 0, 0))
      for h in (WHOLE, [(0,)] * 3, [(0, 1)] * 3)),
    ({"mode": "band", "low": 0.8, "high": 1.2}, WHOLE,
     [(0.1, 0.06, -0.16), (0.1, 0.06, -0.16), (-0.4, -0.24, 0.64)], (0, 0, 0)),
    ({"mode": "band", "low": 0.8, "high": 1.2}, [(0,)] * 3,
     [(0.25, -0.15, -0.1), (0.25, -0.15, -0.1), (-0.25, -0.45, 0.7)], (0.15, -0.21, 0.06)),
    ({"mode": "cap", "cap": math.inf}, WHOLE,
     [(0.625, -0.375, -0.25), (-0.375, 0.525, -0.15), (-0.5, -0.3, 0.8)], None),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(GOLDEN)))
def test_the_published_numbers(i):
    """Rows of dS/dz and their mean under q."""
    arguments, heads, want, mean = GOLDEN[i]
    got = rows(P, Q, heads, **arguments)
    np.testing.assert_allclose(got, want, atol=1e-12)
    if mean is not None:
        np.testing.assert_allclose(np.array(Q) @ got, mean, atol=1e-12)


def test_a_head_that_takes_the_sampled_token_in():
    """Golden 3: a head that depends on the draw has another bias."""
    got = rows(P, Q, [(0, 0), (0, 1), (0, 2)])
    # draw 0 has its head twice as (0, 0): the place of the sampled token, no mass counts twice
    np.testing.assert_allclose(np.array(Q) @ got, (0, 0.016, -0.016), atol=1e-12)
    np.testing.assert_allclose(got[1:], rows(P, Q, WHOLE)[1:], atol=1e-12)


def test_ipo_keeps_the_centering_of_what_it_masks():
    """Golden 7."""
    got = rows((0.8, 0.1, 0.1), (0.4, 0.3, 0.3), WHOLE, mode="ipo")
    third = 0.32 / 3
    want = [(0.16, -0.08, -0.08), (-third, 0.22, third - 0.22), (-third, third - 0.22, 0.22)]
    np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_allclose(np.array((0.4, 0.3, 0.3)) @ got, 0, atol=1e-12)


def test_the_support_is_replayed():
    """Golden 8 and top-p: on the sampler's support nothing is left of a certain draw."""
    for mode in ("none", "cap"):
        assert rows((0.5, 0.5), (1.0, 0.0), [(0, 1)] * 2, mode=mode)[0] == pytest.approx([0, 0])
    plain = rows((0.5, 0.5), (1.0, 0.0), [(0, 1)] * 2, loss=lambda b: b.logp * b.advantage)
    assert plain[0] == pytest.approx([0.5, -0.5])
    p, q = (0.5, 0.3, 0.2), (0.625, 0.375, 0.0)  # q is p cut to its first two tokens
    b = on_support(drawn(torch.tensor(p, dtype=torch.float64).log().repeat(3, 1), q, 1.0, WHOLE))
    assert torch.allclose(b.logp[:2], b.logp_mu[:2])
    assert torch.allclose(b.topk[:2].exp().sum(-1) + b.logp[:2].exp(), torch.ones(2).double())
    got = rows(p, q, WHOLE, support=True)
    np.testing.assert_allclose(np.array(q) @ got, 0, atol=1e-12)
    assert (got[:2, 2] == 0).all()  # nothing outside of the support moves
    half = replace(b, topk=b.topk[..., :1], topk_mu=b.topk_mu[..., :1], logp_mu=b.logp_mu - 1)
    assert torch.equal(on_support(half).logp, half.logp)  # a head that misses mass


@pytest.mark.parametrize("mode", RULES)
@pytest.mark.parametrize("A", [1.0, -1.0])
def test_the_mean_under_mu_is_zero_and_the_rest_the_covariance(mode, A):
    """E_q of the gradient of a constant advantage is 0; of any other, Cov_q(A, f s), by enumeration."""
    rng = np.random.default_rng(3)
    for _ in range(5):
        p, q = rng.dirichlet(np.ones(6), 2)
        heads = [tuple(np.argsort(-q))] * 6
        got = rows(p, q, heads, A, mode=mode, **ARGUMENTS[mode])
        np.testing.assert_allclose(q @ got, 0, atol=1e-12)
        each = A * rng.random(6)  # of one sign: the rule of mode clip reads it
        f = np.array([RULES[mode](r, A) for r in p / q])
        score = f[:, None] * (np.eye(6) - p)
        want = (q * each) @ score - (q @ each) * (q @ score)
        got = q @ rows(p, q, heads, each, mode=mode, **ARGUMENTS[mode])
        np.testing.assert_allclose(got, want, atol=1e-12)


def test_nothing_is_left_without_mismatch():
    """p = q: plain REINFORCE, whatever the head."""
    for mode, columns in itertools.product(("none", "cap", "clamp", "band", "ipo", "clip"), (1, 2)):
        got = rows(P, P, [(0, 1)] * 3, mode=mode, columns=columns)
        np.testing.assert_allclose(got, np.eye(3) - np.array(P), atol=1e-12)


@pytest.mark.parametrize("base", ["ppo", "none"])
def test_it_is_added_to_a_base(base):
    """PPO with mode clip, and a loss without ratio with mode none, have mean 0 under mu."""
    mode = {"ppo": "clip", "none": "none"}[base]
    for A in (1.0, -1.0):
        loss = lambda b: bind(base)(b).S + centering.extra(b, mode=mode).S  # noqa: E731
        np.testing.assert_allclose(np.array(Q) @ rows(P, Q, WHOLE, A, loss=loss), 0, atol=1e-12)
        alone = np.array(Q) @ rows(P, Q, WHOLE, A, loss=lambda b: bind(base)(b).S)
        assert np.abs(alone).max() > 0.05
    halved = lambda b: centering.extra(b, factor=torch.full((3,), 0.5)).S  # noqa: E731
    whole = lambda b: centering.extra(b).S  # noqa: E731
    np.testing.assert_allclose(rows(P, Q, WHOLE, loss=halved), rows(P, Q, WHOLE, loss=whole) / 2)


def test_the_placebo_moves_the_same_coefficients():
    """As many, of the same sizes, on other tokens; the mean under mu is not 0."""
    z = torch.tensor(P, dtype=torch.float64).log().repeat(3, 1)
    b = drawn(z, Q, 1.0, WHOLE)
    for u in (0.0, 0.6, 0.999):
        b = replace(b, uniform=torch.full((3,), u))
        sets = []
        for placebo in (False, True):
            x = centering.terms(b, centering.Rule(), None, placebo)
            row = torch.where(head(b, "x").logp == -torch.inf, x.own.unsqueeze(-1), x.c)
            assert (x.c[head(b, "x").logp == -torch.inf] == 0).all()
            sets.append(row)
        assert torch.equal(*(x.sort(-1).values for x in sets))
        assert not torch.allclose(*sets)
    assert np.abs(np.array(Q) @ rows(P, Q, WHOLE, placebo=True)).max() > 0.01


def test_a_missing_tail_and_an_impossible_token():
    """mu_v = 0 takes no mass, and a head that holds everything needs no tail."""
    b = drawn(torch.tensor(P, dtype=torch.float64).log().repeat(3, 1), (0.5, 0.5, 0.0), 1.0, WHOLE)
    b = b.take(torch.tensor([0, 1]))
    for mode in ("cap", "clamp", "band", "ipo", "clip"):
        x = centering.terms(b, centering.Rule(mode=mode, cap=math.inf, high=math.inf), None, False)
        assert x.c[:, 2].tolist() == pytest.approx([-0.2, -0.2])  # -alpha p, and m is 0
        assert torch.isfinite(bind("centering", mode=mode)(b).S).all()


def test_head_columns():
    """The first columns, constants of mu, and -inf where masked."""
    b = drawn(torch.zeros(3, 3, requires_grad=True), Q, 1.0, WHOLE)
    b = replace(b, mask=torch.tensor([True, True, False]))
    found = head(b, "x", 1)
    assert found.logp.shape == (3, 1)
    assert found.sampled.tolist() == [True, False, False]
    assert (found.logp[2] == -torch.inf).all()
    assert found.logp.requires_grad
    assert not found.logp_mu.requires_grad
    with pytest.raises(ValueError, match="x needs topk, "):
        head(replace(b, topk=None), "x")
    assert on_mask(b, b.logp)[2] == 0


def test_it_is_a_term_of_a_composition():
    """`ppo+centering:mode=clip` is PPO plus the extra, keeps the contract, and says that it has log pi_v."""
    both = bind("ppo+centering", **{"centering.mode": "clip"})
    want = lambda b: bind("ppo")(b).S + centering.extra(b, mode="clip").S  # noqa: E731
    got = rows(P, Q, WHOLE, -1.0, loss=lambda b: both(b).S)
    np.testing.assert_array_equal(got, rows(P, Q, WHOLE, -1.0, loss=want))
    np.testing.assert_allclose(np.array(Q) @ got, 0, atol=1e-12)
    assert "log pi_v" in both.formula
    check(both)
