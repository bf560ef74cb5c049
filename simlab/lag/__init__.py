"""Lag regimes: who sampled the batch of a step. The same objects decide here and on a cluster.

    largest_age              no token is older, in optimizer steps, when it is trained on; a test measures it
    broadcast_now(step)      whether the weights before optimizer step `step` are sent to the engine
    on_broadcast             "drain": wait for the answers in flight before weights are replaced
                             "retract": answers in flight go on under the new weights
    may_start(batch, served) whether the batch of step `batch` may be sampled while version `served` is
    version(step)            oldest weight version behind the batch of `step`
    versions(step, horizon)  the version behind each position of its answers, in the simulator

A version is the number of optimizer steps that made the weights. In the simulator lag is injected by
indexing stored behaviour tables, never by sleeping.
"""

from __future__ import annotations

from simlab.lag.fully_async import FullyAsync
from simlab.lag.interval import Interval
from simlab.lag.sync import Sync

LAGS = {
    "fully_async": FullyAsync,
    "interval": Interval,
    "sync": Sync,
}
Regime = FullyAsync | Interval | Sync
