"""Where ranks and engines go, on two nodes of a Ray cluster that say they have eight GPUs each."""

from contextlib import contextmanager

import pytest
import ray
from ray.cluster_utils import Cluster

from scaleup.layouts import bundles, nodes
from scaleup.places import Places
from scaleup.recipe import load
from simlab.config import ConfigError, RunError


@pytest.fixture(scope="module")
def two_nodes():
    """A cluster on this machine; its GPUs are numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(True, head_node_args={"num_cpus": 1, "num_gpus": 8})
        cluster.add_node(num_cpus=1, num_gpus=8)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def actor():
    """A class that says where it runs; made here, as a worker cannot import this file."""

    class Here:
        def where(self):
            found = ray.get_runtime_context()
            return found.get_node_id(), found.get_accelerator_ids()["GPU"]

    return ray.remote(Here)


def world(gpus=16, **changes):
    """That of the recipe for so many GPUs."""
    more = {f"world.{name.replace('__', '.')}": x for name, x in changes.items()}
    return load(f"qwen3_30b_a3b_{gpus}gpu", more).world


@contextmanager
def started(recipe):
    """(places, actors, ranks, engines), the last two as (node, GPUs); engines are asked for first."""
    places, make, actors = Places(recipe, 60), actor(), []
    try:
        actors += [make.options(**places.engine(i)).remote() for i in range(recipe.engine.count)]
        actors += [make.options(**places.rank(i)).remote() for i in range(recipe.trainer.ranks)]
        found = ray.get([a.where.remote() for a in actors], timeout=100)
        yield places, actors, found[recipe.engine.count :], found[: recipe.engine.count]
    finally:
        for each in actors:
            ray.kill(each)
        places.close()


def test_an_expert_parallel_group_shares_a_node(two_nodes):
    """Eight ranks on one node, two engines of four GPUs on the other, and no GPU twice."""
    with started(world()) as (_, _, ranks, engines):
        assert len({node for node, _ in ranks}) == 1
        assert len({node for node, _ in engines}) == 1
        assert ranks[0][0] != engines[0][0]
        used = [(node, gpu) for node, gpus in (*ranks, *engines) for gpu in gpus]
        assert len(used) == len(set(used)) == 16


def test_a_tensor_parallel_group_shares_a_node(two_nodes):
    """Where an expert-parallel group is larger than a node it is cut, at tensor-parallel groups."""
    recipe = world(trainer__ranks=8, trainer__ep=8, gpus_per_node=4, engine__count=1)
    assert bundles(recipe) == [("trainer", 4)] * 2 + [("engine", 4)]
    with started(recipe) as (_, _, ranks, _):
        assert len({node for node, _ in ranks[:4]}) == len({node for node, _ in ranks[4:]}) == 1


def test_an_engine_comes_back_where_it_was(two_nodes):
    """The GPUs of a dead engine are kept for the one that takes its place."""
    with started(world()) as (places, actors, _, engines):
        ray.kill(actors[1])
        actors[1] = actor().options(**places.engine(1)).remote()
        assert ray.get(actors[1].where.remote(), timeout=100) == engines[1]


def test_too_few_gpus_are_said_at_once(two_nodes):
    """And so are enough that are taken."""
    with pytest.raises(RunError, match="the recipe needs 32 GPUs, the Ray cluster has 16"):
        Places(world(32), 60)
    held = Places(world(), 60)
    with pytest.raises(RunError, match=r"no place for the recipe within 1 s: .*\(trainer 8, eng"):
        Places(world(), 1)
    held.close()
    Places(world(), 60).close()


def test_bundles_and_nodes():
    """By hand: what must share a node, and how many nodes hold it."""
    assert bundles(load("tiny_cpu").world) == []
    assert nodes(load("tiny_cpu").world) == 0
    assert bundles(world(32)) == [("trainer", 8)] * 2 + [("engine", 4)] * 4
    assert nodes(world(32)) == 4
    # three engines of 3 GPUs take two nodes of 8 with two ranks in between
    odd = {"engine__tp": 3, "engine__count": 3, "trainer__ranks": 2, "trainer__tp": 2}
    assert nodes(world(trainer__ep=1, **odd)) == 2
    # nine and seven of 8 + 8 GPUs would fit, but five engines of 3 do not
    assert nodes(world(trainer__ep=1, **(odd | {"engine__count": 5}))) == 3
    with pytest.raises(ConfigError, match=r"world\.trainer: tp 16 is more than the 8 GPUs"):
        bundles(world(trainer__ranks=16, trainer__tp=16))
