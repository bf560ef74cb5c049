"""The record of tokens and everything that is computed on it. Imports torch, numpy and itself."""
