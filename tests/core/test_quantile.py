"""Order statistics by all their routes, and M2PO's moment bound, against a plain sort."""

import numpy as np
import pytest
import torch
from batches import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from simlab.core.arguments import required
from simlab.core.mismatch import mismatch
from simlab.core.quantile import (
    LONG,
    STRIDE,
    _narrowed,
    abs_quantile,
    moment_bound,
    order_statistic,
    rank,
)
from simlab.core.tokens import nothing
from simlab.stabilizers import STABILIZERS, bind

N = LONG + 12_345
few = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def shapes(N):
    rng = np.random.default_rng(0)
    x = rng.standard_t(2, N) * 0.01
    yield "tails", x
    yield "descending", np.sort(np.abs(x))[::-1].copy()
    yield "ascending", np.sort(np.abs(x))
    yield "ties", np.round(x, 2)
    yield "zeros", np.where(rng.random(N) < 0.95, 0.0, x)
    yield "constant", np.full(N, -0.5)
    yield "huge", x * 1e30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "x"), list(shapes(N)), ids=lambda x: x if isinstance(x, str) else ""
)
@pytest.mark.parametrize("masked", [False, True])
def test_every_route_finds_the_same_number(name, x, masked, dtype):
    """Sample and compress (local), radix (with a reducer), in one shard or three: the sorted value."""
    x = torch.from_numpy(x).to(dtype)
    mask = torch.rand(N, generator=torch.Generator().manual_seed(1)) < (0.7 if masked else 1.1)
    truth = np.sort(np.abs(x[mask].numpy()))
    whole = [(x, mask)]
    cut = [(x[a:b], mask[a:b]) for a, b in ((0, 7), (7, 40_000), (40_000, N))]
    for alpha in (1e-5, 0.5, 0.9, 0.999, 1.0):
        want = truth[rank(alpha, len(truth)) - 1]
        for shards in (whole, cut):
            assert abs_quantile(shards, alpha).item() == want
            assert abs_quantile(shards, alpha, lambda counts: counts).item() == want


@pytest.mark.parametrize("n", [LONG - 1, LONG, N])
def test_nothing_active_is_zero_at_any_length(n):
    """By every route and for every method: a long batch under the mask is as empty as a short one."""
    shard = torch.full((n,), torch.nan), torch.zeros(n, dtype=torch.bool)
    assert abs_quantile([shard], 0.9).item() == 0
    assert abs_quantile([shard], 0.9, lambda counts: counts).item() == 0
    b = nothing(n)
    mismatch([b])
    for name, module in STABILIZERS.items():
        out = bind(name, **dict.fromkeys(required(module.surrogate), 0.5))(b)
        assert not out.active.any()


def test_a_sample_that_misleads_costs_no_exactness():
    """Large values exactly where the sample looks: the shortcut gives up, the answer is right."""
    x = torch.full((N,), 0.01) + torch.arange(N) * 1e-9
    x[::STRIDE] = 5.0
    assert _narrowed([(x.numpy(), np.ones(N, bool))], N // 2, N) is None
    want = np.sort(x.numpy())[rank(0.5, N) - 1]
    assert abs_quantile([(x, torch.ones(N).bool())], 0.5).item() == want


@few
@given(st.lists(st.floats(-9, 9, width=32), min_size=0, max_size=40), st.integers(0, 45), st.data())
def test_order_statistics_of_short_lanes(values, k, data):
    """Sort (local) and radix (with a reducer) agree with a plain sort; k = 0 gives 0."""
    keep = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    x, mask = torch.tensor(values), torch.tensor(keep, dtype=torch.bool)
    truth = np.sort(np.abs(x[mask].numpy()))
    k = min(k, len(truth))
    want = truth[k - 1] if k else 0
    for reduce in (None, lambda counts: counts):
        two = [(torch.stack([x, 2 * x]), torch.stack([mask, mask]))]
        assert order_statistic([(x, mask)], torch.tensor(k), reduce).item() == want
        assert order_statistic(two, torch.tensor([k, k]), reduce).tolist() == [want, 2 * want]


def brute_bound(x, budget):
    """M2PO's tau by trying every entry."""
    size = np.abs(np.float64(x))
    if not len(size) or np.mean(size**2) <= budget:
        return np.inf
    good = [s for s in size if np.mean(np.minimum(size**2, s**2)) <= budget]
    return max(good, default=0.0)


@few
@given(st.lists(st.floats(-3, 3, width=32), min_size=0, max_size=30), st.floats(0.001, 2))
def test_moment_bound(values, budget):
    """The largest entry that keeps the budget, on one lane, on two, and over two ranks."""
    x = torch.tensor(values, dtype=torch.float64)
    mask = torch.ones(len(values), dtype=torch.bool)
    want = brute_bound(values, budget)
    assert moment_bound([(x, mask)], budget).item() == want
    twice = moment_bound([(torch.stack([x, x]), torch.stack([mask, ~mask]))], budget)
    assert twice.tolist() == [want, np.inf]
    half = len(values) // 2
    parts = [(x[:half], mask[:half]), (x[half:], mask[half:])]
    split = on_ranks(2, lambda i, reduce: moment_bound([parts[i]], budget, reduce).item())
    assert split == pytest.approx([want, want])


@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moment_bound_by_sorting_is_that_by_bisection(dtype, remove):
    """With ties, lanes, masks, shards and an infinite entry; over ranks there is nothing to sort."""
    rng, seen = torch.Generator().manual_seed(5), set()
    for budget in (1e-4, 0.05, 0.3, 1.0, 30.0):
        for n in (0, 1, 7, 40):
            x = torch.randint(-9, 10, (6, n), generator=rng).to(dtype) / 8
            x[5, n // 2 :] = torch.inf
            mask = torch.rand(6, n, generator=rng) < 0.8
            shards = [(x[:, : n // 3], mask[:, : n // 3]), (x[:, n // 3 :], mask[:, n // 3 :])]
            got = moment_bound(shards, budget, remove=remove)
            assert torch.equal(got, moment_bound(shards, budget, lambda t: t, remove))
            seen |= set(got.tolist())
    assert {0.0, np.inf} < seen
    assert len(seen) > 8


def test_moment_bound_in_float32():
    """float32 entries give an entry of the batch, at most one step from the float64 answer."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    tau = moment_bound([(x, torch.ones(5000).bool())], 0.5)
    assert tau in x.abs()
    assert tau.item() == pytest.approx(brute_bound(x.numpy(), 0.5))
