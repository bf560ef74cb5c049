"""Real engines under the losses of the core. Choices that recipes and the trainer share."""

QUANTILES = ("each_step", "pre_step", "ema", "local")
REPLAYS = ("none", "r2", "r3")
