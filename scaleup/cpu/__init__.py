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
    """The plugin: the routed-experts buffer is plain memory. SGLang would pin it by a CUDA call."""
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    def plain(dims, dtype, device, pin_memory=False, allocator=None):
        return torch.empty(dims, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = plain
