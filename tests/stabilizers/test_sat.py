"""SAT against its own claims: Proposition 4.1, the gate rules, the scope of q, the GSPO level."""

import math

import pytest
import torch
from batches import by_response, cast, graded, on_ranks, ragged, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from simlab.core.aggregate import reduce_diagnostics
from simlab.stabilizers import bind

few = settings(max_examples=30, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)
RADII = {"eps_low": 0.2, "eps_high": 0.28}


def parts(b, **arguments):
    """(d, limits, c, gate) of SAT on b."""
    out = bind("sat", **arguments)(b)
    show = {name: x.value.expand(b.mask.shape) for name, x in out.diagnostics.items()}
    d = torch.where(b.mask, b.logp - b.logp_mu, 0)
    return d, 1 - show["radius_low"], 1 + show["radius_high"], show["c_min"], show["gate_rate"]


def gated(d, **arguments):
    """How many tokens SAT gates among the log-ratios d."""
    return int(parts(tokens(d), **arguments)[-1].sum())


# ---------------------------------------------------------------- Proposition 4.1
@few
@given(seed=seeds)
def test_the_interval_lies_inside_that_of_ppo(seed):
    """(i): a gated token contracts the end of sign(d) strictly, and no other end moves."""
    b = ragged(seed)
    d, low, high, c, gate = parts(b, **RADII)
    assert gate.any()
    up, down = gate & (d > 0), gate & (d < 0)
    assert torch.equal(high < 1.28, up)
    assert torch.equal(low > 0.8, down)
    assert (high[~up] == 1.28).all()
    assert (low[~down] == 0.8).all()
    assert (high > 1).all()
    assert (low < 1).all()
    assert (c[~gate] == 1).all()
    assert ((c[gate] > 0) & (c[gate] < 0.5)).all()


@few
@given(seed=seeds, level=st.sampled_from(["token", "sequence"]))
def test_surrogate_is_never_above_that_of_ppo(seed, level):
    """(ii): S of SAT <= S of its base method (PPO, GSPO) on every token."""
    b = ragged(seed, by_token=True)
    base = bind("ppo" if level == "token" else "gspo", **RADII)
    arguments = {"level": level, "alpha": 0.5, **RADII}
    assert (bind("sat", **arguments)(b).S <= base(b).S).all()


@few
@given(seed=seeds)
def test_gradients_differ_from_ppo_exactly_on_the_two_bands(seed):
    """(iii): (21) is the set where the gradients differ; there SAT has 0 and PPO r A."""
    b = ragged(seed, by_token=True, sizes=(60,))
    arguments = {"alpha": 0.5, **RADII}
    (_, mine), (_, base) = graded(bind("sat", **arguments), b), graded(bind("ppo", **RADII), b)
    d, low, high, _, _ = parts(b, **arguments)
    r, A = d.exp(), torch.where(b.mask, b.advantage, 0)
    band = ((A > 0) & (r > high) & (r < 1.28)) | ((A < 0) & (r > 0.8) & (r < low))
    assert torch.equal(mine != base, band)
    assert (mine[band] == 0).all()
    torch.testing.assert_close(base[band], (r * A)[band])


def test_both_bands_of_the_locus_are_reached():
    """A batch with d = 0.1 (A > 0) and d = -0.15 (A < 0) in the tail loses just these gradients."""
    d = [0.001 * (-1) ** i for i in range(18)] + [0.1, -0.15]
    b = tokens(d, [1.0] * 19 + [-1.0])
    (_, mine), (_, base) = graded(bind("sat"), b), graded(bind("ppo"), b)
    assert (mine != base).nonzero().squeeze(-1).tolist() == [18, 19]


@few
@given(seed=seeds)
def test_pull_back_is_kept(seed):
    """A token whose advantage pulls it back towards mu has PPO's value and gradient, bit for bit."""
    b = ragged(seed, by_token=True)
    (mine, grad), (base, base_grad) = graded(bind("sat", alpha=0.3), b), graded(bind("ppo"), b)
    back = b.mask & (b.advantage * (b.logp - b.logp_mu) < 0)
    assert back.any()
    assert torch.equal(mine.S[back], base.S[back])
    assert torch.equal(grad[back], base_grad[back])


# ---------------------------------------------------------------- gate, kernel, q
@pytest.mark.parametrize("n", [1, 2, 5, 9, 10, 11, 19, 20, 99, 100, 101, 1000])
def test_at_most_a_tenth_is_gated(n):
    """Distinct |d|: n - ceil(0.9 n) tokens are gated, so none up to n = 9 and 10 of 101."""
    d = torch.randperm(n, generator=torch.Generator().manual_seed(n)).double() * 1e-3 + 1e-3
    want = n - math.ceil(0.9 * n - 1e-9)
    assert gated(d) == want
    assert want <= n / 10
    assert want == {9: 0, 10: 1, 20: 2, 101: 10}.get(n, want)


def test_ties_at_the_quantile_are_not_gated():
    """The gate is strict: 15 x 0.01 and 5 x 0.02 give q = 0.02 and no gate."""
    assert gated([0.01] * 15 + [0.02] * 5) == 0
    assert gated([0.01] * 18 + [0.02] * 2) == 2
    assert gated([0.01] * 17 + [-0.02] * 3) == 0


def test_a_zero_quantile_gates_nothing():
    """19 zeros and one 0.3: q = 0, the radius is PPO's own."""
    assert gated([0.0] * 19 + [0.3]) == 0
    assert float(bind("sat").stats([tokens([0.0] * 19 + [0.3])])["q"]) == 0


@pytest.mark.parametrize(("u", "c"), [(1.5, 0.3077), (2, 0.2), (3, 0.1), (5, 0.0385), (10, 0.0099)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_kernel_is_hill_with_exponent_two(u, c, sign):
    """psi(u/q) of formulas.md 1.11, the same on both sides."""
    b = tokens([0.01] * 18 + [0.001, sign * 0.01 * u])
    assert float(parts(b)[3].min()) == pytest.approx(c, abs=5e-5)


@pytest.mark.parametrize(
    ("q", "edge"),
    [(1e-3, 0.00579), (5e-3, 0.01656), (0.01, 0.02580), (0.02, 0.03969), (0.05, 0.06793)],
)
def test_the_effective_band_starts_where_predicted(q, edge):
    """A gated token loses its gradient beyond u* with e^u* - 1 = eps psi(u*), and not before."""
    for d, keeps in ((edge - 2e-5, True), (edge + 2e-5, False)):
        b = tokens([q] * 19 + [d])
        assert bind("sat")(b).active[-1].item() is keeps


@few
@given(seed=seeds, power=st.integers(-6, 3))
def test_contraction_is_invariant_to_the_scale_of_d(seed, power):
    """d -> 2^k d changes neither gate nor c, bit for bit."""
    d = 0.1 * torch.randn(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    base, scaled = parts(tokens(d, mu=0.0)), parts(tokens(d * 2.0**power, mu=0.0))
    assert base[4].any()
    assert torch.equal(base[3], scaled[3])
    assert torch.equal(base[4], scaled[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "off",
    [{"q": 0.0}, {"q": torch.inf}, {"q": 0.05, "factor": 1.0}],
    ids=["q=0", "q=inf", "factor"],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_closed_gate_is_the_base_method_bit_for_bit(dtype, off, level):
    """q = 0, q above everything, or factor 1: S and gradient are those of PPO (GSPO)."""
    base = bind("ppo" if level == "token" else "gspo", **RADII)
    for seed in range(5):
        b = cast(ragged(seed, by_token=True), dtype)
        want, want_grad = graded(base, b)
        got, got_grad = graded(bind("sat", level=level, **RADII), b, **off)
        assert torch.equal(got.S, want.S)
        assert torch.equal(got_grad, want_grad)
        assert torch.equal(got.active, want.active)


def test_q_and_contraction_are_constants():
    """q carries no gradient even when logp does."""
    b = ragged()
    b.logp.requires_grad_()
    assert not bind("sat").stats([b])["q"].requires_grad
    diagnostics = bind("sat")(b).diagnostics
    assert not any(diagnostics[k].value.requires_grad for k in ("radius_low", "radius_high", "q"))


def test_the_five_runtime_quantities_are_reported():
    """Table 10: mean radii, gate rate, smallest c, q; by their own reducers, per lane."""
    b = ragged(lanes=(3,))
    shown = reduce_diagnostics(b, bind("sat")(b).diagnostics)
    _, low, high, c, gate = parts(b)
    for i in range(3):
        on = b.mask[i]
        assert float(shown["radius_low"][i]) == pytest.approx(float((1 - low[i])[on].mean()))
        assert float(shown["radius_high"][i]) == pytest.approx(float((high[i] - 1)[on].mean()))
        assert float(shown["gate_rate"][i]) == pytest.approx(float(gate[i][on].double().mean()))
        assert shown["c_min"][i] == c[i][on].min()
    assert torch.equal(shown["q"], bind("sat").stats([b])["q"])


# ---------------------------------------------------------------- scope of q
def test_q_over_micro_batches_and_ranks_is_that_of_the_whole_batch():
    """Four micro-batches on two ranks, one of them empty: every rank gets q bit for bit."""
    for level in ("token", "sequence"):
        bound = bind("sat", level=level)
        b = ragged(11, sizes=(3, 40, 1, 17, 5, 64, 2, 30))
        want = bound.stats([b])["q"]
        micros = by_response(b, [[0, 5], [1, 3], [2, 4, 6, 7], []])
        assert torch.equal(bound.stats(micros)["q"], want)
        shards = [micros[:1], micros[1:]]
        for got in on_ranks(2, lambda i, reduce, s=shards, f=bound: f.stats(s[i], reduce)["q"]):
            assert torch.equal(got, want)


def test_a_local_q_is_another_rule():
    """q of a micro-batch differs from q of the batch, and so does the loss (C064)."""
    bound, b = bind("sat"), ragged(11, sizes=(3, 40, 1, 17, 5, 64, 2, 30))
    micros = by_response(b, [[0, 5], [1, 2, 3, 4, 6, 7]])
    stats = bound.stats([b])
    assert len({float(bound.stats([m])["q"]) for m in micros}) == 2
    right = sum(bound.surrogate(m, **stats).S.sum() for m in micros)
    local = sum(bound(m).S.sum() for m in micros)
    torch.testing.assert_close(right, bound(b).S.sum())
    assert (local - right).abs() > 1e-4


# ---------------------------------------------------------------- the GSPO level
def sequences(lengths, levels, A=1.0):
    """Responses of constant d."""
    lengths = torch.tensor(lengths)
    d = torch.repeat_interleave(torch.tensor(levels, dtype=torch.float64), lengths)
    return tokens(d, A, response=torch.repeat_interleave(torch.arange(len(lengths)), lengths))


def test_a_single_response_never_gates_itself():
    """One response: all |d| are equal, whatever its tokens do."""
    b = ragged(3, sizes=(50,))
    assert bind("sat", level="sequence")(b).diagnostics["gate_rate"].value.sum() == 0
    assert bind("sat")(b).diagnostics["gate_rate"].value.sum() > 0


def test_a_long_outlier_sets_q_and_is_not_gated():
    """Lengths 10, 20, 30, 40 with the outlier on 40: it holds 40 % of the tokens, so q is its |d|."""
    b = sequences([10, 20, 30, 40], [0.0005, 0.0006, 0.0004, 0.004])
    out = bind("sat", level="sequence")(b)
    assert float(reduce_diagnostics(b, out.diagnostics)["q"]) == pytest.approx(0.004)
    assert not out.diagnostics["gate_rate"].value.any()


def test_a_short_outlier_is_gated_and_clipped():
    """5 % of the tokens at 0.004 against 0.0005: c = 0.01538, limit 1.00308 < rho = 1.00401."""
    b = sequences([38, 57, 5], [0.0005, -0.0005, 0.004])
    out = bind("sat", level="sequence")(b)
    shown = reduce_diagnostics(b, out.diagnostics)
    assert float(shown["c_min"]) == pytest.approx(0.01538, abs=5e-6)
    assert float(shown["gate_rate"]) == pytest.approx(0.05)
    torch.testing.assert_close(out.S[-5:], torch.full((5,), 1.0030769).double(), rtol=1e-6, atol=0)
    assert not out.active[-5:].any()
    assert out.active[:-5].all()


def test_the_quantile_of_the_sequence_level_ranges_over_tokens():
    """Three short noisy responses among one long calm one: q is the calm value (length weights)."""
    b = sequences([97, 1, 1, 1], [0.001, 0.02, 0.03, 0.04])
    assert float(bind("sat", level="sequence").stats([b])["q"]) == pytest.approx(0.001)
