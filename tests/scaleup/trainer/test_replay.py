"""Routing replay in Megatron: given experts are used, in forward, backward and recomputation."""

from dataclasses import replace

import pytest
import torch

from scaleup.engines_report.launch import Ranks
from scaleup.engines_report.measure import (
    RECOMPUTE,
    REPLAY,
    gap,
    routed_responses,
    run,
    start,
)
from scaleup.engines_report.routing import routed, slope
from scaleup.models import tiny

CASES = {
    "1 rank, recompute": (1, {}, RECOMPUTE),
    "DP2": (2, {}, REPLAY),
    "EP2": (2, {"ep": 2}, REPLAY),
    "TP2 SP EP2": (2, {"tp": 2, "ep": 2}, REPLAY),
    "TP2 SP EP2, recompute": (2, {"tp": 2, "ep": 2}, RECOMPUTE),
    "PP2": (2, {"pp": 2}, REPLAY),
    "PP2, recompute": (2, {"pp": 2}, RECOMPUTE),
}


@pytest.fixture(scope="module")
def ranks():
    """One process, and two that share a model."""
    with Ranks(1, timeout=300) as one, Ranks(2, timeout=300) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny mixture of experts."""
    return tiny.write(tmp_path_factory.mktemp("tiny"), "qwen3_moe", seed=1)


def steps(ranks, folder, layout, mode, build=REPLAY, broken=False):
    """Three steps on random sets of experts; `broken` leaves the action at forward."""
    more = {"rows": routed_responses, "build": build, "replay": mode, "lr": 1e-3, "broken": broken}
    return ranks(run, folder, layout, **more)[0]


@pytest.fixture(scope="module")
def alone(ranks, folder):
    """Three steps on one rank, by replay mode."""
    return {mode: steps(ranks[1], folder, {}, mode) for mode in ("none", "r2", "r3")}


def test_modes_differ(alone):
    """Random experts are another network; r2 is free routing at first, and no longer after a step."""
    assert gap(alone["r3"][:1], alone["none"][:1]) > 1e-3
    assert gap(alone["r2"][:1], alone["none"][:1]) < 1e-6
    assert gap(alone["r2"][2:], alone["none"][2:]) > 1e-4


@pytest.mark.parametrize("mode", ["r2", "r3"])
@pytest.mark.parametrize("case", CASES)
def test_layouts_agree(ranks, folder, alone, case, mode):
    """Three steps give the numbers of one rank in every layout, with and without recomputation."""
    n, layout, build = CASES[case]
    found = steps(ranks[n], folder, layout, mode, build)
    print(case, mode, f"{gap(alone[mode], found):.1e}", found)
    assert gap(alone[mode], found) < 1e-5


def test_negative_control(ranks, folder, alone):
    """PP2 and recomputation with the action left at REPLAY_FORWARD: wrong gradients, and no error."""
    found = steps(ranks[2], folder, {"pp": 2}, "r3", RECOMPUTE, broken=True)
    first, right = found[0], alone["r3"][0]
    assert first["loss"] == pytest.approx(right["loss"], abs=1e-6)  # the loss shows nothing
    assert abs(first["norm"] - right["norm"]) > 1e-3 * right["norm"]


@pytest.mark.parametrize(("n", "layout"), [(1, {}), (2, {"tp": 2, "ep": 2})])
@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_sets_are_those_given(ranks, folder, n, layout, mode):
    """On perturbed weights every router uses exactly the sets of the record; free ones would not."""
    for same, moved in ranks[n](routed, folder, layout, mode):
        assert len(same) == 4  # two micro-batches, two layers
        assert all(same)
        print(mode, layout, "tokens with other sets", moved)
        assert min(moved) > 0.1


def test_gradient_reaches_the_router(ranks, folder):
    """The routers' gradient under replay is the slope of the loss, by finite differences."""
    ((gradient, difference, parts),) = ranks[1](slope, folder)
    print(gradient, difference, parts)
    assert min(parts) > 1e-3
    assert difference == pytest.approx(gradient, rel=2e-3)


def wrong(folder):
    """One-sentence errors, and what an exception leaves behind."""
    from scaleup.trainer import routing_replay as replay

    trainer = start(folder, {}, build=REPLAY, replay="r3")
    rows = routed_responses(trainer)
    experts, out = rows[0][0].experts, {}
    for name, bad in {
        "none": None,
        "short": experts[:-1],
        "layers": experts[:, :1],
        "twice": torch.zeros_like(experts),
        "range": experts + 8,
    }.items():
        try:
            trainer.collate([[replace(rows[0][0], experts=bad)]])
        except ValueError as error:
            out[name] = str(error)
    micro = trainer.collate(rows)
    micro[1].routes = [r + 100 for r in micro[1].routes]  # past the check
    try:
        trainer.step(micro)
    except Exception:
        left = list(replay.routers(trainer.model).values())
        out["left"] = [(r.router_replay_action, len(r.replay_backward_list)) for r in left]
    return out


def test_errors(ranks, folder):
    """Experts that do not fit are refused in one sentence; a failed step leaves no action behind."""
    (found,) = ranks[1](wrong, folder)
    assert found.pop("left") == [(None, 0), (None, 0)]
    parts = {
        "none": "got none",
        "short": "(10, 2, 2) of each response, got (9, 2, 2)",
        "layers": "got (10, 1, 2)",
        "twice": "twice",
        "range": "[0, 8)",
    }
    assert found.keys() == parts.keys()
    for name, part in parts.items():
        assert part in found[name]
