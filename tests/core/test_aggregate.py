"""Aggregations against hand numbers, and sum / count against any cut of the batch."""

import pytest
import torch
from batches import by_response, graded, ragged, tokens

from simlab.core.aggregate import (
    AGGREGATIONS,
    mean,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
)
from simlab.stabilizers import bind


def small():
    """Response 0 has S = 1, 2, 6 (the last masked), response 1 is absent, response 2 has S = 9."""
    b = tokens([0.0] * 4, response=[0, 0, 0, 2], mask=[1, 1, 0, 1])
    return torch.tensor([1.0, 2.0, 6.0, 9.0]), b


def length_one_and_three():
    """C051, C062: lengths 1 and 3, A = +1 and -1, ratio 1."""
    return tokens([0.0] * 4, [1.0, -1.0, -1.0, -1.0], response=[0, 1, 1, 1])


@pytest.mark.parametrize(
    ("how", "extra", "total", "count"),
    [
        ("token_mean", {}, 12, 3),
        ("seq_mean_token_mean", {}, 1.5 + 9, 2),
        ("seq_mean_token_sum", {}, 3 + 9, 2),
        ("seq_mean_token_sum_norm", {"horizon": 8}, 12 / 8, 2),
        ("token_sum", {}, 12, 0),
    ],
)
def test_sums_and_counts_by_hand(how, extra, total, count):
    """Masked tokens and absent responses are in neither sum nor count; counts are integers."""
    got, n = AGGREGATIONS[how](*small(), **extra)
    assert float(got) == pytest.approx(total)
    assert int(n) == count
    assert n.dtype == torch.int64


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_lanes_are_aggregated_apart(how):
    """S [2, 3, N] gives sums and counts [2, 3], each that of its lane."""
    extra = {"horizon": 5} if how == "seq_mean_token_sum_norm" else {}
    b = ragged(1, lanes=(2, 3))
    total, count = AGGREGATIONS[how](b.logp, b, **extra)
    assert total.shape == count.shape == (2, 3)
    lane = {name: getattr(b, name)[1, 2] for name in ("logp", "logp_mu", "advantage", "mask")}
    one = type(b)(**lane, response=b.response[1, 2])
    alone, n = AGGREGATIONS[how](one.logp, one, **extra)
    torch.testing.assert_close(total[1, 2], alone)
    assert count[1, 2] == n


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_nan_under_the_mask_stays_there(how):
    """Neither value nor gradient sees what S holds on masked tokens."""
    extra = {"horizon": 5} if how == "seq_mean_token_sum_norm" else {}
    S, b = small()
    S = torch.where(b.mask, S, torch.nan).requires_grad_()
    loss = mean(*AGGREGATIONS[how](S, b, **extra))
    (grad,) = torch.autograd.grad(loss, S)
    assert torch.isfinite(loss)
    assert grad[2] == 0
    assert (grad[b.mask] > 0).all()


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_sums_and_counts_add_over_micro_batches(how):
    """Any cut into whole responses has the sum and count of the batch."""
    extra = {"horizon": 5} if how == "seq_mean_token_sum_norm" else {}
    b = ragged(2)
    want, n = AGGREGATIONS[how](b.advantage, b, **extra)
    for groups in ([[i] for i in range(7)], [[6, 0], [1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5, 6], []]):
        parts = [AGGREGATIONS[how](m.advantage, m, **extra) for m in by_response(b, groups)]
        torch.testing.assert_close(sum(total for total, _ in parts), want)
        assert sum(count for _, count in parts) == n


def test_token_mean_may_cut_a_response():
    """Only token_mean is indifferent to a response spread over two micro-batches."""
    b = length_one_and_three()
    pieces = [b.take(torch.arange(2)), b.take(torch.arange(2, 4))]
    parts = [token_mean(p.advantage, p) for p in pieces]
    assert float(mean(sum(t for t, _ in parts), sum(c for _, c in parts))) == -0.5
    assert sum(int(seq_mean_token_sum(p.advantage, p)[1]) for p in pieces) == 3


def test_a_token_sum_is_divided_by_nothing():
    """verl's token-sum: 12 whole or in two micro-batches, and its gradient is 1 a token."""
    S, b = small()
    S.requires_grad_()
    whole = mean(*token_sum(S, b))
    parts = [token_sum(S[i], b.take(i)) for i in (torch.tensor([0, 3]), torch.tensor([1, 2]))]
    assert float(whole) == 12
    assert float(mean(sum(t for t, _ in parts), sum(c for _, c in parts))) == 12
    assert torch.autograd.grad(whole, S)[0].tolist() == [1, 1, 0, 1]


def test_mean_of_nothing_is_zero_without_gradient():
    """C036: sum 0, count 0 gives 0, not NaN, and the gradient is 0.

    The case wants words in place of a clip share of 0. A share is a number that must add up over
    micro-batches, so it is 0 here as every mean of nothing; `tokens` = 0 beside it says why."""
    S, b = small()
    S, b = S.requires_grad_(), type(b)(b.logp, b.logp_mu, b.advantage, b.mask & False, b.response)
    loss = mean(*token_mean(S, b))
    (grad,) = torch.autograd.grad(loss, S)
    assert loss == 0
    assert (grad == 0).all()
    assert mean(torch.tensor([6.0, 0.0]), torch.tensor([4, 0])).tolist() == [1.5, 0]


@pytest.mark.parametrize("horizon", [0, -3])
def test_a_horizon_below_one_is_refused(horizon):
    """The constant divisor is a positive number of tokens."""
    with pytest.raises(ValueError, match="horizon"):
        seq_mean_token_sum_norm(*small(), horizon=horizon)


# ---------------------------------------------------------------- field cases
def test_c044_loss_zero_with_a_gradient():
    """Two one-token completions, A = +1, -1: loss 0, its gradient -0.5 and +0.5."""
    b = tokens([0.0, 0.0], [1.0, -1.0])
    for how in (token_mean, seq_mean_token_mean, seq_mean_token_sum):
        out, grad = graded(bind("ppo"), b)
        total, count = how(out.S, b)
        assert float((-mean(total, count)).detach()) == 0
        assert (-grad / count).tolist() == [-0.5, 0.5]


def test_c051_sequence_mean_is_not_weighted_by_length():
    """GSPO at ratio 1 on lengths 1 and 3: sequence mean 0, token mean loss +0.5."""
    b = length_one_and_three()
    S = bind("gspo")(b).S
    assert float(-mean(*seq_mean_token_mean(S, b))) == pytest.approx(0, abs=1e-12)
    assert float(-mean(*token_mean(S, b))) == pytest.approx(0.5)


def test_c054_a_share_is_a_sum_over_a_count():
    """4 tokens with 0 clipped and 1 token with 1 clipped: 0.2, not the mean of means 0.5."""
    first, second = tokens([0.0] * 4), tokens([0.5])
    parts = [
        token_mean(bind("ppo")(b).diagnostics["clip_high"].value.float(), b)
        for b in (first, second)
    ]
    assert float(mean(sum(t for t, _ in parts), sum(c for _, c in parts))) == pytest.approx(0.2)


def test_c060_rejected_tokens_stay_in_the_denominator():
    """Band [0.5, 2]: 0.4910 over all tokens; 1.2275 only if the caller takes them out of the mask."""
    d = [0.1, -1.5, 0.8, -10.0, 0.3]
    b = tokens(d, prox=[x - 1 for x in d])
    out = bind("icepop", low=0.5, high=2.0)(b)
    assert float(mean(*token_mean(out.S, b))) == pytest.approx(0.4910, abs=5e-5)
    kept = type(b)(b.logp, b.logp_mu, b.advantage, out.active, b.response)
    assert float(mean(*token_mean(out.S, kept))) == pytest.approx(1.2275, abs=5e-5)


@pytest.mark.parametrize("groups", [[[0, 1]], [[0], [1]]])
def test_c062_no_loss_changes_with_the_chunk(groups):
    """Token mean loss 0.5 and sequence mean loss 0 for one or two micro-batches."""
    micros = by_response(length_one_and_three(), groups)
    for how, loss in ((token_mean, 0.5), (seq_mean_token_mean, 0.0)):
        parts = [how(bind("ppo")(m).S, m) for m in micros]
        got = -mean(sum(t for t, _ in parts), sum(c for _, c in parts))
        assert float(got) == pytest.approx(loss, abs=1e-12)
