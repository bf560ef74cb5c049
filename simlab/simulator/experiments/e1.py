"""E1: plain SGD, no gradient clip, in a world where lag is the cause of failure.

The features are smaller and the learning rate larger than elsewhere: every arm learns at lag 1, and PPO
fails at lags 8 and 24. Chosen on none, pg, ppo and dual clip alone, then left as it is. Tried were
feature_scale 0.5 with lr 1 (nothing fails; J is lost to cutting) and 16.
"""

QUESTION = "Which stabilizers keep training stable as policy lag grows?"
VERSION = 3
SETTINGS = {"world": {"feature_scale": 0.5}, "training": {"lr": 16.0}}
