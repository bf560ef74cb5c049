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
