"""E1: plain SGD, no gradient clip."""

QUESTION = (
    "How do stabilizers behave as policy lag grows, when SGD at a large learning rate "
    "lets every bad step through?"
)
VERSION = 2
SETTINGS = {}
