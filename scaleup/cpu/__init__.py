"""What SGLang misses on a machine without CUDA. With CUDA nothing here does anything.

`env()` names the environment of a process that imports SGLang, `prepare()` puts it into this one,
`activate()` is the target of the entry point `sglang.srt.plugins`, which SGLang calls in all of its
processes. `mcore` holds the same for Megatron-Core. Measured with SGLang 0.5.23.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

SITE = str(Path(__file__).parent / "site")  # stubs of two packages that SGLang only imports


def env(base: dict[str, str] | None = None) -> dict[str, str]:
    """Variables to add for a process that runs SGLang; empty with CUDA. `base` is its environment
    (default: this one), whose PYTHONPATH and OMP_NUM_THREADS are kept."""
    if torch.cuda.is_available():
        return {}
    base = os.environ if base is None else base
    path = [SITE, *filter(None, base.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        # more threads fight SGLang's own processes for the cores: 20 times slower on two of them
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
    }


def prepare() -> None:
    """Set `env()` here, before SGLang is imported. Its processes are spawned and inherit it."""
    found = env()
    os.environ.update(found)
    if found and SITE not in sys.path:
        sys.path.insert(0, SITE)


def activate() -> None:
    """The plugin: the routed-experts buffer is plain memory, which SGLang would pin by a CUDA call,
    and `enable_deterministic_inference` means that every answer draws from a seed of its own."""
    if torch.cuda.is_available():
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def plain(dims, dtype, device, pin_memory=False, allocator=None):
        return torch.empty(dims, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = plain
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode",  # Triton kernels
        lambda enable_bmm=True: None,
        HookType.REPLACE,
    )
    HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", draw, HookType.REPLACE)


def draw(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token `[n, 1]` from each row of log-probs `[n, V]`, a function of the row, its seed and the
    position in its answer alone: the largest of log p - log(-log u) for hashed uniforms u."""
    key = _mix(_mix(seed.long()) ^ positions.long())[:, None]
    bits = _mix(key + torch.arange(logprobs.shape[-1]) * GOLDEN)
    u = ((bits >> 11) & (2**53 - 1)).double().add_(0.5) * 2.0**-53
    return (logprobs.double() - u.log_().neg_().log_()).argmax(-1, keepdim=True)


GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014) on int64, whose products wrap."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return x ^ ((x >> 31) & (2**33 - 1))
