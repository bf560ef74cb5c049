"""Routing replay: the experts of every token are given, the router only weighs them.

A small change of a logit can swap an expert, and then trainer and rollout score a token by different
networks. R3 replays the experts that the rollout engine chose, R2 those of the trainer's own
forward-only pass before the step. Scores stay the router's own, so its gradient is that of the
softmax over the given experts.

    routes = local_routes(model, experts)  # [T, layers, k] of the packed row -> a tensor per router
    with replaying(model):                 # around Megatron's whole schedule
        ...                                # in forward_step:
        use(model, routes)
        logits = model(...)
        recompute(model)                   # what routes from here on can only be a recomputation

The last line is not optional: with recomputation in a pipeline, a later micro-batch has set its
experts before an earlier one is computed again, and its gradient would be silently wrong.
The model is built with `moe_enable_routing_replay=True`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from scaleup.models.families import narrow
from scaleup.models.megatron import parallel_state
from scaleup.models.weights import unwrap

from megatron.core.transformer.moe.router_replay import (  # isort: skip  after the shim of model
    RouterReplay,
    RouterReplayAction,
)


def routers(model: torch.nn.Module) -> dict[int, RouterReplay]:
    """The replays of this stage, by global number of their layer (from 0); {} on a stage without one.

    Raises ValueError for a dense model, or one built without `moe_enable_routing_replay`.
    """
    model = unwrap(model)
    if not model.config.num_moe_experts or not model.config.moe_enable_routing_replay:
        raise ValueError("replay: build a mixture of experts with moe_enable_routing_replay=True")
    replays = {}
    for layer in model.decoder.layers:
        if router := getattr(layer.mlp, "router", None):
            replays[layer.layer_number - 1] = router.router_replay
    return replays


def local_routes(model: torch.nn.Module, experts: Tensor) -> list[Tensor]:
    """What each router of this rank replays, `[rows, k]` int64, from `experts` `[T, layers, k]`.

    T is the length of the packed row, padding included. Under sequence parallelism a router sees
    its rank's part of the row. Raises ValueError for experts that are not k different ones of the
    model's, or of another number of layers.
    """
    config = unwrap(model).config
    layers, k, n = config.num_layers, config.moe_router_topk, config.num_moe_experts
    if experts.dim() != 3 or experts.shape[1:] != (layers, k):
        raise ValueError(
            f"replay: experts must be [tokens, {layers} layers, {k}], got {tuple(experts.shape)}"
        )
    experts = experts.long()
    ordered = experts.sort(-1).values
    if experts.numel() and (ordered.min() < 0 or ordered.max() >= n):
        raise ValueError(f"replay: an expert lies outside [0, {n})")
    if (ordered.diff(dim=-1) == 0).any():
        raise ValueError("replay: a token has the same expert twice")
    if config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        experts = experts.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    return [experts[:, layer].contiguous() for layer in routers(model)]


def compact(routes: list[Tensor], config) -> list[Tensor]:
    """The routes on the host, a byte a choice where that suffices: those of a whole step wait there."""
    return [route.to("cpu", narrow(config.num_moe_experts)) for route in routes]


def use(model: torch.nn.Module, routes: list[Tensor]) -> None:
    """Replay these routes in the forward pass that follows."""
    for replay, route in zip(routers(model).values(), routes, strict=True):
        replay.set_target_indices(route)
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def recompute(model: torch.nn.Module) -> None:
    """From here on a router is only called again to recompute: first in, first out."""
    _act(model, RouterReplayAction.REPLAY_BACKWARD)


def record(model: torch.nn.Module) -> None:
    """Route freely in the forward pass that follows, and keep the choice for `recorded`."""
    _act(model, RouterReplayAction.RECORD)


def recorded(model: torch.nn.Module) -> list[Tensor]:
    """The routes of the last forward pass under `record`, in the form that `use` takes."""
    return [replay.get_recorded_indices().clone() for replay in routers(model).values()]


@contextmanager
def replaying(model: torch.nn.Module) -> Iterator[None]:
    """Leave no route and no action behind, whatever happens inside.

    Without recomputation nothing takes a route off the list of `recompute`, and the next step would
    begin with those of this one.
    """
    clear(model)
    try:
        yield
    finally:
        clear(model)


def clear(model: torch.nn.Module) -> None:
    """Forget all routes and route freely."""
    for replay in routers(model).values():
        replay.clear_indices()
        replay.clear_router_replay_action()


def _act(model: torch.nn.Module, action: RouterReplayAction) -> None:
    for replay in routers(model).values():
        replay.set_router_replay_action(action)
