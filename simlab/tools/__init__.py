"""Small commands around the others: listings, skeletons, run folders on a terminal, comparisons from Python.

May import everything but `simlab.commands`, which may import it; nothing else does.
"""
