"""clip_cost: a world in which no lag is harmful, so that whatever a rule cuts is missed."""

QUESTION = "What does cutting tokens cost where nothing fails?"
VERSION = 3  # this was E1
SETTINGS = {}
