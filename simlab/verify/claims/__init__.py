"""All claims that take an instance, by number: those of theory/ on policies, and 9 to 11 on losses, which run
the registry's own functions."""

from __future__ import annotations

from simlab.verify.claims import c09_sat_geometry, c10_sat_is_a_radius, c11_divergence_masks
from theory.claims import CLAIMS as ON_POLICIES
from theory.search import Claim

ON_LOSSES: tuple[Claim, ...] = (c09_sat_geometry, c10_sat_is_a_radius, c11_divergence_masks)
CLAIMS: dict[int, Claim] = dict(
    sorted((ON_POLICIES | {claim.NUMBER: claim for claim in ON_LOSSES}).items())
)
