"""Advantages by hand, by definition and by exact expectation; presets against their registries."""

from itertools import product

import pytest
import torch

from simlab.advantages import ADVANTAGES, PRESETS, dr_grpo, grpo, rloo, spo_pp
from simlab.aggregate import AGGREGATIONS
from simlab.batch_stats import group_advantage


def rows(*groups):
    return torch.tensor(groups, dtype=torch.float64)


def drawn(seed=0, shape=(2, 5, 4)):
    """Rewards from {0, .3, 1} with a flat first group a lane, and lengths 0 to 6."""
    rng = torch.Generator().manual_seed(seed)
    levels = torch.tensor([0, 0.3, 1], dtype=torch.float64)
    reward = levels[torch.randint(3, shape, generator=rng)]
    reward[..., 0, :] = 0.3
    return reward, torch.randint(7, shape, generator=rng)


def token_moments(A, length):
    """Mean and variance [...] of A [..., P, G] over tokens, by writing every token out."""
    lanes = zip(A.flatten(0, -3), length.flatten(0, -3), strict=True)
    tokens = [torch.repeat_interleave(a.flatten(), n.flatten()) for a, n in lanes]
    return [(float(x.mean()), float(x.var(correction=0))) for x in tokens]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_one_right_answer_of_four(name, want):
    """Rewards 1, 0, 0, 0: mean 1/4, std 1/2 (G - 1), mean of the others 0 or 1/3."""
    reward = rows([1, 0, 0, 0])
    got = ADVANTAGES[name](reward, torch.ones_like(reward).long())
    torch.testing.assert_close(got, rows(want), atol=5e-6, rtol=0)


def test_spo_pp_by_hand():
    """A = +-1/2, lengths 1 and 3: m = -1/4, v = 3/16, so sqrt(3) and -1/sqrt(3)."""
    got = spo_pp(rows([1, 0]), torch.tensor([[1, 3]]), eps=0.0)
    torch.testing.assert_close(got, rows([3**0.5, -(3**-0.5)]))
    shrunk = spo_pp(rows([1, 0]), torch.tensor([[1, 3]]), eps=1 / 16)
    torch.testing.assert_close(shrunk, rows([1.5, -0.5]))


def test_grpo_is_group_advantage():
    """The registry's grpo is the function the trainer has used so far, to the last bit."""
    reward, length = drawn()
    assert torch.equal(grpo(reward, length), group_advantage(reward))


def test_rloo_leaves_one_out():
    """Each answer against the mean of the others, written as a loop."""
    reward, length = drawn(1)
    got = rloo(reward, length)
    for i in range(4):
        others = reward[..., [j for j in range(4) if j != i]].mean(-1)
        torch.testing.assert_close(got[..., i], reward[..., i] - others)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_flat_group_and_a_group_of_one_teach_nothing(name):
    """Exactly 0 for rewards whose mean rounds (three times .1), and for G = 1."""
    for reward in (rows([0.1] * 3, [0.1] * 3), rows([0.7], [0.2])):
        got = ADVANTAGES[name](reward, torch.full(reward.shape, 3))
        assert torch.equal(got, torch.zeros_like(reward))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 4)])
def test_an_empty_batch_is_ordinary(name, shape):
    """No prompt or no answer: an empty result of the same shape."""
    got = ADVANTAGES[name](torch.zeros(shape), torch.zeros(shape).long())
    assert got.shape == shape


@pytest.mark.parametrize("name", ADVANTAGES)
def test_lanes_do_not_mix(name):
    """Lane 1 is the same alone and beside another, with finite numbers everywhere."""
    reward, length = drawn(2)
    got = ADVANTAGES[name](reward, length)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[1], ADVANTAGES[name](reward[1], length[1]))
    assert not torch.equal(got[0], got[1])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_only_spo_pp_reads_lengths(name):
    """Other lengths, same advantages; spo_pp is the counterexample."""
    reward, length = drawn(3)
    other = length.flip(-1)
    assert torch.equal(ADVANTAGES[name](reward, length), ADVANTAGES[name](reward, other))
    assert not torch.allclose(spo_pp(reward, length), spo_pp(reward, other))


def test_spo_pp_is_standard_under_the_token_measure():
    """Over tokens written out one by one: mean 0 and variance v / (v + eps) in every lane."""
    reward, length = drawn(4)
    before = token_moments(dr_grpo(reward, length), length)
    after = token_moments(spo_pp(reward, length, eps=0.01), length)
    for (m, v), (mean, variance) in zip(before, after, strict=True):
        assert abs(m) > 1e-3
        assert mean == pytest.approx(0, abs=1e-12)
        assert variance == pytest.approx(v / (v + 0.01))


def test_spo_pp_moves_flat_groups_together():
    """A flat group is 0 before the normalisation and -m / sqrt(v + eps) after it."""
    reward, length = drawn(5)
    length = length.clamp(min=1)
    moments = token_moments(dr_grpo(reward, length), length)
    for lane, (m, v) in enumerate(moments):
        want = torch.full((4,), -m / (v + 1e-6) ** 0.5, dtype=torch.float64)
        torch.testing.assert_close(spo_pp(reward, length)[lane, 0], want)
        assert abs(float(want[0])) > 0.01


@pytest.mark.parametrize("length", [[[5, 0], [0, 0]], [[0, 0], [0, 0]]])
def test_spo_pp_without_variance_is_zero(length):
    """One answer holds every token, or none does: v = 0 and nothing is blown up by sqrt(eps)."""
    got = spo_pp(rows([1, 0], [0, 1]), torch.tensor(length))
    assert torch.equal(got, torch.zeros_like(got))


def test_expected_gradients_of_the_baselines():
    """Exact over all groups of three answers of a Bernoulli(.3) policy: RLOO gives dJ/dz =
    p (1 - p), dr_grpo 2/3 of it, grpo neither."""
    p, G = 0.3, 3
    expected = dict.fromkeys(("rloo", "dr_grpo", "grpo"), 0.0)
    for answers in product([0.0, 1.0], repeat=G):
        chance = p ** sum(answers) * (1 - p) ** (G - sum(answers))
        reward = rows(answers)
        score = (reward - p) / G
        for name in expected:
            A = ADVANTAGES[name](reward, torch.ones_like(reward).long())
            expected[name] += chance * float((A * score).sum())
    assert expected["rloo"] == pytest.approx(p * (1 - p))
    assert expected["dr_grpo"] == pytest.approx(p * (1 - p) * (G - 1) / G)
    assert abs(expected["grpo"] / (p * (1 - p)) - 1) > 0.1


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_what_exists(name):
    """A preset is an advantage and an aggregation of the registries, nothing else."""
    preset = PRESETS[name]
    assert preset.keys() == {"advantage", "aggregation"}
    assert preset["advantage"] in ADVANTAGES
    assert preset["aggregation"] in AGGREGATIONS


def test_no_two_recipes_divide_alike():
    """Of the five presets only dapo and sat agree here; they differ in clip radii and sampling."""
    pairs = {name: tuple(sorted(p.items())) for name, p in PRESETS.items()}
    assert pairs["dapo"] == pairs["sat"]
    assert len(set(pairs.values())) == 4
