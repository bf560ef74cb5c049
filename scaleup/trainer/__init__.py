"""Megatron-Core: a rank, its optimizer step, checkpoints, routing replay. Imports models and recipe."""
