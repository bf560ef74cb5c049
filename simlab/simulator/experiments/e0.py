"""E0: the regime map of E1's world, method x lag x learning rate."""

from simlab.simulator.experiments import e1

QUESTION = "Up to which learning rate is each stabilizer stable, and how does lag close the range?"
VERSION = 1
METHODS = (
    "ppo",
    "none",
    "pg",
    "ppo-dual=ppo:dual_clip=3",
    "sat",
    "dppo",
    "icepop",
    "kpop",
    "tis",
    "gspo",
)
SETTINGS = e1.SETTINGS | {
    "methods": METHODS,
    "lags": ("1", "8", "24"),
    "seeds": 12,
    "draws": 2,
    "sweep": ("training.lr=1,2,4,8,16,32,64",),
}
