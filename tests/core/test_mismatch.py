"""Whole-batch statistics against sorting, loops and the field cases (C numbers: docs/cases.md)."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from batches import by_response, on_ranks, ragged, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from simlab.core.advantages import group_advantage
from simlab.core.aggregate import reduce_diagnostics
from simlab.core.mismatch import gradient_shares, mismatch
from simlab.core.per_response import (
    global_counts,
    response_lengths,
    response_means,
    response_sums,
    to_tokens,
)
from simlab.core.quantile import abs_quantile, rank
from simlab.core.tokens import Diagnostic, TokenBatch

few = settings(max_examples=50, deadline=None, derandomize=True, database=None)
ALPHAS = [0.01, 0.1, 0.25, 0.5, 0.55, 0.9, 0.95, 0.99, 1.0]


def everywhere(x):
    return torch.ones(x.shape, dtype=torch.bool)


def by_sorting(x, mask, alpha):
    """The definition: the ceil(alpha n)-th smallest |x| of the active entries, 0 when there are none."""
    a = x[mask].abs().sort().values
    k = math.ceil(Fraction(str(alpha)) * len(a))
    return a[k - 1] if len(a) else x.new_zeros(())


# ---------------------------------------------------------------- the quantile
@pytest.mark.parametrize(
    ("alpha", "n", "k"),
    [(0.55, 100, 55), (0.07, 100, 7), (0.9, 20, 18), (0.9, 10, 9), (0.9, 9, 9), (0.9, 101, 91),
     (1.0, 7, 7), (0.001, 5, 1), (0.9, 0, 0), (1e-05, 300_000, 3), (0.9, 10**15, 9 * 10**14)],
)  # fmt: skip
def test_rank_is_exact(alpha, n, k):
    """k = ceil(alpha n) with alpha read as the decimal that was written."""
    assert rank(alpha, n) == k


@pytest.mark.parametrize("alpha", [0, -0.1, 1.0001, 2])
def test_rank_refuses_what_is_no_level(alpha):
    """alpha lies in (0, 1]."""
    with pytest.raises(ValueError, match="alpha"):
        rank(alpha, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 9, 10, 11, 100, 101, 4096])
def test_quantile_is_the_order_statistic(n, dtype):
    """Equal bit for bit to sorting and, where alpha n is no integer, to numpy's inverted CDF."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=dtype)
    x = x * 10 ** torch.linspace(-6, 3, n, dtype=dtype)
    for alpha in ALPHAS:
        q = abs_quantile([(x, everywhere(x))], alpha)
        assert q.dtype == dtype
        assert torch.equal(q, by_sorting(x, everywhere(x), alpha))
        if Fraction(str(alpha)) * n % 1:
            assert float(q) == np.quantile(x.abs().numpy(), alpha, method="inverted_cdf")


@few
@given(
    x=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30),
    alpha=st.sampled_from(ALPHAS),
    cut=st.integers(0, 30),
    masked=st.sets(st.integers(0, 29)),
)
def test_quantile_of_any_float_and_any_cut(x, alpha, cut, masked):
    """Zeros of both signs, subnormals, infinities, ties; any mask and any cut in two shards."""
    x = torch.tensor(x)
    mask = torch.tensor([i not in masked for i in range(len(x))])
    got = abs_quantile([(x[:cut], mask[:cut]), (x[cut:], mask[cut:])], alpha)
    assert torch.equal(got, by_sorting(x, mask, alpha))


def test_quantile_of_ties_and_zeros():
    """Ties give the tied value, mostly zeros give 0, and -0 counts as 0."""
    x = torch.tensor([0.0, -0.0] * 9 + [0.3, -0.3])
    assert float(abs_quantile([(x, everywhere(x))], 0.9)) == 0
    assert abs_quantile([(x, everywhere(x))], 0.95) == x[-2]
    assert abs_quantile([(x.abs() + 1, everywhere(x))], 0.5) == 1


def test_quantile_ranks_infinity_last():
    """An infinite entry is the largest, not an error."""
    x = torch.tensor([-torch.inf, 3.0, 1.0, 2.0])
    assert abs_quantile([(x, everywhere(x))], 0.75) == 3
    assert abs_quantile([(x, everywhere(x))], 1.0) == torch.inf


@pytest.mark.parametrize("shape", [(0,), (5,), (2, 0), (2, 5)])
def test_quantile_of_nothing_is_zero(shape):
    """Empty or all-masked shards give 0 on every lane, also over NaN."""
    x = torch.full(shape, torch.nan)
    q = abs_quantile([(x, torch.zeros(shape).bool())] * 2, 0.9)
    assert torch.equal(q, torch.zeros(shape[:-1]))


def test_quantile_needs_a_shard():
    """Without any shard neither lanes nor dtype are known."""
    with pytest.raises(ValueError, match="at least one shard"):
        abs_quantile([], 0.9)


def test_quantile_ignores_shards_without_entries():
    """Empty and all-masked micro-batches beside a full one change nothing."""
    x, none = torch.tensor([3.0, 1.0, 2.0]), torch.zeros(0)
    junk = torch.full((4,), 99.0)
    shards = [(none, none.bool()), (x, everywhere(x)), (junk, junk.bool() & False)]
    assert abs_quantile(shards, 0.5) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantile_of_lanes_with_different_counts(dtype):
    """Each lane has its own n and k, also a lane without an active entry."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 50, generator=rng, dtype=dtype)
    mask = torch.rand(2, 3, 50, generator=rng) < torch.tensor([[0.1], [0.5], [0.9]])
    mask[1, 2] = False
    cuts = [
        (x[..., :7], mask[..., :7]),
        (x[..., 7:30], mask[..., 7:30]),
        (x[..., 30:], mask[..., 30:]),
    ]
    for alpha in ALPHAS:
        q = abs_quantile(cuts, alpha)
        assert q.shape == (2, 3)
        for i in range(2):
            for j in range(3):
                assert torch.equal(q[i, j], by_sorting(x[i, j], mask[i, j], alpha))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantile_takes_half_precision(dtype):
    """C022: bf16 input, masked 100. The case's 2.5 and 1.75 are torch.quantile's interpolation. Here 2
    and 1 are right: SAT (14) takes an order statistic, an entry of the batch, which is also what counts
    over micro-batches and ranks can find. What went wrong in the case is right in both: bf16, the mask.
    """
    x = torch.tensor([1, 2, 3, 4, 100], dtype=dtype)
    mask = torch.tensor([1, 1, 1, 1, 0]).bool()
    assert abs_quantile([(x, mask)], 0.5) == 2
    assert abs_quantile([(x, mask)], 0.25) == 1
    assert abs_quantile([(x, mask)], 0.5).dtype == torch.float32


def test_quantile_beyond_the_integers_of_float32():
    """17 million entries, more than 2^24: the rank is still exact (torch.quantile gives up here)."""
    n = 17_000_000
    x = torch.arange(n, dtype=torch.int32).div(4, rounding_mode="floor").float()
    x[::2] *= -1
    mask = everywhere(x)
    halves = [(x[: n // 2], mask[: n // 2]), (x[n // 2 :], mask[n // 2 :])]
    k = 15_300_001  # ceil(0.90000004 n), a rank that float32 cannot hold
    assert float(abs_quantile(halves, 0.90000004)) == (k - 1) // 4


def test_quantile_over_three_ranks():
    """Ranks with different shards (one has nothing) all get the quantile of the union."""
    x = torch.randn(500, generator=torch.Generator().manual_seed(3)) ** 3
    mask = torch.arange(500) % 7 > 0
    pieces = [(x[:400], mask[:400]), (x[400:], mask[400:]), (x[:0], mask[:0])]
    for alpha in ALPHAS:
        got = on_ranks(3, lambda i, reduce, a=alpha: abs_quantile([pieces[i]], a, reduce))
        assert all(torch.equal(q, by_sorting(x, mask, alpha)) for q in got)


def test_the_reducer_only_sees_integers():
    """What travels between ranks is counts, so the order of summation cannot matter."""
    seen = []

    def reduce(counts):
        seen.append(counts.dtype)
        return counts

    x = torch.randn(30)
    abs_quantile([(x, everywhere(x))], 0.9, reduce)
    assert len(seen) == 3  # n, then two passes of 65,536 bins
    assert set(seen) == {torch.int64}


def test_the_quantile_of_a_fraction_is_not_the_mean_of_local_ones():
    """C064: the top half of [9, 8, 1, 0] is {9, 8}; two micro-batches of two would pick 9 and 1."""
    x = torch.tensor([9.0, 8.0, 1.0, 0.0])
    cut = abs_quantile([(x, everywhere(x))], 0.5)
    assert (x > cut).tolist() == [True, True, False, False]
    local = torch.cat([h > abs_quantile([(h, everywhere(h))], 0.5) for h in x.split(2)])
    assert local.tolist() == [True, False, True, False]


# ---------------------------------------------------------------- per response
def test_per_response_reductions_equal_a_loop():
    """Sums, lengths and means over active tokens, by lane, for responses in any order."""
    b = ragged(4, lanes=(2,), by_token=True)
    x = b.logp
    sums, lengths, means = response_sums(b, x), response_lengths(b), response_means(b, x)
    assert lengths.dtype == torch.int64
    for lane in range(2):
        for i in range(b.n_responses):
            at = b.mask[lane] & (b.response[lane] == i)
            assert lengths[lane, i] == at.sum()
            torch.testing.assert_close(sums[lane, i], x[lane, at].sum())
            if at.any():
                torch.testing.assert_close(means[lane, at], x[lane, at].mean().expand(at.sum()))
    assert (means[~b.mask] == 0).all()


def test_an_absent_response_has_length_zero():
    """Index gaps and fully masked responses count 0 tokens and disturb nobody."""
    b = tokens([0.1, 0.2, 0.3, 9.0], response=[0, 0, 3, 1], mask=[1, 1, 1, 0])
    assert response_lengths(b).tolist() == [2, 0, 0, 1]
    means = response_means(b, b.logp - b.logp_mu)
    torch.testing.assert_close(means, torch.tensor([0.15, 0.15, 0.3, 0.0]).double())
    assert to_tokens(b, torch.tensor([5, 6, 7, 8])).tolist() == [5, 5, 8, 0]


def test_counts_add_over_micro_batches_and_ranks():
    """global_counts of any cut into whole responses is that of the batch."""
    b = ragged(5, lanes=())
    want = global_counts([b])
    assert want["tokens"] == b.mask.sum()
    assert want["responses"] == len(set(b.response[b.mask].tolist()))
    micros = by_response(b, [[0, 1, 2], [3, 4], [5, 6], []])
    assert global_counts(micros) == want
    for got in on_ranks(2, lambda i, reduce: global_counts(micros[2 * i : 2 * i + 2], reduce)):
        assert got == want


# ---------------------------------------------------------------- mismatch
def quantile_of(level):
    return lambda d: np.quantile(np.abs(d), level, method="inverted_cdf")


FORMULAS = {
    "tokens": len,
    "d_bar": lambda d: np.abs(d).mean(),
    "d_mean": np.mean,
    "d_max": lambda d: np.abs(d).max(),
    "d_kurtosis": lambda d: ((d - d.mean()) ** 4).mean() / d.var() ** 2,
    "k1": lambda d: -d.mean(),
    "k2": lambda d: (d**2).mean() / 2,
    "k3": lambda d: (np.exp(d) - 1 - d).mean(),
    "ess": lambda d: np.exp(d).sum() ** 2 / (len(d) * np.exp(2 * d).sum()),
    "chi2": lambda d: np.exp(2 * d).mean() - 1,
    "d_q50": quantile_of(0.5),
    "d_q90": quantile_of(0.9),
    "d_q99": quantile_of(0.99),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_mismatch_equals_its_formula(name):
    """Every value against numpy on the active float64 log-ratios, lane by lane."""
    b = ragged(6, lanes=(3,))
    got = mismatch([b])
    assert set(got) == {*FORMULAS, "age", "age_max"}
    for i in range(3):
        d = (b.logp - b.logp_mu)[i][b.mask[i]].numpy()
        assert float(got[name][i]) == pytest.approx(FORMULAS[name](d), rel=1e-10)


def test_mismatch_and_shares_do_not_depend_on_the_cut():
    """Micro-batches, one of them empty, and two ranks give the numbers of the whole batch."""
    b = ragged(7)
    active = [x.logp > -1 for x in (b,)]
    old = b.logp_mu + 0.1
    want = mismatch([b], logp_rollout=[old]) | gradient_shares([b], active, [b.logp > -2])
    indices = [torch.arange(i, len(old), 3) for i in range(3)] + [torch.arange(0)]
    micros = [b.take(index) for index in indices]

    def of(chosen, reduce=None):
        part = [micros[i] for i in chosen]
        mine, base = [x.logp > -1 for x in part], [x.logp > -2 for x in part]
        then = [x.logp_mu + 0.1 for x in part]
        return mismatch(part, reduce, then) | gradient_shares(part, mine, base, reduce)

    for got in [of(range(4)), *on_ranks(2, lambda i, reduce: of((2 * i, 2 * i + 1), reduce))]:
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert float(got[name]) == pytest.approx(float(value), rel=1e-12), name
    assert 0 < want["cut"] < 1
    changed = ((b.logp > -1) != (b.logp > -2))[b.mask].double().mean()
    assert float(want["unlike_ppo"]) == pytest.approx(float(changed), rel=1e-6)


def test_the_parts_of_d_and_ages_by_hand():
    """Two tokens: d = 0.3 and -0.2, of which 0.1 each is the engine's; ages 2 and 5."""
    b = replace(tokens([0.3, -0.2]), age=torch.tensor([2, 5]))
    got = mismatch([b], logp_rollout=[b.logp_mu + 0.1])
    assert float(got["d_policy"]) == pytest.approx((0.2 + 0.3) / 2)
    assert float(got["d_engine"]) == pytest.approx(0.1)
    assert (float(got["age"]), int(got["age_max"])) == (3.5, 5)


@pytest.mark.parametrize("size", [0.011, 0.022, 0.036])
def test_c001_absolute_and_signed_gap(size):
    """D = -, +, - : mean |D| is the size, the signed mean is minus a third of it, not 0."""
    got = mismatch([tokens([-size, size, -size], mu=[-1.0, -0.5, -2.0])])
    assert float(got["d_bar"]) == pytest.approx(size)
    assert float(got["d_mean"]) == pytest.approx(-size / 3)


def test_c005_gap_on_a_grid():
    """Four sequences with the gap on the first token: mean |D| = 0.0625 over 12 tokens."""
    d = [0.25, 0, 1e-6, 0.125, 0, 1e-6, -0.125, 0, 0, 0.25, 0, 0]
    assert float(mismatch([tokens(d)])["d_bar"]) == pytest.approx(0.0625, abs=1e-6)
    assert float(mismatch([tokens(d)])["d_max"]) == pytest.approx(0.25)


C007 = [0.16812, 0.16583, 0.022484, 0.31972, 0.007973, 0.082725, 0.006664, 0.0027746, 0.030473,
        0.013607, 0.001018, 0.11168, 0.011888, 0.0038248, 0.0039153, 0.00010273, 0.0013692, 0.009008,
        0.1028, 2.4494e-06, 0.0062895, 3.4106e-12, 0.002625, 0.067706, 0.0021693]  # fmt: skip


def test_c007_published_gaps():
    """25 printed values: mean 0.04579, median 0.00797, RMS 0.0882, max 0.31972."""
    got = mismatch([tokens(C007)])
    assert float(got["d_bar"]) == pytest.approx(0.04579, abs=5e-6)
    assert float(got["d_q50"]) == pytest.approx(0.007973)
    assert math.sqrt(2 * float(got["k2"])) == pytest.approx(0.08820, abs=5e-6)
    assert float(got["d_max"]) == pytest.approx(0.31972)


def test_c013_padding_value_is_not_read():
    """A pad of -1e10 under the mask: mean |D| = 0.15, k3 = 0.011951."""
    b = tokens([-0.2, 0.1, -1e10], mu=[-1.0, -0.8, 0.0], mask=[1, 1, 0])
    got = mismatch([b])
    assert float(got["d_bar"]) == pytest.approx(0.15)
    assert float(got["k3"]) == pytest.approx(0.011951, abs=5e-7)
    assert all(torch.isfinite(x) for x in got.values())


def test_c030_and_c032_gap_by_document_and_without_tool_tokens():
    """Lanes as documents: 0, 1, 0.9. Masked tool tokens: 0 over 2 tokens."""
    assert mismatch([tokens([[0.0, 0.0], [0.9, 1.1], [1.0, 0.8]])])[
        "d_bar"
    ].tolist() == pytest.approx([0, 1, 0.9])
    got = mismatch([tokens([0.0, -5.0, -7.0, 0.0], mu=[-1.0, 0.0, 0.0, -2.0], mask=[1, 0, 0, 1])])
    assert got["d_bar"] == 0
    assert got["tokens"] == 2


def test_c058_effective_sample_size():
    """1 on-policy; 0.25 for one weight of four; 16/18 with a masked 9; scale-free."""
    assert float(mismatch([tokens([0.0] * 4)])["ess"]) == pytest.approx(1)
    assert float(mismatch([tokens([math.log(4), -300, -300, -300])])["ess"]) == pytest.approx(0.25)
    d, mask = torch.tensor([2.0, 1.0, 1.0, 9.0]).double().log(), [1, 1, 1, 0]
    assert float(mismatch([tokens(d, mask=mask)])["ess"]) == pytest.approx(16 / 18)
    assert float(mismatch([tokens(d + 5, mask=mask)])["ess"]) == pytest.approx(16 / 18)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mismatch_survives_huge_log_ratios(dtype):
    """C045: +-700 give no NaN; ESS is formed in logs, so one huge weight means 1/n.

    As in the case, log-ratios are reported unchanged. Its count of 3 is of |d| above 20, which is the
    rule for logs (tests/token_log); a loss counts as `overflow` only ratios that it cannot form, d above
    LOG_RATIO_CAP, since -700 is a ratio of 0 and e^21 a number."""
    got = mismatch([tokens([700.0, -700.0, 21.0, 0.1], mu=-1.0, dtype=dtype)])
    assert not any(x.isnan() for x in got.values())
    assert float(got["ess"]) == pytest.approx(0.25, rel=1e-4)
    assert float(got["d_bar"]) == pytest.approx(1421.1 / 4, rel=1e-6)
    assert float(got["d_max"]) == pytest.approx(700)


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 0), (2, 3)])
def test_mismatch_without_active_tokens_is_zero(shape):
    """Nothing active, NaN below: every value is 0 and `tokens` says so."""
    x = torch.full(shape, torch.nan)
    got = mismatch([TokenBatch(x, x, x, x.bool() & False, x.zero_().long(), lanes=len(shape) > 1)])
    for name, value in got.items():
        assert torch.equal(value, torch.zeros(shape[:-1], dtype=value.dtype)), name


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-10, 1e-7, 1e-5, 1e-4, 0.1])
def test_kurtosis_of_tiny_or_equal_gaps_is_finite(size):
    """Float32 log-ratios as small as confident tokens have them: var^2 may not underflow to 0/0."""
    for d in ([size] * 7, [size, -size, size, 2 * size]):
        assert torch.isfinite(mismatch([tokens(d, mu=0.0, dtype=torch.float32)])["d_kurtosis"])


def test_kurtosis_does_not_depend_on_the_scale_of_d():
    """E(d-Ed)^4 / Var^2 is scale-free, in float32 as well."""
    d = torch.tensor([1.0, -1.0, 1.0, 2.0])
    want = float(mismatch([tokens(d, mu=0.0)])["d_kurtosis"])
    for size in (1e-3, 1e-6, 1e-9, 1e-12):
        got = mismatch([tokens(d * size, mu=0.0, dtype=torch.float32)])["d_kurtosis"]
        assert float(got) == pytest.approx(want, rel=1e-3), size


def test_mismatch_carries_no_gradient():
    """Statistics are numbers, not part of the objective."""
    b = ragged()
    b.logp.requires_grad_()
    assert not any(x.requires_grad for x in mismatch([b]).values())


# ---------------------------------------------------------------- screen, advantages, summaries
def test_c011_screen_counts_and_removes_non_finite_tokens():
    """lt = -1, -inf, -2: one token leaves the mask and is counted; two are used, with gap 0."""
    b = tokens([0.0, 0.0, 0.0], mu=[-1.0, -3.0, -2.0])
    b.logp[1] = -torch.inf
    kept, counts = b.screen()
    assert {k: int(v) for k, v in counts.items()} == {"logp": 1, "logp_mu": 0, "advantage": 0}
    assert kept.mask.tolist() == [True, False, True]
    assert mismatch([kept])["tokens"] == 2
    assert mismatch([kept])["d_bar"] == 0


def test_screen_counts_by_field_and_lane():
    """A token bad in two fields counts twice; what is masked already does not count."""
    b = ragged(lanes=(2,))
    b.mask[:, :4] = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]]).bool()
    b.logp[0, 0], b.advantage[0, 0] = torch.nan, torch.inf
    b.logp_prox[0, 2] = torch.nan  # masked
    b.logp_mu[1, 3] = -torch.inf
    kept, counts = b.screen()
    assert {k: v.tolist() for k, v in counts.items() if v.any() or k == "logp_prox"} == {
        "logp": [1, 0],
        "logp_mu": [0, 1],
        "advantage": [1, 0],
        "logp_prox": [0, 0],
    }
    assert (b.mask.sum(-1) - kept.mask.sum(-1)).tolist() == [1, 1]


def test_screen_reads_the_top_tokens_too():
    """NaN and +inf among mu's likeliest tokens count; -inf stands for the sampled token itself."""
    b = tokens([0.0] * 3)
    top = torch.tensor([[-1.0, -torch.inf], [torch.nan, -2.0], [-1.0, torch.inf]])
    kept, counts = replace(b, topk=top, topk_mu=torch.full((3, 2), -1.0)).screen()
    assert kept.mask.tolist() == [True, False, False]
    assert {k: int(counts[k]) for k in ("topk", "topk_mu")} == {"topk": 2, "topk_mu": 0}


def test_group_advantage_by_hand():
    """Rewards 1, 0, 0, 0: mean 0.25, sample deviation 0.5, so 1.5 and -0.5; population 0.4330127."""
    reward = torch.tensor([[1.0, 0, 0, 0], [2.0, 4.0, 4.0, 2.0]]).double()
    got = group_advantage(reward, eps=0.0)
    torch.testing.assert_close(got[0], torch.tensor([1.5, -0.5, -0.5, -0.5]).double())
    torch.testing.assert_close(got[1], torch.tensor([-1.0, 1, 1, -1]).double() * math.sqrt(3 / 4))
    got = group_advantage(reward, eps=0.0, ddof=0)
    torch.testing.assert_close(got[0, 0], torch.tensor(0.75 / 0.4330127018922193).double())
    torch.testing.assert_close(got[1], torch.tensor([-1.0, 1, 1, -1]).double())
    assert float(group_advantage(reward, eps=0.5)[0, 0]) == pytest.approx(0.75)


@pytest.mark.parametrize("ddof", [0, 1])
def test_c040_groups_without_variance_get_zero(ddof):
    """A group of one and a group of equal rewards (0.1 does not average exactly) get 0, no NaN."""
    for reward in (torch.tensor([1.0]), torch.ones(4), torch.full((2, 7), 0.1)):
        assert torch.equal(group_advantage(reward, ddof=ddof), torch.zeros_like(reward))


def test_summarize_uses_the_reducer_of_each_diagnostic():
    """Mean, min and max over active tokens only; a value may be broadcast."""
    b = tokens([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]], mask=[[1, 1, 0], [0, 1, 1]])
    x = torch.tensor([[1.0, 3.0, -100.0], [100.0, 5.0, 7.0]])
    got = reduce_diagnostics(b, {how: Diagnostic(x, how) for how in ("mean", "min", "max")})
    assert {k: v.tolist() for k, v in got.items()} == {"mean": [2, 6], "min": [1, 5], "max": [3, 7]}
    wide = reduce_diagnostics(b, {"q": Diagnostic(torch.tensor([[4.0], [8.0]]), "max")})
    assert wide["q"].tolist() == [4, 8]
