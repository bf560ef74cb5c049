"""E2: Adam with a gradient-norm clip, closer to what trainers run."""

QUESTION = (
    "Does the picture of E1 survive Adam (.9, .98) and a gradient-norm clip, "
    "with longer runs and a larger lag?"
)
VERSION = 2
SETTINGS = {
    "lags": ("1", "4", "8", "24", "48"),
    "training": {"optimizer": "adam", "lr": 0.03, "grad_clip": 1.0, "steps": 400},
}
