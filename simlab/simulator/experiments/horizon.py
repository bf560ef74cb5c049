"""horizon: the map of `tasks` for answers of 10, 30 and 100 tokens."""

from simlab.simulator.experiments import tasks

QUESTION = (
    "Which conclusions of E0 survive longer answers, and what becomes of radii of a sequence?"
)
VERSION = 1
SETTINGS = tasks.MAP | {"sweep": ("world.horizon=10,30,100", "training.lr=4,16,64")}
