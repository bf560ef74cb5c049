"""The suite itself: its batches reach every branch, a wrong pair is refused, what has no code."""

from __future__ import annotations

import peers
import pytest
import torch
from pairs import (
    BOTH,
    BY_ROW,
    NEAR,
    WIDE,
    Deviation,
    Pair,
    check,
    error,
    ours,
    worst,
)

from simlab.core import kl
from simlab.core.aggregate import reduce_diagnostics
from simlab.stabilizers import STABILIZERS, bind

BRANCHES = [
    ("ppo", {"dual_clip": 3.0}, ("clip_high", "clip_low", "clip_dual"), BOTH),
    ("gspo", {}, ("clip_high", "clip_low"), NEAR),
    ("gspo", {"eps_low": 0.2, "eps_high": 0.2}, ("clip_high", "clip_low"), BOTH),
    ("dppo", {"cap": 3.0}, ("clip_high", "clip_low", "capped"), BOTH),
    ("dppo", {"divergence": "kl"}, ("clip_high", "clip_low"), BOTH),
    ("cispo", {}, ("capped",), BOTH),
    ("gmpo", {}, ("clip_high", "clip_low"), BOTH),
    ("tis", {}, ("capped", "clip_high", "clip_low"), BOTH),
    ("tis", {"level": "sequence", "cap": 3.0}, ("capped",), BOTH),
    ("tis", {"form": "pg", "level": "sequence", "cap": 8.0}, ("capped",), BOTH),
    ("tis", {"cap": 10.0}, ("capped",), BOTH),
    ("icepop", {}, ("out_of_band",), BOTH),
    ("two_factor", {"c": 2.0}, ("out_of_band",), BOTH),
    ("mis", {}, ("rejected",), BOTH),
    ("mis", {"level": "sequence", "high": 3.0}, ("rejected",), BOTH),
    ("mis", {"level": "geometric", "low": 0.8, "high": 1.25}, ("rejected",), BOTH),
    ("seqclip", {"low": 0.8, "high": 1.25}, ("out_of_band",), BY_ROW),
    ("opsm", {"delta": 0.1}, ("dropped",), BOTH),
    ("trm", {"delta": 0.05}, ("rejected",), BOTH),
    ("trm", {"reduce": "max", "delta": 0.5}, ("rejected",), BOTH),
    ("clip_cov", {"low": 0.1, "rate": 1.0}, ("dropped",), BOTH),
    ("kl_cov", {"rate": 0.1}, ("held_back",), BOTH),
    ("luspo", {"eps_low": 0.2, "eps_high": 0.2}, ("clip_high", "clip_low"), BOTH),
    ("vespo", {}, ("damped",), BOTH),
    ("decoupled", {"dual_clip": 3.0}, ("clip_high", "clip_low", "clip_dual", "out_of_band"), BOTH),
]


@pytest.mark.parametrize(("name", "arguments", "shares", "batches"), BRANCHES, ids=str)
def test_the_batches_reach_every_branch(name, arguments, shares, batches):
    """Each clip, cap and rejection takes some tokens and spares others."""
    method = bind(name, **arguments)
    found = []
    for x in batches:
        b = x.flat()
        out = method.surrogate(b, **method.stats([b]))
        found.append(reduce_diagnostics(b, out.diagnostics))
        assert out.active.any()
    for share in shares:
        values = [float(f[share]) for f in found]
        assert max(values) > 0, share
        assert min(values) < 1, share


def test_the_kl_batches_reach_the_limit():
    """Some terms lie above 10, some below."""
    above = torch.cat([(kl.k3(x.lp, x.ref) > 10)[x.mask] for x in WIDE])
    assert above.any()
    assert not above.all()


def test_a_wrong_pair_is_refused():
    """A factor of 1 + 1e-8 is seen in the value, and one that only the gradient has is seen too."""
    call = ours("ppo")

    def near(x):
        return call(x) * (1 + 1e-8)

    def slope(x):
        return (lambda y: y + 1e-8 * (y - y.detach()))(call(x))

    x = BY_ROW[0]
    assert worst(call, call, x, True) == 0
    assert worst(call, near, x, True) > 1e-9
    assert worst(call, slope, x, True) > 1e-9
    assert error(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])) == float("inf")
    same = Deviation("nothing", (x,), call)
    with pytest.raises(AssertionError, match="do not differ"):
        check(Pair(call, call, "", (x,), (same,)))


# ---------------------------------------------------------------- methods without code
NO_CODE = {
    "asympo": "asympo",
    "asymre": "asymre",
    "ctpo": "ctpo",
    "centering": "score_center",
    'decoupled(proximal="loglinear")': "loglinear",
    'dppo(divergence="topk_tv")': "topk_tv",
    'dppo(divergence="topk_kl")': "topk_kl",
    "drpo": "drpo",
    "flash_reinforce": "flash_reinforce",
    "gepo": "gepo",
    "ipo": "ipo",
    "kpop": "kpop",
    "m2po": "m2po",
    "minirl": "minirl",
    "minpro": "minpro",
    "mis(veto=1e-4)": "veto",
    "mu_grpo": "mu_grpo",
    "oapl": "oapl",
    "obrs": "obrs",
    "opmd": "opmd",
    "oracle": "oracle",
    "sat": "sat",
    "sat_open": "sat_open",
    "sis": "sis",
    "spo": "spo",
    "spo_scaled": "spo_scaled",
    "topr": "topr",
    "troll": "troll",
    "vaco": "vaco",
}


@pytest.mark.parametrize("what", NO_CODE)
def test_a_method_without_callable_code(what, rows):
    """No peer has a loss, an estimator or a setting of this name."""
    word = NO_CODE[what]
    for who, (known, names) in peers.registries().items():
        assert known in names, who
        for name in (x.lower().removesuffix("loss") for x in names):
            assert name != word if len(word) == 3 else word not in name, f"{who} has {name}"
    assert what.split("(")[0] in STABILIZERS
    rows.add(f"`{what}`", "none in verl, TRL, torchrl, polgrad, martingale", "no callable code", "")
