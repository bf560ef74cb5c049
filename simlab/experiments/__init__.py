"""Experiments by name: a QUESTION, a VERSION that rises when its numbers may change, and SETTINGS,
what differs from the defaults of `config.Config`."""

from __future__ import annotations

from types import ModuleType

from simlab.experiments import catalogue, catalogue_adam, e1, e2, null

EXPERIMENTS: dict[str, ModuleType] = {
    "catalogue": catalogue,
    "catalogue_adam": catalogue_adam,
    "e1": e1,
    "e2": e2,
    "null": null,
}
