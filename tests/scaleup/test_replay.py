"""Routing replay in Megatron: given experts are used, in forward, backward and recomputation."""

from dataclasses import replace

import pytest
import torch

from scaleup import tiny
from scaleup.launch import Ranks

REPLAY = (("moe_enable_routing_replay", True),)
RECOMPUTE = (
    *REPLAY,
    ("recompute_granularity", "full"),
    ("recompute_method", "uniform"),
    ("recompute_num_layers", 1),
)
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


def start(folder, layout, build=REPLAY, name="sat", **settings):
    """A trainer on this rank."""
    from scaleup import model, weights
    from scaleup.train import Settings, Trainer
    from simlab.stabilizers import bind

    layout = model.Layout(**layout)
    model.start(layout)
    built = model.build(model.read_config(folder), layout, **dict(build))
    weights.load(built, weights.read(folder))
    return Trainer(built, bind(name), Settings(**{"lr": 1e-3} | settings))


def some_responses(trainer, n=8):
    """Responses of one length (a wrong micro-batch's experts would fit) with random sets of experts."""
    from scaleup.responses import Response, share

    draw = torch.Generator().manual_seed(3)
    rows = []
    for i in range(n):
        tokens = torch.randint(512, (11,), generator=draw)
        logp_mu = -6.5 + torch.randn(8, generator=draw)
        experts = torch.rand(10, 2, 8, generator=draw).argsort(-1)[..., :2].int()
        rows.append(Response(tokens, 3, logp_mu, (-1.0) ** (i // 3), experts=experts))
    return share(rows, 2)[trainer.dp_rank]


def run(folder, layout, build, mode, broken=False):
    """Loss and gradient norm of three steps; `broken` leaves the action at forward."""
    from scaleup import replay

    trainer = start(folder, layout, build, replay=mode)
    micro = trainer.collate(some_responses(trainer))
    right = replay.recompute
    if broken:
        replay.recompute = lambda model: None
    try:
        found = [trainer.step(micro) for _ in range(3)]
    finally:
        replay.recompute = right
    return [(x.loss, x.grad_norm) for x in found]


def gap(a, b):
    """Largest relative difference of two runs."""
    pairs = [(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return max(abs(x - y) / max(1, abs(x)) for x, y in pairs)


@pytest.fixture(scope="module")
def alone(ranks, folder):
    """Three steps on one rank, by replay mode."""
    return {mode: ranks[1](run, folder, {}, REPLAY, mode)[0] for mode in ("none", "r2", "r3")}


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
    found = ranks[n](run, folder, layout, build, mode)[0]
    print(case, mode, f"{gap(alone[mode], found):.1e}", found)
    assert gap(alone[mode], found) < 1e-5


def test_negative_control(ranks, folder, alone):
    """PP2 and recomputation with the action left at REPLAY_FORWARD: wrong gradients, and no error."""
    found = ranks[2](run, folder, {"pp": 2}, RECOMPUTE, "r3", True)[0]
    print("right", alone["r3"], "left on", found)
    assert found[0][0] == pytest.approx(alone["r3"][0][0], abs=1e-6)  # the loss shows nothing
    assert abs(found[0][1] - alone["r3"][0][1]) > 1e-3 * alone["r3"][0][1]


def routed(folder, layout, mode):
    """Sets each router used on perturbed weights, free and replayed, against those that were given."""
    from scaleup.weights import unwrap

    trainer = start(folder, layout, lr=0.0, replay=mode)
    micro = trainer.collate(some_responses(trainer))
    if mode == "r2":
        trainer.before(micro)
    used = []
    model = unwrap(trainer.model)
    hooks = [
        layer.mlp.router.register_forward_hook(lambda _, __, out: used.append(out[1].clone()))
        for layer in model.decoder.layers
    ]
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=draw)
    trainer.step(micro) if mode == "r3" else trainer._schedule(micro, trainer._look, True)
    replayed, used[:] = used[-len(micro) * len(hooks) :], []
    given = [route for m in micro for route in m.routes]
    trainer.settings = replace(trainer.settings, replay="none")
    trainer.step(micro)
    free = used[-len(given) :]
    for hook in hooks:
        hook.remove()
    same, moved = [], []
    for route, x, y in zip(given, replayed, free, strict=True):
        wanted = torch.zeros_like(x).scatter(1, route, True)
        same.append(bool((x == wanted).all()))
        moved.append((y != wanted).any(1).float().mean().item())
    return same, moved


@pytest.mark.parametrize(("n", "layout"), [(1, {}), (2, {"tp": 2, "ep": 2})])
@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_sets_are_those_given(ranks, folder, n, layout, mode):
    """On perturbed weights every router uses exactly the sets of the record; free ones would not."""
    for same, moved in ranks[n](routed, folder, layout, mode):
        assert len(same) == 4  # two micro-batches, two layers
        assert all(same)
        print(mode, layout, "tokens with other sets", moved)
        assert min(moved) > 0.1


def slope(folder):
    """Derivative of the loss along the routers' gradient: from the gradient, and by differences."""
    from scaleup.weights import unwrap

    trainer = start(folder, {}, lr=0.0, replay="r3", name="pg")
    micro = trainer.collate(some_responses(trainer))
    trainer.step(micro)
    weights = [layer.mlp.router.weight for layer in unwrap(trainer.model).decoder.layers]
    grads = [w.main_grad.clone() for w in weights]
    size = torch.stack([g.norm() for g in grads]).norm()
    h = 2e-2
    losses = []
    for side in (1, -1):
        with torch.no_grad():
            for w, g in zip(weights, grads, strict=True):
                w += side * h * g / size
        losses.append(trainer.step(micro).loss)
        with torch.no_grad():
            for w, g in zip(weights, grads, strict=True):
                w -= side * h * g / size
    return size.item(), (losses[0] - losses[1]) / (2 * h), [g.norm().item() for g in grads]


def test_gradient_reaches_the_router(ranks, folder):
    """The routers' gradient under replay is the slope of the loss, by finite differences."""
    ((gradient, difference, parts),) = ranks[1](slope, folder)
    print(gradient, difference, parts)
    assert min(parts) > 1e-3
    assert difference == pytest.approx(gradient, rel=2e-3)


def wrong(folder):
    """One-sentence errors, and what an exception leaves behind."""
    from scaleup import replay

    trainer = start(folder, {}, replay="r3")
    rows = some_responses(trainer)
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
