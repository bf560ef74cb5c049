"""centering_adam: the arms of centering in E2's setting."""

from simlab.simulator.experiments import centering, e2

QUESTION = "Does the picture of score centering survive Adam (0.9, 0.98) and a gradient-norm clip?"
VERSION = 1
SETTINGS = centering.SETTINGS | {"training": e2.SETTINGS["training"], "world": {}}
