"""Settings of a comparison of a few seconds."""

TINY = {
    "methods": ("ppo", "none"),
    "lags": ("0", "1"),
    "seeds": 2,
    "draws": 2,
    "world": {"prompts": 2, "horizon": 3, "vocab": 3, "answers": 2, "features": 4},
    "training": {"steps": 8},
}
