"""The public names; each is loaded when it is first used, so that `import simlab` loads nothing."""

from importlib import import_module

PUBLIC = {
    "Stabilizer": "simlab.stabilizers",
    "TokenBatch": "simlab.core.tokens",
    "audit": "simlab.audit.audit",
    "bind": "simlab.stabilizers",
    "compare": "simlab.tools.python",
    "fuse": "simlab.stabilizers.fused",
    "global_counts": "simlab.core.per_response",
    "mean": "simlab.core.aggregate",
    "mismatch": "simlab.core.mismatch",
    "token_log_probs": "simlab.core.logits",
    "token_mean": "simlab.core.aggregate",
}
__all__ = [*PUBLIC]


def __getattr__(name: str):
    if name not in PUBLIC:
        raise AttributeError(f"simlab has no {name}; there are {', '.join(PUBLIC)}")
    return getattr(import_module(PUBLIC[name]), name)
