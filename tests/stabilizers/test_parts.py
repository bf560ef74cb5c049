"""What methods share, and that they share it through few files."""

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import by_response, graded, on_ranks, ragged, tokens

from simlab.core.aggregate import reduce_diagnostics
from simlab.core.tokens import LOG_RATIO_CAP
from simlab.stabilizers import NAMES, STABILIZERS, bind


@pytest.mark.parametrize("name", NAMES)
def test_no_stabilizer_imports_another(name):
    """A file is read alone: of its folder it imports what several share, and no other method."""
    tree = ast.parse(Path(STABILIZERS[name].__file__).read_text())
    modules = {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    own = {x for x in modules if x.startswith("simlab.stabilizers")}
    shared = ("parts", "contraction", "coefficients", "algebra.corrections", "algebra.statistics")
    assert own <= {f"simlab.stabilizers.{x}" for x in shared}


# ---------------------------------------------------------------- caps that are lifted
LIFTED = [
    ("decoupled", {"high": math.inf}),
    ("decoupled", {"high": math.inf, "weight": "mask"}),
    ("decoupled", {"weight": "none"}),
    ("icepop", {"low": 0.0, "high": math.inf}),
    ("mis", {"low": 0.0, "high": math.inf}),
    ("mis", {"level": "sequence", "high": math.inf}),
    ("mis", {"level": "geometric", "weight": "sequence", "low": 0.0, "high": math.inf}),
    ("tis", {"cap": math.inf}),
    ("tis", {"cap": math.inf, "level": "sequence"}),
    ("tis", {"cap": math.inf, "form": "pg"}),
    ("two_factor", {"c": 1e30}),
    ("two_factor", {"c": 1e30, "repair": "clamp"}),
    ("cispo", {"eps_high": 1e30}),
    ("dppo", {"cap": math.inf, "delta_low": math.inf, "delta_high": math.inf}),
    ("minirl", {"cap": math.inf}),
    ("vcpo", {"cap": math.inf}),
    ("ppo", {"eps_high": 1e30, "dual_clip": math.inf}),
    ("sat", {"eps_high": 1e30}),
    ("gmpo", {"eps_low": math.inf, "eps_high": math.inf}),
]


@pytest.mark.parametrize(("name", "arguments"), LIFTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_lifted_cap_is_finite_or_counted(name, arguments, dtype):
    """Two ratios of e^40 and e^60 whose product no float32 holds: S and gradient are finite, and a
    token that lost its gradient to that is counted."""
    bound = bind(name, **arguments)
    for logp, prox, mu in ((-1, -61, -101), (-1, -101, -61), (-1, -1, -101), (-1, -101, -101)):
        for A in (1.0, -1.0):
            x = {"logp": logp, "logp_prox": prox, "logp_mu": mu}
            b = replace(
                tokens([0.0, 0.0], [A, A], dtype=dtype),
                **{k: torch.tensor([v, -1.0], dtype=dtype) for k, v in x.items()},
            )
            out, grad = graded(bound, b)
            assert out.S.isfinite().all()
            assert out.S.sum().isfinite()
            assert grad.isfinite().all()
            assert torch.equal(out.active, grad != 0)
            shown = reduce_diagnostics(b, out.diagnostics)
            if "overflow" in shown and A < 0 and not out.active[0]:
                assert shown["overflow"] + shown.get("out_of_band", 0) > 0


def test_the_product_of_two_ratios_is_held_and_counted():
    """logp -1, prox -61, mu -101, A = -1: weight e^40 times ratio e^60 is held at e^LOG_RATIO_CAP."""
    x = {"logp": -1.0, "logp_prox": -61.0, "logp_mu": -101.0}
    b = replace(
        tokens([0.0], -1.0, dtype=torch.float32), **{k: torch.tensor([v]) for k, v in x.items()}
    )
    out = bind("decoupled", high=math.inf)(b)
    assert float(out.S) == pytest.approx(-math.exp(LOG_RATIO_CAP), rel=1e-6)
    assert float(reduce_diagnostics(b, out.diagnostics)["overflow"]) == 1
    assert not out.active.any()


# ---------------------------------------------------------------- gradients of a response
SEQUENCE = [
    ("gspo", {"eps_low": 0.2, "eps_high": 0.2}),
    ("gmpo", {}),
    ("seqclip", {"low": 0.5, "high": 2.0}),
    ("sat", {"level": "sequence"}),
]


@pytest.mark.parametrize(("name", "arguments"), SEQUENCE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_active_is_the_support_where_advantages_cancel(name, arguments, dtype):
    """0.7 + 0.5 - 0.2 - 1 is 0 in one order of summation and a rounding error in another."""
    values = torch.tensor([0.7, 0.5, -0.2, -1.0], dtype=dtype)
    seen = set()
    for order in torch.cartesian_prod(*[torch.arange(4)] * 4):
        if len(set(order.tolist())) < 4:
            continue
        for d in (0.0, 0.03, -0.07, 0.1):
            b = tokens([d] * 4, values[order], response=[0] * 4, dtype=dtype)
            out, grad = graded(bind(name, **arguments), b)
            assert torch.equal(out.active, grad != 0), (order, d)
            seen.add(bool(out.active.any()))
    assert seen == {True, False}


# ---------------------------------------------------------------- SAT's gate and its placebos
MATCHED = [
    ("sat", {"factor": 0}),
    ("sat_open", {"gate": "inverted", "factor": 0}),
    ("sat_open", {"gate": "random", "factor": 0}),
]


def gate_of(name, arguments, b):
    """The gated tokens [..., N]."""
    return bind(name, **arguments)(b).diagnostics["gate_rate"].value


def test_the_inverted_gate_takes_as_many_tokens_under_ties():
    """18 tokens of 0.01 and 2 of 0.02: SAT gates 2, and so does its inverse, at the other end."""
    b = tokens([0.01] * 9 + [-0.01] * 9 + [0.02] * 2)
    b = replace(b, uniform=torch.rand(20, generator=torch.Generator().manual_seed(0)))
    top, bottom = (gate_of(*arm, b) for arm in MATCHED[:2])
    assert (int(top.sum()), int(bottom.sum())) == (2, 2)
    assert set(bottom.nonzero().flatten().tolist()) == set(b.uniform[:18].argsort()[:2].tolist())


def test_the_inverted_gate_counts_over_lanes_micro_batches_and_ranks():
    """Rounded |d|, so that every end has ties: as many as SAT gates, however the batch is cut."""
    inverted = bind(*MATCHED[1][:1], **MATCHED[1][1])
    for seed in range(5):
        b = ragged(seed, lanes=(3,), sizes=(3, 40, 1, 17, 5, 64, 2, 30))
        b = replace(b, logp=b.logp_mu + ((b.logp - b.logp_mu) * 8).round() / 8)
        b = replace(
            b, logp=(b.logp * 1024).round() / 1024, logp_mu=(b.logp_mu * 1024).round() / 1024
        )
        counts = [gate_of(*arm, b).sum(-1).tolist() for arm in MATCHED[:2]]
        assert counts[0] == counts[1]
    b = replace(b, **{k: x[0] for k, x in b.held().items()})
    want, micros = inverted.stats([b]), by_response(b, [[0, 5], [1, 3], [2, 4, 6, 7], []])
    shards = [micros[:1], micros[1:]]
    for got in on_ranks(2, lambda i, reduce: inverted.stats(shards[i], reduce)):
        assert all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize(("name", "arguments"), MATCHED)
def test_the_three_gates_act_with_one_strength(name, arguments):
    """With factor 0 a gated token that moves out loses its gradient, whichever gate took it."""
    b = ragged(1, sizes=(200,), by_token=True)
    b = replace(b, logp=b.logp_mu + 0.3 * (b.logp - b.logp_mu))
    gate, out = gate_of(name, arguments, b), bind(name, **arguments)(b)
    outward = b.mask & gate & (b.advantage * (b.logp - b.logp_mu) > 0)
    assert outward.sum() >= 3
    assert not out.active[outward].any()
    kept = bind("ppo")(b).active & ~outward
    assert torch.equal(out.active, kept)
