"""lag_range: E0's map over ten lags and three learning rates."""

from simlab.simulator.experiments import e0

QUESTION = "At which lag does each stabilizer's stable range close?"
VERSION = 1
SETTINGS = e0.SETTINGS | {
    "lags": ("0", "1", "2", "4", "6", "8", "12", "16", "24", "32"),
    "sweep": ("training.lr=4,16,64",),
}
