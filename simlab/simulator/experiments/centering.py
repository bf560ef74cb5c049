"""centering: score centering alone, with a cap, with a band and on bases, each beside the same loss without it.

Its paper claims that quantisation of the engine is where it shines, and staleness only in composition. A placebo
subtracts the same coefficients, on other tokens. The world is E1's; centering_adam has E2's.
"""

from simlab.simulator.experiments import e1

QUESTION = "Does score centering help, at which lag and under which engine noise, and more than its placebo?"
VERSION = 1
CENTERED = {  # by label: the loss without centering, and the mode that its weight asks for
    "none": ("none", "none"),
    "cap": ("none+cap:max=2", "cap"),
    "band": ("none+band:low=0.5,high=5", "band"),
    "ppo": ("ppo", "clip"),
    "tis": ("tis", "cap"),
    "icepop": ("icepop", "band"),
}
METHODS = tuple(
    arm
    for label, (base, mode) in CENTERED.items()
    for arm in (
        base if label == base else f"{label}={base}",
        f"{label}-sc={base}+centering:mode={mode}",
        f"{label}-placebo={base}+centering:mode={mode},placebo=true",
    )
)
SETTINGS = e1.SETTINGS | {
    "methods": METHODS,
    "lags": ("1", "8", "24"),
    "seeds": 48,
    "draws": 2,
    "noise": ("grid", "router:scale=0.05", "gaussian"),
    "sweep": ("grid.dtype=bf16,fp8", "gaussian.scale=0,0.2"),
}
