"""E2: Adam with a gradient-norm clip, closer to what trainers run.

Learning rates 0.003 to 0.3 were tried on none, pg, ppo and dual clip: at 0.03 ppo is healthy up to lag 48, at 0.1 it
fails at lag 1; at 0.04 all are healthy at lag 1 and lag is what fails.
"""

QUESTION = (
    "Does the picture of E1 survive Adam (0.9, 0.98) and a gradient-norm clip, "
    "with longer runs and a larger lag?"
)
VERSION = 3
SETTINGS = {
    "lags": ("1", "4", "8", "24", "48"),
    "training": {"optimizer": "adam", "lr": 0.04, "grad_clip": 1.0, "steps": 400},
}
