"""Settings in layers: an experiment's own, the small version of it, a preset, and whatever lies above."""

from __future__ import annotations

from simlab.core.advantages import PRESETS
from simlab.core.arguments import check_name
from simlab.simulator.experiments import EXPERIMENTS

QUICK = {"lags": ("1", "8"), "seeds": 12, "training": {"steps": 60}}


def layered(experiment: str, quick: bool = False, preset: str | None = None) -> dict:
    """What an experiment changes, then `quick`, then a preset. Raises ValueError for an unknown name."""
    check_name("experiment", experiment, EXPERIMENTS)
    settings = merge(dict(EXPERIMENTS[experiment].SETTINGS), QUICK if quick else {})
    if preset is not None:
        check_name("preset", preset, PRESETS)
        settings = merge(settings, {"training": PRESETS[preset]})
    return settings


def merge(below: dict, above: dict) -> dict:
    """`above` wins, table by table."""
    tables = [k for k in above if isinstance(above[k], dict) and isinstance(below.get(k), dict)]
    return below | above | {k: merge(below[k], above[k]) for k in tables}
