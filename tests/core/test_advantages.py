"""Advantages by hand, by definition and by exact expectation; presets against their registries."""

from itertools import product

import pytest
import torch

from simlab.core.advantages import (
    ADVANTAGES,
    PRESETS,
    batch_sd,
    dr_grpo,
    gdpo,
    group_advantage,
    grpo,
    rloo,
    spo_pp,
)
from simlab.core.aggregate import AGGREGATIONS


def rows(*groups):
    return torch.tensor(groups, dtype=torch.float64)


def drawn(seed=0, shape=(2, 5, 4)):
    """Rewards from {0, 0.3, 1} with a flat first group a lane, and lengths 0 to 6."""
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
    assert torch.equal(grpo(reward, length + 1), group_advantage(reward))


def test_rloo_leaves_one_out():
    """Each answer against the mean of the others, written as a loop."""
    reward, length = drawn(1)
    got = rloo(reward, length + 1)
    for i in range(4):
        others = reward[..., [j for j in range(4) if j != i]].mean(-1)
        torch.testing.assert_close(got[..., i], reward[..., i] - others)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_flat_group_and_a_group_of_one_teach_nothing(name):
    """Exactly 0 for rewards whose mean rounds (three times 0.1), and for G = 1."""
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


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"spo_pp"}))
def test_only_spo_pp_reads_lengths(name):
    """Other lengths, same advantages, as long as no answer is empty; spo_pp is the counterexample."""
    reward, length = drawn(3)
    length = 1 + length
    other = length.flip(-1)
    assert torch.equal(ADVANTAGES[name](reward, length), ADVANTAGES[name](reward, other))
    assert not torch.allclose(spo_pp(reward, length), spo_pp(reward, other))


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("grpo", [3**-0.5, -2 * 3**-0.5, 0, 3**-0.5]),
        ("rloo", [0.5, -1, 0, 0.5]),
        ("dr_grpo", [1 / 3, -2 / 3, 0, 1 / 3]),
        ("batch_sd", [3**-0.5, -2 * 3**-0.5, 0, 3**-0.5]),
        ("gdpo", [3**-0.5, -2 * 3**-0.5, 0, 3**-0.5]),
        ("spo_pp", [0.5**0.5, -(2**0.5), 0, 0.5**0.5]),
    ],
)
@pytest.mark.parametrize("missing", ["reward", "answer"])
def test_d058_a_missing_member_is_left_out(name, want, missing):
    """Rewards 1, 0, missing, 1: the statistics of the other three, and 0 for it, whatever is missing."""
    reward, length = rows([1, 0, torch.nan, 1]), torch.ones(1, 4).long()
    if missing == "answer":
        reward, length = rows([1, 0, 5, 1]), torch.tensor([[1, 1, 0, 1]])
    got = ADVANTAGES[name](reward, length)
    torch.testing.assert_close(got, rows(want), atol=5e-6, rtol=0)
    assert not torch.allclose(ADVANTAGES[name](reward.nan_to_num(5), length + 1), got, atol=0.1)
    if missing == "answer":
        asked = ADVANTAGES[name](reward, length, empty=True)
        assert not torch.allclose(asked[0, :2], got[0, :2], atol=0.1) or name == "spo_pp"


@pytest.mark.parametrize("name", ADVANTAGES)
def test_too_small_a_group_gets_zero(name):
    """One answer left, none left, or fewer than asked for; the other group does not notice."""
    whole, length = [1.0, 0, 0, 1], torch.ones(2, 4).long()
    nan = torch.nan
    for rest in ([1.0, nan, nan, nan], [nan] * 4):
        got = ADVANTAGES[name](rows(rest, whole), length)
        assert torch.equal(got[0], torch.zeros(4, dtype=torch.float64))
        assert got[1].abs().min() > 0
    three = rows([1, 0, nan, 1], whole)
    assert ADVANTAGES[name](three, length)[0].abs().sum() > 1
    assert torch.equal(ADVANTAGES[name](three, length, least=4)[0], torch.zeros(4).double())
    with pytest.raises(ValueError, match="least must be at least 1"):
        ADVANTAGES[name](three, length, least=0)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_whole_numbers_are_rewards(name):
    """Rewards as integers or bool give what they give as float64; half precision is widened."""
    reward, length = torch.tensor([[1, 0, 0, 1], [3, 0, 0, 0]]), torch.ones(2, 4).long()
    want = ADVANTAGES[name](reward.double(), length)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert torch.equal(ADVANTAGES[name](reward.to(dtype), length), want)
    assert ADVANTAGES[name](reward > 0, length).dtype == torch.float64
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        got = ADVANTAGES[name](reward.to(dtype), length)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_infinite_reward_is_refused(name):
    """In one sentence; NaN is the missing one."""
    with pytest.raises(ValueError, match="a reward is infinite"):
        ADVANTAGES[name](rows([1, torch.inf]), torch.ones(1, 2).long())


def test_d060_group_mean_and_batch_spread():
    """Rewards [1, 0] and [10, 0]: their standard deviation is 4.8563."""
    reward, length = rows([1, 0], [10, 0]), torch.ones(2, 2).long()
    got = batch_sd(reward, length)
    torch.testing.assert_close(
        got, rows([0.10296, -0.10296], [1.02960, -1.02960]), atol=1e-5, rtol=0
    )
    both = grpo(reward, length)
    torch.testing.assert_close(both.abs(), torch.full_like(both, 0.5**0.5), atol=1e-5, rtol=0)


def test_d061_several_rewards():
    """Two answers with rewards 0, 0 and 1, 1: each +-0.70711, their sum +-1.41421, over 2: +-0.70711."""
    got = gdpo(torch.tensor([[[0, 0], [1, 1]]]), torch.ones(1, 2).long())
    torch.testing.assert_close(got, rows([-(0.5**0.5), 0.5**0.5]), atol=5e-6, rtol=0)
    opposed = gdpo(torch.tensor([[[0, 1], [1, 0]]]), torch.ones(1, 2).long())
    assert torch.equal(opposed, torch.zeros_like(opposed))
    scales = torch.tensor([[[0, 0.0], [1, 0], [0, 100], [1, 100]]], dtype=torch.float64)
    want = rows([-1, 0, 0, 1]) * 1.5**0.5
    torch.testing.assert_close(gdpo(scales, torch.ones(1, 4).long()), want, atol=5e-6, rtol=0)
    nan = torch.tensor([[[0, 0.0], [1, torch.nan], [1, 1]]], dtype=torch.float64)
    torch.testing.assert_close(
        gdpo(nan, torch.ones(1, 3).long())[0, ::2], got[0], atol=1e-5, rtol=0
    )


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
    """Exact over all groups of three answers of a Bernoulli(0.3) policy: RLOO gives dJ/dz =
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
