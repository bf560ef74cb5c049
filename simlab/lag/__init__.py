"""Lag regimes: which weights sampled the batch of a step. Imports the standard library and itself."""

from __future__ import annotations

from collections.abc import Callable

from simlab.lag.fully_async import FullyAsync
from simlab.lag.interval import Interval
from simlab.lag.regime import Regime
from simlab.lag.sync import Sync

__all__ = ["LAGS", "FullyAsync", "Interval", "Regime", "Sync"]

LAGS: dict[str, Callable[..., Regime]] = {
    "fully_async": FullyAsync,
    "interval": Interval,
    "sync": Sync,
}
