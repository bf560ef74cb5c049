"""sat_kernel: SAT's quantile, exponent and kernel where its rule acts (the world of E3)."""

from simlab.simulator.experiments import e3

QUESTION = (
    "Does it matter how SAT contracts: which tokens (alpha), how fast (exponent), by which kernel?"
)
VERSION = 1
KERNELS = {
    "hill": "",
    "hill1": ",exponent=1",
    "hill4": ",exponent=4",
    "exp": ",shape=exponential",
    "linear": ",shape=linear",
    "cut": ",factor=0",
}
METHODS = (
    "ppo",
    *(
        f"{kernel}-{alpha}=sat:alpha={alpha}{arguments}"
        for kernel, arguments in KERNELS.items()
        for alpha in (0.5, 0.8, 0.9, 0.99)
    ),
    *(f"random-{1 - a:.1g}=sat_open:gate=random,factor=0,rate={1 - a:.1g}" for a in (0.5, 0.9)),
)
SETTINGS = e3.SETTINGS | {"methods": METHODS, "seeds": 24}
