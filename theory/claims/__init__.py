"""The claims on policies by number. Numbers 9 to 12 are on losses, run the registry's own and stand in
simlab/verify: claims/ and bias.py."""

from __future__ import annotations

from importlib import import_module

from theory.search import Claim

NAMES = (
    "c01_identity",
    "c02_sequence_tv",
    "c03_average_form",
    "c04_max_form",
    "c05_sharper_forms",
    "c06_support",
    "c07_envelope",
    "c08_sampled_action",
    "c13_scaling_laws",
    "c14_identifiability",
)
MODULES = [import_module(f"{__name__}.{name}") for name in NAMES]
CLAIMS: dict[int, Claim] = {claim.NUMBER: claim for claim in MODULES}
