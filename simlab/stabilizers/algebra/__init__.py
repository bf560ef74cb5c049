"""Compositions `base+term+...` of methods: statistics, corrections, their product, laws and words."""
