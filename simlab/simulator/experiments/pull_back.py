"""pull_back: every clip method with and without a dual clip, in the world of E1.

Where A < 0 and r > 1 the clip never binds: the gradient r A pulls the token back, with a weight that grows with r.
A dual clip drops it beyond c. It is in no published table but PPO's.
"""

from simlab.simulator.experiments import e1

QUESTION = "Is it the pull-back branch (A < 0, r > 1) that fails, whatever the method?"
VERSION = 1
BASES = {
    "ppo": "ppo:",
    "sat": "sat:",
    "dppo": "dppo:",
    "icepop": "icepop:",
    "kpop": "kpop:",
    "gspo-0.2": "gspo:eps_low=0.2,eps_high=0.2,",
}
METHODS = (
    *(f"{label}={base}".rstrip(":,") for label, base in BASES.items()),
    *(f"{label}-dual={base}dual_clip=3" for label, base in BASES.items()),
    "cut=ppo:eps_low=0.05,eps_high=0.05,dual_clip=3",
)
SETTINGS = e1.SETTINGS | {"methods": METHODS, "lags": ("1", "8", "24"), "seeds": 48}
