"""null: learning rate 0. The policy provably does not move; what is cut is cut by noise alone."""

QUESTION = "How much of each trust region is spent on engine noise, when nothing is learned?"
VERSION = 2
SETTINGS = {"lags": ("1",), "training": {"lr": 0.0, "steps": 60}}
