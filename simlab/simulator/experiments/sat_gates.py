"""sat_gates: gates of one size and one strength (factor 0, a tenth of the tokens) in the world of E3."""

from simlab.simulator.experiments import e3

QUESTION = (
    "Is it the tail of |d| that has to be contracted, or would any tenth of the tokens do as well?"
)
VERSION = 1
METHODS = (
    "ppo",
    "tail=sat:factor=0",
    "mass=sat_open:gate=mass,factor=0",
    "tv=sat_open:gate=tv,factor=0",
    "position=sat_open:gate=stratum,factor=0",
    "random=sat_open:gate=random,factor=0",
    "inverted=sat_open:gate=inverted,factor=0",
)
SETTINGS = e3.SETTINGS | {"methods": METHODS, "seeds": 48}
