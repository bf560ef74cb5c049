"""SGLang's engine as a child of this process, and the server arguments that all engines share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from scaleup import cpu
from scaleup.models import weights
from scaleup.rollout.engine import Engine

PLUGINS = "sglang.srt.plugins"


def defaults(folder: str | Path, dtype: str, **options) -> dict[str, Any]:
    """SGLang's server arguments: token ids in and out, experts returned, on a CPU if no CUDA."""
    config = weights.read_config(folder)
    arguments = {
        "model_path": str(folder),
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "enable_return_routed_experts": "num_experts_per_tok" in config,
        "weight_version": "0",
        "log_level": "error",
    }
    if not torch.cuda.is_available():
        if not any(p.value == "scaleup.cpu:activate" for p in entry_points(group=PLUGINS)):
            raise RuntimeError(
                "rollout: SGLang does not see the plugin of simlab, install it again"
            )
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "max_total_tokens": 8192,
            "max_running_requests": 16,
            "sleep_on_idle": True,  # an idle engine would take a core from the trainer
        }
    return arguments | options


class LocalEngine(Engine):
    """SGLang's engine as a child of this process. `options` are SGLang's server arguments.

    The main script needs `if __name__ == "__main__":`. If SGLang's scheduler dies, it kills this
    process, and `close` kills every other child of it: give an engine a process of its own.
    """

    def __init__(self, folder: str | Path, dtype: str = "float32", exact: bool = True, **options):
        cpu.prepare()
        import sglang
        from sglang.srt.managers import io_struct

        arguments = defaults(folder, dtype, **options)
        self._sglang, self._io = sglang.Engine(**arguments), io_struct
        super().__init__(
            folder,
            dtype=getattr(torch, dtype),
            tp=arguments.get("tp_size", 1),
            radix_cache=not arguments.get("disable_radix_cache", False),
            exact=exact,
            deterministic=arguments.get("enable_deterministic_inference", False),
        )
        self._check_start()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Requests submitted inside reach an idle scheduler together, so that its batches, and with them
        the last bit of a log-prob, do not depend on the clock."""
        self._run("hold")
        try:
            yield
        finally:
            self._run("release")

    async def _call(self, route, body):
        manager, io = self._sglang.tokenizer_manager, self._io
        if route == "generate":
            return await anext(manager.generate_request(io.GenerateReqInput(**body), None))
        if route in ("hold", "release"):  # of the scheduler alone; requests still go to its queue
            hold = io.PauseGenerationReqInput(mode="in_place")
            release = io.ContinueGenerationReqInput(torch_empty_cache=False)
            await manager._async_dispatch_to_scheduler(hold if route == "hold" else release)
            return {}
        if route == "model_info":
            return {"weight_version": manager.config_value("weight_version")}
        if route == "abort_request":
            manager.abort_request(**body)
            return {}
        request, method = REQUESTS[route]
        values = await getattr(manager, method)(getattr(io, request)(**body))
        return dict(zip(("success", "message", "ranks"), values or (), strict=False))

    def close(self):
        super().close()
        self._sglang.shutdown()


REQUESTS = {
    "pause_generation": ("PauseGenerationReqInput", "pause_generation"),
    "continue_generation": ("ContinueGenerationReqInput", "continue_generation"),
    "begin_weight_update": ("BeginWeightUpdateReqInput", "begin_weight_update"),
    "end_weight_update": ("EndWeightUpdateReqInput", "end_weight_update"),
    "update_weights_from_tensor": (
        "UpdateWeightsFromTensorReqInput",
        "update_weights_from_tensor",
    ),
    "update_weight_version": ("UpdateWeightVersionReqInput", "update_weight_version"),
    "weights_checker": ("CheckWeightsReqInput", "check_weights"),
}
