"""Measurements of routing replay on real trainers: which experts the routers used, and their gradient.

They run on a rank, like those of measure.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from scaleup.engines_report.measure import REPLAY, routed_responses, start
from scaleup.models import weights


def routed(folder, layout, mode) -> tuple[list[bool], list[float]]:
    """On perturbed weights, by router and micro-batch: whether the sets used under replay are those
    given, and the share of tokens for which free routing would use others."""
    trainer = start(folder, layout, build=REPLAY, lr=0.0, replay=mode)
    micro = trainer.collate(routed_responses(trainer))
    if mode == "r2":
        trainer.before(micro)
    model = weights.unwrap(trainer.model)
    used = _watch(model)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=draw)
    trainer.step(micro) if mode == "r3" else trainer.token_batches(micro)
    given = [route.long() for m in micro for route in m.routes]
    replayed = used[-len(given) :]
    trainer.settings = replace(trainer.settings, replay="none")
    trainer.step(micro)
    same, moved = [], []
    for route, x, y in zip(given, replayed, used[-len(given) :], strict=True):
        wanted = torch.zeros_like(x).scatter(1, route, True)
        same.append(bool((x == wanted).all()))
        moved.append((y != wanted).any(1).float().mean().item())
    return same, moved


def _watch(model) -> list[Tensor]:
    """Sets `[tokens, experts]` that routers use from here on, in the order in which they are called."""
    used = []
    for layer in model.decoder.layers:
        if router := getattr(layer.mlp, "router", None):
            router.register_forward_hook(lambda _, __, out: used.append(out[1].clone()))
    return used


def slope(folder) -> tuple[float, float, list[float]]:
    """Derivative of the loss along the routers' gradient: from the gradient, and by differences."""
    trainer = start(folder, {}, build=REPLAY, lr=0.0, replay="r3", name="pg")
    micro = trainer.collate(routed_responses(trainer))
    trainer.step(micro)
    model = weights.unwrap(trainer.model)
    routers = [layer.mlp.router.weight for layer in model.decoder.layers]
    grads = [w.main_grad.clone() for w in routers]
    size = torch.stack([g.norm() for g in grads]).norm()
    h, losses = 2e-2, []
    for move in (h, -2 * h):  # to one side, then to the other
        with torch.no_grad():
            for w, g in zip(routers, grads, strict=True):
                w += move * g / size
        losses.append(trainer.step(micro).loss)
    return size.item(), (losses[0] - losses[1]) / (2 * h), [g.norm().item() for g in grads]


def score(folder, samples, dtype=torch.float32, replay="none") -> tuple[Tensor, Tensor, Tensor]:
    """The trainer's log-probs `[N]` of all sampled tokens in a forward-only pass; at which of them its
    routers used other sets than the engine; the same for every token that was fed."""
    from scaleup.trainer.responses import Response

    moe = samples[0].experts is not None
    build = {"dtype": dtype} | (REPLAY if moe else {})
    trainer = start(folder, {}, name="none", replay=replay, build=build)
    used = _watch(weights.unwrap(trainer.model))
    rows = [
        Response(
            torch.tensor(s.prompt + s.output), len(s.prompt), s.logp_mu, 0.0, experts=s.experts
        )
        for s in samples
    ]
    (micro,) = micros = trainer.collate([rows])
    trainer.before(micros)
    other = torch.zeros(micro.target.shape[1], dtype=torch.bool)
    if moe:
        given = torch.cat([s.experts for s in samples]).long()
        other = ~torch.stack(used, 1).gather(-1, given).all(-1).all(-1)  # k of k
    return micro.logp, other[micro.at], other
