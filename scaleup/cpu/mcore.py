"""Megatron-Core (0.16 to 0.19) on a CPU. `install()` does nothing where CUDA is available.

Megatron's training path runs on gloo, but names the CUDA device in literals that no flag reaches.
Each step below says what fails without it. The default causal mask, fusions and kernels of
Transformer Engine are not touched: `scaleup.models.megatron` builds from parts that do not need them.
"""

from __future__ import annotations

import importlib
import types

import torch
import torch.distributed as dist

# Modules whose code holds "cuda" as a device or a tensor type: optimizer, clipping, token counts.
LITERALS = (
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.utils",
    "megatron.core.dist_checkpointing.exchange_utils",
)
CONSTANTS = {"cuda": "cpu"} | {
    f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")
}


class _Stream:
    """Stands for a CUDA stream and its events: all work is done when it is asked for."""

    def _nothing(self, *_, **__):
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = _nothing


def install() -> bool:
    """Make Megatron-Core run on a CPU; once a process. Returns whether it was needed.

    Call before building a model. Raises ModuleNotFoundError where megatron-core is not installed.
    """
    if torch.cuda.is_available():
        return False
    if getattr(torch.cuda, "_simlab_cpu", False):
        return True
    torch.cuda._simlab_cpu = True
    stream = _Stream()
    # buffers of DDP, RoPE, sequence parallelism, pipelines; the meta device inside its context
    torch.cuda.current_device = torch.get_default_device
    torch.cuda.synchronize = lambda *_, **__: None  # checkpoints, pipelines
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: stream
    torch.Tensor.cuda = lambda self, *_, **__: self  # the optimizer's state on save

    for name in LITERALS:
        try:
            _retarget(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    utils = importlib.import_module("megatron.core.utils")
    _retarget_function(utils.local_multi_tensor_l2_norm)

    state = importlib.import_module("megatron.core.parallel_state")
    state.create_group = _one_group(state.create_group)

    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):  # read by every router, defined only with TE
        moe_utils.te_general_gemm = None
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_to_lists

    random = importlib.import_module("megatron.core.tensor_parallel.random")  # recompute
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer.DistributedOptimizer._set_main_param_and_optimizer_states = _keep_step(
        optimizer.DistributedOptimizer._set_main_param_and_optimizer_states
    )
    return True


def _retarget(module: types.ModuleType) -> None:
    """Replace the device literals in every function and method that the module defines."""
    for value in list(vars(module).values()):
        members = vars(value).values() if isinstance(value, type) else [value]
        for member in members:
            member = getattr(member, "__func__", getattr(member, "fget", member))
            member = getattr(member, "__wrapped__", member)
            if isinstance(member, types.FunctionType) and member.__module__ == module.__name__:
                _retarget_function(member)


def _retarget_function(function: types.FunctionType) -> None:
    function.__code__ = _retarget_code(function.__code__)


def _retarget_code(code: types.CodeType) -> types.CodeType:
    return code.replace(co_consts=tuple(map(_retarget_constant, code.co_consts)))


def _retarget_constant(value):
    if isinstance(value, types.CodeType):
        return _retarget_code(value)
    if isinstance(value, tuple):
        return tuple(map(_retarget_constant, value))
    return CONSTANTS.get(value, value) if isinstance(value, str) else value


def _one_group(create):
    """Megatron's `create_group`, which makes some twenty groups of a few sets of ranks, with one group
    a set: every group of gloo has three threads, one of which wakes up a hundred times a second.

    Groups that name their backend stay as they are: Megatron closes those, and no others.
    """
    groups: dict[tuple, object] = {}

    def create_group(ranks=None, timeout=None, backend=None, **arguments):
        if backend is not None:
            return create(ranks, timeout, backend, **arguments)
        key = (dist.group.WORLD, tuple(ranks), timeout)
        if key not in groups:  # on every rank or on none: making a group is collective
            groups[key] = create(ranks, timeout, **arguments)
        return groups[key]

    return create_group


def _splits_to_lists(self, point: str, tokens_per_expert=None):
    """The all-to-all dispatcher's copy to the host, without a side stream."""
    if not self.drop_and_pad and point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.numpy())
    return tokens_per_expert


def _keep_step(method):
    """torch's AdamW has a state `step` that a checkpoint of parameter states does not hold."""

    def set_states(self, model_param, tensors):
        if "step" not in tensors:
            group, order = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
            if "step" in state:
                tensors = tensors | {"step": state["step"]}
        return method(self, model_param, tensors)

    return set_states
