"""The claims by number; number 12, the bias of each stabilizer, needs the losses: simlab/bias.py."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

NAMES = (
    "c01_identity",
    "c02_sequence_tv",
    "c03_average_form",
    "c04_max_form",
    "c05_sharper_forms",
    "c06_support",
    "c07_envelope",
    "c08_sampled_action",
    "c09_sat_geometry",
    "c10_sat_is_a_radius",
    "c11_divergence_masks",
    "c13_scaling_laws",
    "c14_identifiability",
)
MODULES = [import_module(f"{__name__}.{name}") for name in NAMES]
CLAIMS: dict[int, ModuleType] = {claim.NUMBER: claim for claim in MODULES}
