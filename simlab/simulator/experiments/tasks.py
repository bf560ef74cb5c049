"""tasks: a small map for every task, in E1's world; what is true in one only is a property of the task.

The fourth task, tree, has a state per history: too many at ten tokens. Run it as
`--experiment tasks --task tree --horizon 4 --vocab 4 --sweep training.lr=4,16,64`.
"""

from simlab.simulator.experiments import e1

QUESTION = "Which conclusions of E0 survive another task?"
VERSION = 1
METHODS = (
    "ppo",
    "none",
    "pg",
    "ppo-dual=ppo:dual_clip=3",
    "sat",
    "dppo",
    "kpop",
    "gspo",
    "gspo-0.2=gspo:eps_low=0.2,eps_high=0.2",
)
MAP = e1.SETTINGS | {"methods": METHODS, "lags": ("1", "8"), "seeds": 12, "draws": 2}
SETTINGS = MAP | {"sweep": ("world.task=health,needle,modsum", "training.lr=4,16,64")}
