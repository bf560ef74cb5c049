"""Where ranks and engines go, on two nodes of a Ray cluster with eight fake GPUs each.

Run as a script, this file makes the cluster and prints what it found: Ray has one life in a process.
"""

import json
import os
import subprocess
import sys

import pytest
import ray
from ray.cluster_utils import Cluster

from scaleup.plan.layouts import bundles, nodes
from scaleup.recipe import load
from scaleup.run.placement import Placement
from simlab.study.settings import RunError
from simlab.study.strict import ConfigError

CUT = {"trainer__ranks": 8, "trainer__ep": 8, "gpus_per_node": 4, "engine__count": 1}


def world(gpus=16, **changes):
    """The world of the recipe for so many GPUs."""
    more = {f"world.{name.replace('__', '.')}": x for name, x in changes.items()}
    return load(f"qwen3_30b_a3b_{gpus}gpu", more).world


class Here:
    """Says where it is."""

    def where(self):
        """(node, its GPUs)"""
        found = ray.get_runtime_context()
        return found.get_node_id(), found.get_accelerator_ids()["GPU"]


def placed(recipe):
    """Ranks, engines, and the last engine once it was killed and started again; engines come first."""
    placement, make = Placement(recipe, 60), ray.remote(Here)
    n = recipe.engine.count
    options = [placement.engine(i) for i in range(n)]
    options += [placement.rank(i) for i in range(recipe.trainer.ranks)]
    actors = [make.options(**x).remote() for x in options]
    found = ray.get([a.where.remote() for a in actors], timeout=100)
    ray.kill(actors[n - 1])
    actors[n - 1] = make.options(**placement.engine(n - 1)).remote()
    again = ray.get(actors[n - 1].where.remote(), timeout=100)
    for actor in actors:
        ray.kill(actor)
    placement.close()
    return {"engines": found[:n], "ranks": found[n:], "again": again}


def refused(recipe, timeout):
    """The sentence of a placement that is refused."""
    try:
        Placement(recipe, timeout)
    except RunError as error:
        return str(error)


def measure():
    """All cases, on one cluster."""
    cluster = Cluster(True, head_node_args={"num_cpus": 1, "num_gpus": 8})
    cluster.add_node(num_cpus=1, num_gpus=8)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    found = {"16gpu": placed(world()), "cut": placed(world(**CUT)), "many": refused(world(32), 60)}
    held = Placement(world(), 60)
    found["taken"] = refused(world(), 1)
    held.close()
    Placement(world(), 60).close()  # what was refused holds nothing
    ray.shutdown()
    cluster.shutdown()
    return found


@pytest.fixture(scope="module")
def found():
    """`measure` in a process of its own."""
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-W", "ignore", __file__]
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout.splitlines()[-1])


def test_an_expert_parallel_group_shares_a_node(found):
    """Eight ranks on one node, two engines of four GPUs on the other, and no GPU twice."""
    ranks, engines = found["16gpu"]["ranks"], found["16gpu"]["engines"]
    assert len({node for node, _ in ranks}) == 1
    assert len({node for node, _ in engines}) == 1
    assert ranks[0][0] != engines[0][0]
    used = [(node, gpu) for node, gpus in (*ranks, *engines) for gpu in gpus]
    assert len(used) == len(set(used)) == 16


def test_a_tensor_parallel_group_shares_a_node(found):
    """Where an expert-parallel group is larger than a node it is cut, at tensor-parallel groups."""
    assert bundles(world(**CUT)) == [("trainer", 4)] * 2 + [("engine", 4)]
    ranks = found["cut"]["ranks"]
    assert len({node for node, _ in ranks[:4]}) == len({node for node, _ in ranks[4:]}) == 1


def test_an_engine_comes_back_where_it_was(found):
    """The GPUs of a dead engine are kept for the one that takes its place."""
    node, gpus = found["16gpu"]["again"]
    old, held = found["16gpu"]["engines"][-1]
    assert (node, sorted(gpus)) == (old, sorted(held))


def test_too_few_gpus_are_said(found):
    """At once where there are none; after the time-out where they are taken."""
    assert found["many"] == "the recipe needs 32 GPUs, the Ray cluster has 16"
    assert found["taken"].startswith("no placement of the recipe within 1 s: ")
    assert "(trainer 8, engine 4, engine 4)" in found["taken"]


def test_bundles_and_nodes():
    """By hand: what must share a node, and how many nodes hold it."""
    assert bundles(load("tiny_cpu").world) == []
    assert nodes(load("tiny_cpu").world) == 0
    assert bundles(world(32)) == [("trainer", 8)] * 2 + [("engine", 4)] * 4
    assert nodes(world(32)) == 4
    # three engines of 3 GPUs take two nodes of 8 with two ranks in between
    odd = {"engine__tp": 3, "engine__count": 3, "trainer__ranks": 2, "trainer__tp": 2}
    assert nodes(world(trainer__ep=1, **odd)) == 2
    # 15 + 2 GPUs: five engines of 3 take three nodes, two on each
    assert nodes(world(trainer__ep=1, **(odd | {"engine__count": 5}))) == 3
    # ranks 4 to 7 share a tensor: expert-parallel groups of 6 would cut them at rank 6
    odd = {"trainer__ranks": 12, "trainer__tp": 4, "trainer__ep": 6}
    assert bundles(world(**odd))[:3] == [("trainer", 4)] * 3
    with pytest.raises(ConfigError, match=r"world\.trainer: tp 16 is more than the 8 GPUs"):
        bundles(world(trainer__ranks=16, trainer__tp=16))


if __name__ == "__main__":
    print(json.dumps(measure()))
