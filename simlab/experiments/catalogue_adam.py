"""catalogue_adam: every stabilizer of the registry in E2's setting."""

from simlab.experiments import catalogue, e2

QUESTION = "Does the picture of the catalogue survive Adam (.9, .98) and a gradient-norm clip?"
VERSION = 1
SETTINGS = e2.SETTINGS | {"methods": catalogue.METHODS, "lags": ("1", "8", "48")}
