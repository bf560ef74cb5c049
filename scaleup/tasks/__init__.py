"""Prompts and rewards of language models, and the worker processes of their verifiers. Imports models."""
