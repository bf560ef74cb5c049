"""Lag regimes: who sampled the batch of a step. The same objects decide here and on a cluster.

A regime has `broadcast_now(step)`, `version(step)` and declares `largest_age`; a test measures it.
Lag is injected by indexing stored behaviour tables, never by sleeping.
"""

from __future__ import annotations

from simlab.lag.interval import Interval
from simlab.lag.sync import Sync

LAGS = {
    "interval": Interval,
    "sync": Sync,
}


def regime(lag: int, in_flight: int = 1) -> Interval | Sync:
    """The regime of a configured lag: 0 is synchronous, n >= 1 broadcasts every n steps."""
    return Sync() if lag == 0 else Interval(lag, in_flight)
