"""features: the map of `tasks` for policies with fewer and more shared features, and other logit scales."""

from simlab.simulator.experiments import tasks

QUESTION = "Which conclusions of E0 survive another policy?"
VERSION = 1
SETTINGS = tasks.MAP | {
    "world": {},
    "training": {"lr": 4.0},
    "sweep": ("world.features=8,24,96", "world.feature_scale=0.5,1,2"),
}
