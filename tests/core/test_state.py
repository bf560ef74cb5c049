"""Moving averages against closed forms, resets, learning-rate factors against optimizers."""

import pytest
import torch
from batches import tokens

from simlab.contract.batches import on_ranks
from simlab.core.state import (
    Ewma,
    active_share,
    beta_for,
    cosine,
    ema,
    ewma_reset_where,
    ewma_start,
    ewma_step,
    scale_update,
)
from simlab.core.tokens import TokenBatch
from simlab.stabilizers import ppo


def path(steps, lanes=3, dtype=torch.float64):
    """Weights {"w": [L, 2, 3], "b": [L]} at each of several steps."""
    rng = torch.Generator().manual_seed(steps)
    return [
        {
            "w": torch.randn(lanes, 2, 3, generator=rng, dtype=dtype),
            "b": torch.randn(lanes, generator=rng, dtype=dtype),
        }
        for _ in range(steps)
    ]


def follow(thetas, beta):
    state = ewma_start(thetas[0])
    for theta in thetas[1:]:
        state = ewma_step(state, theta, beta)
    return state


def test_cosine_of_gradients():
    """(3, 4) and (4, -3) are orthogonal, (3, 4) and (6, 8) parallel, over two weights; nothing is no number."""
    a = {"w": torch.tensor([[3.0], [3.0], [3.0], [0.0]]), "b": torch.tensor([4.0, 4.0, 4.0, 0.0])}
    b = {
        "w": torch.tensor([[4.0], [6.0], [-3.0], [1.0]]),
        "b": torch.tensor([-3.0, 8.0, -4.0, 1.0]),
    }
    assert cosine(a, b).tolist()[:3] == [0.0, 1.0, -1.0]
    assert cosine(a, b).isnan().tolist() == [False, False, False, True]
    assert cosine(a, None).isnan().all()
    # a rank holds w, another b
    held = [({name: a[name]}, {name: b[name]}) for name in ("w", "b")]
    for got in on_ranks(2, lambda rank, reduce: cosine(*held[rank], reduce)):
        torch.testing.assert_close(got, cosine(a, b), equal_nan=True)


# ---------------------------------------------------------------- the proximal policy
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.889, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_ewma_is_its_closed_form(steps, beta):
    """sum beta^(t-k) theta_k / sum beta^(t-k) at every t, so no bias towards the start."""
    thetas = path(steps)
    state = follow(thetas, beta)
    powers = torch.tensor([float(beta) ** (steps - 1 - k) for k in range(steps)]).double()
    for name in ("w", "b"):
        stack = torch.stack([theta[name] for theta in thetas], -1)
        torch.testing.assert_close(state.weights[name], (stack * powers).sum(-1) / powers.sum())
    torch.testing.assert_close(state.total, powers.sum().expand(3))


def test_ewma_of_constant_weights_is_the_weights():
    """Correction of the bias: from the first step on, nothing is pulled towards 0."""
    thetas = path(1) * 9
    torch.testing.assert_close(follow(thetas, 0.9).weights["w"], thetas[0]["w"])


@pytest.mark.parametrize("beta", [0.5, 8 / 9])
def test_centre_of_mass(beta):
    """Weights that move one unit a step are followed beta / (1 - beta) steps behind."""
    thetas = [{"w": torch.full((1, 1), float(t), dtype=torch.float64)} for t in range(400)]
    age = 399 - float(follow(thetas, beta).weights["w"])
    assert age == pytest.approx(beta / (1 - beta))


@pytest.mark.parametrize("window", [0, 1, 4, 16, 2.5])
def test_beta_for_a_window_lies_in_its_middle(window):
    """W / (W + 2) has its centre of mass at W / 2."""
    beta = beta_for(window)
    assert beta / (1 - beta) == pytest.approx(window / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decay_zero_is_a_reset(dtype):
    """beta = 0 and a reset of every lane both give theta bit for bit, W = 1, even out of NaN."""
    thetas = path(6, dtype=dtype)
    state = follow(thetas[:-1], 0.9)
    state.weights["w"][0] = torch.nan
    fresh = ewma_start(thetas[-1])
    for other in (
        ewma_step(state, thetas[-1], 0.0),
        ewma_reset_where(state, thetas[-1], torch.ones(3).bool()),
    ):
        assert all(torch.equal(other.weights[n], fresh.weights[n]) for n in ("w", "b"))
        assert torch.equal(other.total, fresh.total)


def test_a_reset_touches_its_lane_only():
    """Lane 1 starts anew, weights and W; lanes 0 and 2 keep both, and go on as if nothing was."""
    thetas = path(6)
    state = follow(thetas[:4], 0.8)
    reset = torch.tensor([False, True, False])
    after = ewma_reset_where(state, thetas[4], reset)
    assert torch.equal(after.weights["w"][1], thetas[4]["w"][1])
    assert after.total[1] == 1
    later = ewma_step(after, thetas[5], 0.8)
    for expected, lanes in ((ewma_step(state, thetas[5], 0.8), [0, 2]), (None, [1])):
        expected = expected or follow(thetas[4:], 0.8)
        for name in ("w", "b"):
            assert torch.equal(later.weights[name][lanes], expected.weights[name][lanes])
        assert torch.equal(later.total[lanes], expected.total[lanes])


def test_a_lane_alone_is_the_lane_among_three():
    """No average reads a neighbour."""
    thetas = path(5)
    alone = follow([{n: x[1:2] for n, x in theta.items()} for theta in thetas], 0.7)
    together = follow(thetas, 0.7)
    for name in ("w", "b"):
        assert torch.equal(alone.weights[name][0], together.weights[name][1])


def test_the_average_is_no_view_and_has_no_gradient():
    """An optimizer that writes theta in place moves no average, old or new; no graph is kept."""
    (theta,) = path(1)
    theta = {n: x.requires_grad_() for n, x in theta.items()}
    states = [ewma_start(theta)]
    states.append(ewma_step(states[0], theta, 0.0))
    states.append(ewma_reset_where(states[0], theta, torch.ones(3).bool()))
    before = theta["w"].detach().clone()
    with torch.no_grad():
        theta["w"].add_(1)
    for state in states:
        assert isinstance(state, Ewma)
        assert torch.equal(state.weights["w"], before)
        assert not state.weights["w"].requires_grad


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan")])
def test_an_impossible_decay_is_refused(beta):
    """beta lies in [0, 1], decay in [0, 1), a window is not negative."""
    (theta,) = path(1)
    with pytest.raises(ValueError, match="beta"):
        ewma_step(ewma_start(theta), theta, beta)
    with pytest.raises(ValueError, match="decay"):
        ema(None, torch.ones(2), beta)
    with pytest.raises(ValueError, match="window"):
        beta_for(-abs(beta))


# ---------------------------------------------------------------- when to reset
def test_active_share_by_hand():
    """Ten tokens of which PPO clips one: 0.9, not below tau; a second one cut is below."""
    one, two = [0.5] + [0.0] * 9, [0.5, 0.5] + [0.0] * 8
    for d, share in ((one, 0.9), (two, 0.8)):
        b = tokens(d, dtype=torch.float32)
        got = active_share(b, ppo.surrogate(b).active)
        assert float(got) == pytest.approx(share)
        assert bool(got < 0.9) == (share < 0.9)


def test_active_share_counts_what_was_cut():
    """A token without advantage is not cut, a masked token is no token, and an empty lane has 1."""
    A = torch.tensor([[0.0, 1.0, 1.0, 1.0, torch.nan]] * 2)
    mask = torch.tensor([[True, True, True, True, False], [False] * 5])
    b = TokenBatch(A, A, A, mask, torch.zeros(2, 5).long(), lanes=True)
    active = torch.tensor([[False, True, False, True, True]] * 2)
    assert active_share(b, active).tolist() == [0.75, 1.0]
    assert active_share(b.take(torch.arange(0)), active[:, :0]).tolist() == [1.0, 1.0]


# ---------------------------------------------------------------- a smoothed number
def test_ema_by_hand():
    """First the value itself, then decay old + (1 - decay) new, lane by lane, without gradient."""
    first = ema(None, torch.tensor([1.0, 4.0], requires_grad=True), 0.75)
    assert first.tolist() == [1.0, 4.0]
    second = ema(first, torch.tensor([5.0, 0.0], requires_grad=True), 0.75)
    assert second.tolist() == [2.0, 3.0]
    assert not first.requires_grad
    assert not second.requires_grad


def test_ema_without_memory_is_the_value():
    """decay = 0 forgets, to the last bit."""
    value = torch.tensor([0.1, 1e-30])
    assert torch.equal(ema(torch.tensor([1e10, 3.0]), value, 0.0), value)


# ---------------------------------------------------------------- a late learning rate
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.98), "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.98), "weight_decay": 0.1}),
}


def trained(optimizer, theta, steps, scaled=None, lr=0.1, last_lr=None):
    """theta after warm-up steps at lr and a last one, scaled lane by lane or at its own lr."""
    make, extra = OPTIMIZERS[optimizer]
    theta = {n: x.clone().requires_grad_() for n, x in theta.items()}
    opt = make(list(theta.values()), lr=lr, **extra)
    for step in range(steps):
        before = {n: x.detach().clone() for n, x in theta.items()}
        if step == steps - 1 and last_lr is not None:
            opt.param_groups[0]["lr"] = last_lr
        opt.zero_grad()
        sum((x.sin() + 0.3 * step * x).sum() for x in theta.values()).backward()
        opt.step()
    if scaled is not None:
        scale_update(before, theta, scaled)
    return {n: x.detach() for n, x in theta.items()}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_scaled_update_is_a_scaled_learning_rate(optimizer, steps):
    """Each lane as if its optimizer had taken the last step at lr times the lane's own factor."""
    (theta,) = path(1)
    factor = torch.tensor([1.0, 0.25, 0.6], dtype=torch.float64)
    got = trained(optimizer, theta, steps, factor)
    for lane, f in enumerate(factor.tolist()):
        want = trained(optimizer, theta, steps, last_lr=0.1 * f)
        for name in theta:
            torch.testing.assert_close(got[name][lane], want[name][lane], rtol=0, atol=1e-14)
    plain = trained(optimizer, theta, steps)
    assert not torch.allclose(got["w"][1], plain["w"][1], atol=1e-3)


def test_factor_one_changes_no_bit_and_factor_zero_undoes():
    """Also out of a step that left NaN; the tensors are written in place and stay leaves."""
    before, after = path(2, dtype=torch.float32)
    after = {n: x.requires_grad_() for n, x in after.items()}
    kept = {n: x.detach().clone() for n, x in after.items()}
    address = after["w"].data_ptr()
    with torch.no_grad():
        after["w"][1] = torch.nan
    scale_update(before, after, torch.tensor([1.0, 0.0, 1.0]))
    assert torch.equal(after["w"][[0, 2]], kept["w"][[0, 2]])
    assert torch.equal(after["w"][1], before["w"][1])
    assert after["b"].tolist() == [float(kept["b"][0]), float(before["b"][1]), float(kept["b"][2])]
    assert after["w"].data_ptr() == address
    assert after["w"].is_leaf
    assert after["w"].requires_grad
