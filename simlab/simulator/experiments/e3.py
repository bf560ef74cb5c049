"""E3: the mismatch of the SAT paper's runs: mean |d| near 0.01 at lag 1, sparse heavy tails, q inside the radii.

There q of the batch is 0.03 to 0.2 nats, and SAT clips tokens that PPO keeps. The fixed radii are those at
which PPO clips where SAT does at such a q (theory, claim 10): 0.05 at q = 0.03, 0.1 at 0.1.
"""

QUESTION = (
    "Where SAT's rule acts, what does it cost and gain against PPO, at its radius and at SAT's?"
)
VERSION = 1
METHODS = (
    "ppo",
    "sat",
    "sat-random=sat_open:gate=random",
    "ppo-0.1=ppo:eps_low=0.1,eps_high=0.1",
    "ppo-0.05=ppo:eps_low=0.05,eps_high=0.05",
)
SETTINGS = {
    "methods": METHODS,
    "lags": ("1", "8", "24"),
    "seeds": 96,
    "noise": ("router:scale=0.02",),
    "world": {"feature_scale": 0.5},
    "training": {"lr": 0.7, "steps": 400},
}
