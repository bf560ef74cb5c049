"""`scaleup compare`: every run of a recipe and one report. Imports run and recipe."""
