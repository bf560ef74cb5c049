"""catalogue_adam: every stabilizer of the registry in E2's setting."""

from simlab.simulator.experiments import catalogue, e2

QUESTION = "Does the picture of the catalogue survive Adam (0.9, 0.98) and a gradient-norm clip?"
VERSION = 3
SETTINGS = e2.SETTINGS | {"methods": catalogue.METHODS, "lags": ("1", "8", "48")}
