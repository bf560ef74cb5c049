"""Experiments by name: a QUESTION, a VERSION that rises when its numbers may change, and SETTINGS,
what differs from the defaults of `config.Config`."""

from __future__ import annotations

from types import ModuleType

from simlab.simulator.experiments import (
    catalogue,
    catalogue_adam,
    centering,
    centering_adam,
    clip_cost,
    e0,
    e1,
    e2,
    e3,
    features,
    horizon,
    lag_range,
    null,
    pull_back,
    sat_gates,
    sat_kernel,
    sat_scope,
    tasks,
)

EXPERIMENTS: dict[str, ModuleType] = {
    "catalogue": catalogue,
    "catalogue_adam": catalogue_adam,
    "centering": centering,
    "centering_adam": centering_adam,
    "clip_cost": clip_cost,
    "e0": e0,
    "e1": e1,
    "e2": e2,
    "e3": e3,
    "features": features,
    "horizon": horizon,
    "lag_range": lag_range,
    "null": null,
    "pull_back": pull_back,
    "sat_gates": sat_gates,
    "sat_kernel": sat_kernel,
    "sat_scope": sat_scope,
    "tasks": tasks,
}
