"""Field cases that cross several methods at once (single ones: golden/).

C038, discounted returns that end at a tool's tokens, has no code here: no advantage looks along a response.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import graded, tokens

from simlab.core.advantages import dr_grpo
from simlab.core.aggregate import reduce_diagnostics
from simlab.core.mismatch import mismatch
from simlab.core.tokens import TokenBatch
from simlab.stabilizers import bind

LOG = math.log


def from_probabilities(pi, mu, A=1.0, prox=None):
    """One-token responses with the given probabilities; pi_old = pi unless given."""
    pi, mu = torch.tensor(pi).double(), torch.tensor(mu).double()
    old = pi if prox is None else torch.tensor(prox).double()
    return TokenBatch(
        logp=pi.log(),
        logp_mu=mu.log(),
        advantage=torch.tensor(A).double().expand(pi.shape),
        mask=torch.ones(pi.shape).bool(),
        response=torch.arange(len(pi)),
        logp_prox=old.log(),
    )


def share(name, b, what, **arguments):
    """A share that method `name` reports on b."""
    return float(reduce_diagnostics(b, bind(name, **arguments)(b).diagnostics)[what])


def test_c003_outside_a_band_is_not_clipped():
    """D = 0, 0.05, -0.06, 0.12, -0.11: 2 of 5 outside [0.9, 1.1], none clipped by PPO or GSPO."""
    d = [0, 0.05, -0.06, 0.12, -0.11]
    b = tokens(d, response=[0] * 5)
    outside = (b.logp - b.logp_mu).abs() > 0.1  # ln 1.1 = 0.0953, -ln 0.9 = 0.1054
    assert outside.tolist() == [False, False, False, True, True]
    assert share("icepop", tokens(d, prox=np.add(d, -1)), "out_of_band", low=0.9, high=1.1) == (
        pytest.approx(0.4)
    )
    assert share("ppo", b, "clip_high") == share("gspo", b, "clip_high") == 0
    torch.testing.assert_close(bind("gspo")(b).S, torch.ones(5).double())


def test_c009_nucleus_renormalisation_scales_every_ratio():
    """Kept mass 0.8: all D = ln 0.8; once both sides are renormalised every ratio is 1."""
    raw = from_probabilities([0.5, 0.3, 0.5], [0.625, 0.375, 0.625])
    got = mismatch([raw])
    assert float(got["d_mean"]) == pytest.approx(-0.22314, abs=5e-6)
    assert float(got["d_max"]) == pytest.approx(-float(got["d_mean"]))
    torch.testing.assert_close(bind("pg")(raw).S, torch.full((3,), 0.8).double())
    same = from_probabilities([0.625, 0.375, 0.625], [0.625, 0.375, 0.625])
    assert bind("ppo")(same).S.tolist() == [1, 1, 1]


def test_c015_untempered_rollout_log_probs():
    """T = 0.5 on one side only: ratios 1.20482 and 0.44323, both clipped with A = +1, -1."""
    b = from_probabilities([0.880797, 0.119203], [0.731059, 0.268941], [1.0, -1.0])
    assert (b.logp - b.logp_mu).tolist() == pytest.approx([0.18633, -0.81366], abs=1e-5)
    out, grad = graded(bind("ppo"), b)
    assert out.S.tolist() == pytest.approx([1.2, -0.8])
    assert grad.tolist() == [0, 0]


def test_c020_a_threshold_is_not_crossed_by_rounding():
    """r = 1.1995 is below 1.2, though bf16 would round it to 1.203125."""
    for dtype in (torch.float32, torch.float64):
        b = tokens([LOG(1.1995)], mu=0.0, dtype=dtype)
        assert bind("ppo")(b).active.all()
    assert torch.tensor(1.1995).bfloat16() == 1.203125
    b = tokens([LOG(1.1995)], mu=-LOG(1.1995), dtype=torch.bfloat16)
    assert bind("ppo")(b).S.item() == pytest.approx(math.exp(-float(b.logp_mu)), rel=1e-6)


def test_c024_a_shift_by_one_shows_in_the_mean_gap():
    """lr = 0, -1, -2, -3 against lt shifted by one: mean |D| 5/3; aligned it is 0."""
    lr, lt = torch.tensor([0.0, -1, -2, -3]), torch.tensor([-1.0, -2, -3, 0])
    mask = torch.tensor([0, 1, 1, 1]).bool()
    naive = TokenBatch(lt, lr, torch.ones(4), mask, torch.zeros(4).long())
    shifted = TokenBatch(lt.roll(1), lr, torch.ones(4), mask, torch.zeros(4).long())
    assert float(mismatch([naive])["d_bar"]) == pytest.approx(5 / 3)
    assert float(mismatch([shifted])["d_bar"]) == 0


def test_c030_a_contaminated_pack_shows_in_the_tis_cap():
    """D = 0, 0, 0.9, 1.1, 1, 0.8: four of six weights exceed the cap of 2."""
    d = [0, 0, 0.9, 1.1, 1.0, 0.8]
    assert share("tis", tokens(d, prox=np.add(d, -1)), "capped") == pytest.approx(4 / 6)


def test_c034_an_unsampled_eos_is_a_third_of_the_tokens():
    """lt = -6 against a dummy 0: IcePop masks it; outside the mask the gap is 0."""
    lt, lr = [-0.3, -0.4, -6.0], [-0.3, -0.4, 0.0]
    d = np.subtract(lt, lr)
    b = tokens(d, mu=lr, prox=lt)
    assert float(mismatch([b])["d_max"]) == 6
    assert share("icepop", b, "out_of_band") == pytest.approx(1 / 3)
    assert not bind("icepop")(b).active[2]
    assert float(mismatch([tokens(d, mu=lr, mask=[1, 1, 0])])["d_bar"]) == 0


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_c045_every_method_answers_log_ratios_of_700(A):
    """Masks are decided on the log-ratio: bands drop +-700 and 21, weights stay finite."""
    d = [700.0, -700.0, 21.0, 0.1]
    mu = [-700.5, -0.5, -21.5, -0.5]
    b = tokens(d, A, mu=mu, prox=np.add(d, mu), dtype=torch.float32)
    for name in ("icepop", "kpop"):
        assert bind(name)(b).active.tolist() == [False, False, False, True]
    assert share("pg", b, "overflow") == pytest.approx(1 / 4)
    assert share("tis", b, "capped") == pytest.approx(2 / 4)
    for name in ("dppo", "gspo", "icepop", "kpop", "none", "pg", "ppo", "sat", "tis"):
        assert torch.isfinite(bind(name)(b).S).all()


@pytest.mark.parametrize("n", [1000, 9000])
def test_c049_a_sequence_ratio_is_a_mean_not_a_sum(n):
    """D = -0.001 on n tokens: rho = 0.9990 for any length; clipped for A < 0 only."""
    for A, keeps in ((1.0, True), (-1.0, False)):
        b = tokens(torch.full((n,), -0.001), A, response=[0] * n)
        out = bind("gspo")(b)
        assert out.active.all() == keeps
        assert out.active.any() == keeps
        assert float(out.S[0]) == pytest.approx(0.9990005 if keeps else -0.9997, rel=1e-7)


def test_c053_binding_clips_and_out_of_band_are_two_numbers():
    """Five sequence ratios at 3e-4 / 4e-4: the clip binds on two, three lie out of the band."""
    rho = [1.0005, 0.9998, 1.0001, 0.9991, 1.0006]
    b = tokens(np.log(rho), [1.0, 1.0, -1.0, -1.0, -1.0], prox=np.log(rho) - 1)
    assert share("gspo", b, "clip_high") + share("gspo", b, "clip_low") == pytest.approx(0.4)
    band = {"low": 0.9997, "high": 1.0004}
    assert share("icepop", b, "out_of_band", **band) == pytest.approx(0.6)


def test_c072_the_engine_ratio_is_applied_once():
    """pi_old = pi, pi/mu = 1.1: weight 1.1, not 1.21. At 1.5 against mu PPO gives 1.2, not 1.8."""
    near, far = from_probabilities([0.22], [0.2]), from_probabilities([0.3], [0.2])
    for name in ("tis", "icepop"):
        out, grad = graded(bind(name), near)
        assert out.S.item() == pytest.approx(1.1)
        assert grad.item() == pytest.approx(1.1)
    out, grad = graded(bind("ppo"), far)
    assert out.S.item() == pytest.approx(1.2)
    assert grad.item() == 0


def test_c089_one_stale_token_by_method_and_sign():
    """D = 28.6: PPO and DPPO hold it for A = +1 and let it through for A = -1; bands never do."""
    keeps = {}
    for A in (1.0, -1.0):
        b = tokens([28.6], A, mu=-29.1, prox=[-0.5])
        for name in ("ppo", "dppo", "icepop", "kpop"):
            keeps[name, A] = bool(bind(name)(b).active)
    assert {k for k, kept in keeps.items() if kept} == {("ppo", -1.0), ("dppo", -1.0)}
    b = tokens([28.6], -1.0, mu=-29.1)
    assert bind("ppo")(b).S.item() == pytest.approx(-2.6e12, rel=0.02)
    assert bind("ppo", dual_clip=3.0)(b).S.item() == -3


@pytest.mark.parametrize(
    ("band", "kept"),
    [((0.5, 5), [0, 1, 1, 1, 0]), ((0.5, 2), [0, 1, 0, 0, 0]), ((0.25, 5), [1, 1, 1, 1, 0])],
)
def test_c111_bands_differ_by_framework_and_by_ratio(band, kept):
    """pi = pi_old: both choices of the tested ratio agree; bounds are inclusive in float32 too."""
    d = torch.tensor([0.3, 0.5, 2.5, 5.0, 5.1]).double().log()
    logp, mu = d.clamp(max=0), (-d).clamp(max=0)
    for dtype in (torch.float32, torch.float64):
        for ratio in ("mismatch", "total"):
            b = TokenBatch(
                logp.to(dtype), mu.to(dtype), torch.ones(5), torch.ones(5).bool(),
                torch.arange(5), logp_prox=logp.to(dtype),
            )  # fmt: skip
            out = bind("icepop", low=band[0], high=band[1], band=ratio)(b)
            assert out.active.tolist() == [bool(x) for x in kept]


def test_c113_the_divergence_mask_is_one_sided():
    """0.6 -> 0.9 with A = +, - and 0.001 -> 0.02 with A = +: DPPO and PPO disagree on the third."""
    b = from_probabilities([0.9, 0.9, 0.02], [0.6, 0.6, 0.001], [1.0, -1.0, 1.0])
    assert bind("dppo")(b).active.tolist() == [False, True, True]
    assert bind("ppo")(b).active.tolist() == [False, True, False]


def test_d044_the_divergence_mask_on_both_sides_is_a_composition():
    """0.6 -> 0.9 and 0.9 -> 0.6, both signs, band 0.2: `keep` by TV masks all four, DPPO those that move out."""
    b = from_probabilities([0.9, 0.9, 0.6, 0.6], [0.6, 0.6, 0.9, 0.9], [1.0, -1.0, 1.0, -1.0])
    assert bind("pg+keep", **{"keep.gate": "tv", "keep.max": 0.2})(b).active.tolist() == [False] * 4
    assert bind("dppo")(b).active.tolist() == [False, True, True, False]


def test_c078_versions_of_the_prompt_are_no_ages():
    """-1 under the mask: versions 2 to 3 were sampled, so ages at 3 are 1, 1 and 0; four would be 1.33 and 4."""
    versions, mask = torch.tensor([-1, -1, 2, 2, -1, 3]), torch.tensor([0, 0, 1, 1, 0, 1])
    b = replace(tokens([0.0] * 6, mask=mask.tolist()), age=3 - versions)
    got = mismatch([b])
    assert (float(got["age"]), float(got["age_max"])) == (pytest.approx(2 / 3), 1)


def test_c115_capped_and_masked_are_two_things():
    """r = 1.5, pi_old = pi, A = +1: dL/dlogp is 0 for PPO and -1.5 for TIS and IcePop."""
    b = from_probabilities([0.3], [0.2])
    grads = {}
    for name, arguments in (("ppo", {"eps_high": 0.28}), ("tis", {}), ("icepop", {})):
        grads[name] = -graded(bind(name, **arguments), b)[1].item()
    assert grads == pytest.approx({"ppo": 0, "tis": -1.5, "icepop": -1.5})


@pytest.mark.parametrize(("A", "S"), [(1.0, 1.2), (-1.0, -3.0)])
def test_c047_dual_clip_acts_on_negative_advantages_only(A, S):
    """r = 10, c = 3: the loss is -1.2 for A = +1 (wrong code: -3) and 3 for A = -1; c of 1 or less is refused."""
    b = tokens([LOG(10)], A, mu=-3.0)
    assert bind("ppo", dual_clip=3.0)(b).S.item() == pytest.approx(S)
    with pytest.raises(ValueError, match="dual_clip"):
        bind("ppo", dual_clip=1.0)


def test_c068_the_weight_of_a_policy_gradient_has_no_gradient():
    """logp = logp_mu = -2, A = +1: dL/dlogp is -1; with a weight that is not detached it is +1. The loss is 2."""
    out, grad = graded(bind("tis", form="pg"), tokens([0.0], 1.0, mu=-2.0))
    assert (-out.S.item(), -grad.item()) == (2.0, -1.0)


def test_d041_a_rejected_answer_loses_its_negative_tokens_or_all():
    """d = -1, A = -0.5, 0.25, -0.25, delta 0.1: nothing is left by sequence, 0.25 e^-1 by token."""
    b = replace(
        tokens([-1.0] * 3, mu=-1.0),
        advantage=torch.tensor([-0.5, 0.25, -0.25]).double(),
        response=torch.zeros(3, dtype=torch.int64),
    )
    S = {x: bind("opsm", delta=0.1, level=x)(b).S.tolist() for x in ("token", "sequence")}
    assert S["sequence"] == [0, 0, 0]
    assert S["token"] == pytest.approx([0, 0.25 * math.exp(-1), 0])


@pytest.mark.parametrize(("cut", "kept"), [("remove", [0, 1, 1, 1]), ("clip", [0, 0, 1, 1])])
def test_d042_m2po_removes_down_to_a_moment_or_clips_at_it(cut, kept):
    """A = +1, d = 0.9, 0.3, 0.1, 0.1, budget 0.04, no smallest radii: 1 of 4 is cut, or 2 of 4."""
    b = tokens([0.9, 0.3, 0.1, 0.1], 1.0, mu=-2.0)
    out = bind("m2po", cut=cut, low=0.0, high=0.0)(b)
    assert out.active.tolist() == [bool(x) for x in kept]


def test_d077_an_answer_without_a_verdict_is_left_out():
    """8 answers, one verifier timed out (NaN): the mean is that of the other seven, and the answer teaches nothing."""
    reward = torch.tensor([[1.0, 0, 0, 1, math.nan, 0, 1, 0]])
    A = dr_grpo(reward, torch.full((1, 8), 5))
    assert A[0, 4] == 0
    assert A[0, 0].item() == pytest.approx(4 / 7)
    assert A[0, 1].item() == pytest.approx(-3 / 7)
