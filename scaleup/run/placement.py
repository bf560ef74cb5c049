"""Which node of a Ray cluster an engine or a trainer rank runs on.

    placement = Placement(world, timeout=600)         # reserves the GPUs of the recipe, all or none
    placement.rank(i), placement.engine(i)            # options of their actors

Ranks that communicate much share a node: those of a tensor-parallel group always, those of an
expert-parallel group where a node is large enough. An engine stays on one node, and an engine that is
restarted gets the GPUs of the one that died. On a CPU nothing is reserved.
"""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from scaleup.plan.layouts import bundles
from scaleup.world import EngineWorld
from simlab.study.settings import RunError


class Placement:
    """The GPUs of a world, as a Ray placement group.

    Raises RunError if the cluster has too few, or if they are not free within `timeout` seconds.
    """

    def __init__(self, world: EngineWorld, timeout: float):
        self.wanted = bundles(world)
        self.first_engine = [kind for kind, _ in self.wanted].count(
            "trainer"
        )  # index of its bundle
        self.group = None
        if not self.wanted:
            return
        total = sum(n for _, n in self.wanted)
        if (present := int(ray.cluster_resources().get("GPU", 0))) < total:
            raise RunError(f"the recipe needs {total} GPUs, the Ray cluster has {present}")
        self.group = ray.util.placement_group([{"GPU": n} for _, n in self.wanted], strategy="PACK")
        if not self.group.wait(timeout):
            self.close()
            shares = ", ".join(f"{kind} {n}" for kind, n in self.wanted)
            raise RunError(
                f"no placement of the recipe within {timeout:g} s: each of these must fit on one node ({shares}); "
                "`ray status` says what is taken"
            )

    def rank(self, i: int) -> dict:
        """Options of trainer rank i."""
        if self.group is None:
            return {"num_cpus": 0}
        return self._on(i // self.wanted[0][1], gpus=1)

    def engine(self, i: int) -> dict:
        """Options of engine i."""
        if self.group is None:
            return {"num_cpus": 0}
        bundle = self.first_engine + i
        return self._on(bundle, gpus=self.wanted[bundle][1])

    def _on(self, bundle: int, gpus: int) -> dict:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        return {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": strategy}

    def close(self) -> None:
        """Give the GPUs back."""
        if self.group is not None:
            ray.util.remove_placement_group(self.group)
            self.group = None
