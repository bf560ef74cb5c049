"""sat_scope: SAT with q of the batch, of a rank, of a micro-batch, of a position, of the steps before (world of E3)."""

from simlab.simulator.experiments import e3

QUESTION = "Does it matter over which tokens SAT takes its quantile?"
VERSION = 1
METHODS = (
    "ppo",
    "batch=sat",
    "rank=sat_open:gate=group,strata=2",
    "micro=sat_open:gate=group,strata=8",
    "position=sat_open:gate=stratum,strata=10",
    "ema=sat:ema=0.9",
)
SETTINGS = e3.SETTINGS | {"methods": METHODS, "seeds": 48}
