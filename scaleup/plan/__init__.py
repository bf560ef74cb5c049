"""What fits: layouts, memory of ranks, engines and hosts. Imports models and recipe."""
