"""The memory calculator: counts against models that were built, the recipes, and what is refused."""

import gc
import math
import subprocess
import sys
import time
from dataclasses import replace
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
from ray import cloudpickle
from ray._private.tensor_serialization_utils import zero_copy_tensors_reducer

from scaleup.engines_report import dry_run
from scaleup.engines_report.launch import shared
from scaleup.models import families, slots, tiny, weights
from scaleup.models.families import FAMILIES
from scaleup.models.megatron import Layout, transformer_config
from scaleup.models.qwen import QWEN3_30B_A3B
from scaleup.plan import host_memory, memory, table
from scaleup.plan.layouts import config
from scaleup.recipe import RECIPES, load
from scaleup.rollout import checksums
from scaleup.rollout.sample import Sample
from scaleup.trainer.responses import Response
from scaleup.world import TrainerSpec
from simlab.stabilizers import bind
from simlab.study.strict import ConfigError

CLUSTER = "qwen3_30b_a3b"


@pytest.fixture
def two():
    """Two processes that share a model."""
    return shared(2)


def of_trainer(changes, recipe="tiny_cpu"):
    """The one pipeline stage of a recipe with these changes of the trainer."""
    (found,) = memory.fits(
        load(recipe, {f"world.trainer.{k}": v for k, v in changes.items()})
    ).ranks
    return found


# ---------------------------------------------------------------- parameters
@pytest.mark.parametrize(
    ("kind", "tie", "layout", "world"),
    [("qwen3_moe", False, Layout(2, 2, 2), 4), ("llama", False, Layout(2), 4),
     *((kind, True, Layout(1, 2), 2) for kind, family in FAMILIES.items() if not family.moe)],
)  # fmt: skip
def test_the_parameters_of_every_rank(kind, tie, layout, world):
    """As in the dry run, which builds the model of each rank."""
    hf = tiny.config(kind, tie=tie)
    run = dry_run.check_layout(hf, layout, world, (12, 20), bind("ppo"))
    stages = memory.parameters(hf, layout.tp, layout.pp, layout.ep)
    assert [sum(x) for x in stages for _ in range(world // layout.pp)] == run.parameters
    at = TrainerSpec(ranks=world, tp=layout.tp, pp=layout.pp, ep=layout.ep)
    ranks = memory.trainer(load("tiny_cpu"), hf, at, 12)
    assert [x.parameters for x in ranks for _ in x.ranks] == run.parameters


def test_the_parameters_of_the_whole_model():
    """Published size, and a whole number of copies over the ranks of every layout of the dry run."""
    sizes = {name: math.prod(shape) for name, shape in slots.names(QWEN3_30B_A3B).items()}
    assert sum(sizes.values()) == 30_532_122_624
    assert memory.parameters(QWEN3_30B_A3B) == [(1_541_093_376, 28_991_029_248)]
    for layout, world in dry_run.LAYOUTS:
        stages = memory.parameters(QWEN3_30B_A3B, layout.tp, layout.pp, layout.ep)
        replicas = world // layout.pp
        assert sum(e for _, e in stages) * layout.ep == 28_991_029_248
        small = (
            48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
        )  # norms and routers, whole on TP ranks
        dense = sum(d for d, _ in stages) * replicas
        assert dense == replicas * small + replicas // layout.tp * (1_541_093_376 - small)
    assert sum(memory.parameters(QWEN3_30B_A3B, ep=8)[0]) == 5_164_972_032  # of the dry run


# ---------------------------------------------------------------- a model that is there
def nbytes(tensors):
    """Bytes of tensors, a storage once."""
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()
    )


def built(layout, dtype, replay="none", **build):
    """Bytes on this rank after a step: of the trainer's parts, and of a batch by token of the row."""
    from scaleup.models.megatron import build as build_model
    from scaleup.models.megatron import start
    from scaleup.trainer.trainer import Settings, Trainer

    start(Layout(**layout))
    hf = tiny.config("qwen3_moe")
    model = build_model(hf, Layout(**layout), dtype=dtype, **build)
    weights.load(model, tiny.tensors(hf))
    trainer = Trainer(model, bind("ppo"), Settings(replay=replay, kl_coef=0.1))
    draw, n = torch.Generator().manual_seed(0), 256
    rows = [
        Response(
            torch.randint(512, (n,), generator=draw), 1, torch.randn(n - 1, generator=draw) - 6, 1.0,
            experts=torch.rand(n - 1, 2, 8, generator=draw).argsort(-1)[..., :2],
            fields={"age": torch.zeros(n - 1), "logp_ref": torch.zeros(n - 1) - 6},
        )
        for _ in range(8)
    ]  # fmt: skip
    micro = trainer.collate([rows])
    step = trainer.step(micro)
    parameters, adam = list(trainer.model.parameters()), 0
    for each in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        adam += sum(p.nbytes for g in each.shard_fp32_from_float16_groups for p in g)
        states = each.optimizer.state.values()
        adam += sum(x.nbytes for s in states for k, x in s.items() if k.startswith("exp_avg"))
    (m,), (b,) = micro, step.batches
    p = m.packed
    assert m.experts is None  # routes wait on the host
    tensors = [p.tokens, p.positions, m.target, m.at, m.logp]
    tensors += [*vars(m.b).values(), *vars(b).values(), *step.actives, *step.entropies]
    return {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.main_grad.nbytes for p in parameters),
        "Adam": adam,
        "token": nbytes([x for x in tensors if torch.is_tensor(x)]) / p.tokens.shape[1],
        "saved": gathered(trainer),
    }


def gathered(trainer):
    """Bytes of Adam's state that a checkpoint gathers on this rank, and of what it takes meanwhile."""
    from scaleup.trainer.checkpoint import _optimizers

    states, gather = [], torch.distributed.gather

    def slowly(*arguments):
        gather(*arguments)
        time.sleep(0.1)  # gloo lets go a moment later

    gc.collect()
    with (
        patch.object(torch.distributed, "gather", slowly),
        torch.profiler.profile(profile_memory=True) as profile,
    ):
        for optimizer in _optimizers(trainer):  # as `fully_reshardable` asks
            states.append(optimizer.get_parameter_state_dp_zero(use_gloo_comm=True))
    buffers = [x for state in states for x in (state or {}).values() if isinstance(x, dict)]
    held = nbytes(
        [x for b in buffers for e in b.values() for x in e.values() if torch.is_tensor(x)]
    )
    events = [x for x in profile.profiler.kineto_results.events() if x.name() == "[memory]"]
    events.sort(key=lambda x: x.start_ns())
    return held, max(accumulate(x.nbytes() for x in events))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [{}, {"ep": 2}, {"tp": 2, "ep": 2}])
def test_bytes_of_a_trainer(two, layout, dtype):
    """On two ranks after a step: weights, gradients and Adam's numbers exactly; what a save gathers."""
    found = two(built, layout, getattr(torch, dtype))
    at = of_trainer(layout | {"ranks": 2, "dtype": dtype})
    wanted, spec = at.gpu, TrainerSpec(ranks=2, dtype=dtype, **layout)
    for name in ("weights", "gradients"):
        assert [x[name] for x in found] == [wanted[name]] * 2
    assert sum(x["Adam"] for x in found) == 2 * wanted["Adam"]  # the cut is even up to a padding
    for i, rank in enumerate(found):
        of_adam, gathering, _ = host_memory.saved(at, i, spec)
        # a parameter is padded to 64 numbers
        assert rank["saved"][0] == pytest.approx(of_adam, rel=1e-3)
        assert rank["saved"][1] == pytest.approx(of_adam + gathering, rel=0.01)


@pytest.mark.parametrize("replay", ["none", "r2", "r3"])
def test_bytes_of_a_batch(two, replay):
    """What a token of the step keeps on the GPU: never more than counted, and nearly that."""
    found, _ = two(built_for, replay)
    assert 0.9 * memory.TOKEN_BYTES < found <= memory.TOKEN_BYTES


def built_for(replay):
    """Bytes a token."""
    return built({}, torch.float32, replay, moe_enable_routing_replay=True)["token"]


def saved(kind, layers, recompute):
    """Bytes that autograd keeps of a forward pass of 512 tokens through the model, weights aside."""
    from scaleup.models.megatron import build, start
    from scaleup.models.packing import pack

    hf = tiny.config(kind, num_hidden_layers=layers)
    more = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    start(Layout())
    model = build(hf, Layout(), **(more if recompute else {}))
    weights.load(model, tiny.tensors(hf))
    skip, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in skip:
            seen[storage.data_ptr()] = storage.nbytes(), x  # held, or its place is used again
        return x

    batch = pack([torch.arange(256), torch.arange(256)])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(batch.tokens, batch.positions, None, packed_seq_params=batch.params)
    return sum(size for size, _ in seen.values())


@pytest.mark.parametrize("kind", FAMILIES)
def test_activations_of_a_layer(two, kind):
    """float32: within 2 percent; a CPU's RMSNorm keeps its normalised input too, a GPU's does not."""
    found = [two(saved, kind, n, False)[0] for n in (2, 4)]
    hf = tiny.config(kind)
    norms = 2 * hf["hidden_size"]
    if FAMILIES[kind].qk_norm:
        norms += (hf["num_attention_heads"] + hf["num_key_value_heads"]) * hf["head_dim"]
    wanted = memory.layer(hf, 512, 1, 4) + 512 * 4 * norms
    assert (found[1] - found[0]) / 2 == pytest.approx(wanted, rel=0.02)


def test_recompute_keeps_the_inputs(two):
    """One [tokens, hidden] a layer, and no more than 2 percent beside."""
    found = [two(saved, "qwen3_moe", n, True)[0] for n in (2, 4)]
    assert (found[1] - found[0]) / 2 == pytest.approx(512 * 64 * 4, rel=0.02)


# ---------------------------------------------------------------- engines
def test_an_engine_by_hand():
    """Weights and cache of Qwen3-30B-A3B on 1, 4 and 8 GPUs; eight hold each of four keys twice."""
    world = load(CLUSTER).world
    total, kv, small = 30_532_122_624, 48 * 2 * 4 * 128 * 2048, 48 * (4352 + 128 * 2048) + 2048
    for tp, cached in ((1, 98_304), (4, 24_576), (8, 24_576)):
        spec = world.engine.model_copy(update={"tp": tp})
        found = memory.engine(world.model_copy(update={"engine": spec}), QWEN3_30B_A3B, 33_792)
        held = 2 * (small + (total - small - kv) / tp + kv / min(tp, 4))
        assert found.weights == pytest.approx(held)
        assert found.token == cached
        assert found.tokens == int((0.85 * 80e9 - held) / cached)
        assert found.answers == found.tokens // 33_792


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_weights_of_an_engine(kind, tp):
    """Those that the checksums expect on a rank; 4 ranks hold each of 2 key heads twice, and its bias."""
    hf, world = tiny.config(kind), load("tiny_cpu").world
    spec = world.engine.model_copy(update={"tp": tp, "dtype": "float32"})
    shares = [checksums._share(n, x, hf, 0, tp).nbytes for n, x in tiny.tensors(hf).items()]
    wanted = memory.engine(world.model_copy(update={"engine": spec}), hf, 64).weights
    assert sum(shares) == wanted


# ---------------------------------------------------------------- the host
@pytest.mark.parametrize(
    ("lag", "most"), [("0", 1), ("1", 2), ("8", 16), ("fully_async:max_age=3", 4)]
)
def test_batches_that_wait(lag, most):
    """Lag 8 begins 0 to 15 at once; no more are begun than are trained on."""
    assert host_memory.waiting(lag, 544) == most
    assert host_memory.waiting(lag, 1) == 1


def one(P=200, T=1800, experts=128):
    """A Sample of Qwen3-30B-A3B as an engine hands it over, and its config."""
    hf = QWEN3_30B_A3B | {"num_experts": experts}
    ids = torch.randint(300, 150_000, (P + T,)).tolist()
    routed = torch.zeros(P + T - 1, 48, 8, dtype=families.narrow(experts))
    return hf, Sample(
        ids[:P], ids[P:], torch.zeros(T), torch.zeros(T, dtype=torch.int64), routed, "stop", 0
    )


def answered(s):
    """The Response that the controller makes of a Sample."""
    return Response(
        torch.tensor(s.prompt + s.output), len(s.prompt), s.logp_mu, 1.0, experts=s.experts,
        fields={"age": 5 - s.version},
    )  # fmt: skip


@pytest.mark.parametrize("replay", ["r3", "r2"])
@pytest.mark.parametrize("experts", [128, 512])
def test_bytes_of_an_answer(experts, replay):
    """A Sample and a Response, to 1 percent: one token less has experts, a list has a head."""
    hf, s = one(experts=experts)
    s = s if replay == "r3" else replace(s, experts=None)
    ids = s.prompt + s.output
    lists = sum(map(sys.getsizeof, (s.prompt, s.output, *ids)))
    held = nbytes([x for x in (s.logp_mu, s.version, s.experts) if x is not None])
    assert host_memory.sample(hf, 2000, 1800, replay) == pytest.approx(lists + held, rel=0.01)
    r = answered(s)
    held = nbytes([x for x in (r.tokens, r.logp_mu, r.experts, r.fields["age"]) if x is not None])
    assert host_memory.response(hf, 2000, 1800, replay) == pytest.approx(held, rel=0.01)
    s = replace(s, head=torch.zeros(1800, 32, dtype=torch.int32), head_logp=torch.zeros(1800, 32))
    more = host_memory.sample(hf, 2000, 1800, replay, 32) - host_memory.sample(
        hf, 2000, 1800, replay
    )
    assert more == nbytes([s.head, s.head_logp])
    more = host_memory.response(hf, 2000, 1800, replay, 32) - host_memory.response(
        hf, 2000, 1800, replay
    )
    assert more == nbytes([s.head.long(), s.head_logp])


@pytest.mark.filterwarnings("ignore:Zero-copy")
def test_tensors_are_pickled_beside_the_stream(monkeypatch):
    """As Ray does it: the bytes of a batch are out of band, and a reader's tensors are in them."""
    monkeypatch.setitem(cloudpickle.CloudPickler.dispatch, torch.Tensor, zero_copy_tensors_reducer)
    batch, beside = [answered(one()[1]) for _ in range(4)], []
    stream = cloudpickle.dumps(batch, protocol=5, buffer_callback=beside.append)
    size = 4 * host_memory.response(one()[0], 2000, 1800, "r3")
    assert sum(x.raw().nbytes for x in beside) == pytest.approx(size, rel=0.01)
    assert len(stream) < size / 100
    (one_of, *_) = cloudpickle.loads(stream, buffers=beside)
    for x, y in (
        (one_of.experts, batch[0].experts),
        (one_of.fields["age"], batch[0].fields["age"]),
    ):
        assert x.data_ptr() == y.data_ptr()
        assert x.equal(y)


def test_the_host_of_the_cluster():
    """Qwen3-30B-A3B at lag 8, by hand: what waits, what the ranks read, and what is printed."""
    (node,) = memory.fits(load(CLUSTER)).hosts
    assert (node.ranks, node.engines) == (4, 1)
    of_sample = 32_768 * (36 + 48 * 8) + 31_744 * (4 + 8)
    of_batch = 4096 * (32_768 * (8 + 48 * 8) + 31_744 * (4 + 8))
    assert node.always["answers of 16 batches"] == 16 * 4096 * of_sample == 926_907_629_568
    assert node.always["Adam"] == 4 * 16 * 7_642_626_048
    assert node.always["weights kept by ranks"] == 4 * 2 * 2 * 7_642_626_048
    step, from_rank, to_engines, save, resume = (list(x.values()) for x in node.moments.values())
    routes = 384 * 4096 * 32_768 / 4 + 3 * 8 * 384 * 32_768
    assert step == [of_batch, 4096 * 8 * (32_768 + 31_744), 4 * routes]
    # TP4 EP4 on four ranks: each gathers its own, a shard that is the whole
    assert save == [4 * 12 * 7_642_626_048, 4 * 12 * 2 * 28_991_029_248 // 4]
    assert resume == [4 * 12 * 7_642_626_048]
    whole = 2 * 30_532_122_624
    assert (from_rank, to_engines) == ([2 * whole], [whole])
    assert node.store == 2 * whole
    moments = [sum(x.values()) for x in node.moments.values()]
    assert node.need == sum(node.always.values()) + max(moments)
    lines = [" ".join(x.split()) for x in table.plan(load(CLUSTER)).splitlines()]
    # a quarter of it at a quarter of the length
    assert "answers of 16 batches, GB 926.9 231.7" in lines
    lag_1 = memory.fits(load(CLUSTER, {"lags": ["1"]})).hosts[0].always
    assert lag_1["answers of 2 batches"] == 2 * 4096 * of_sample


def test_the_head_is_counted():
    """Of the arm that reads one; 32 entries of 16 bytes a token on the GPU, 8 in a sample, 12 in a batch."""
    changes = {"methods": ["grpo=ppo", "centering"], "world.engine.head": 32}
    without, with_head = (
        memory.fits(load(CLUSTER, changes | {"methods": x}))
        for x in (["grpo=ppo"], changes["methods"])
    )
    assert [x.recipe.head for x in (without, with_head)] == [0, 32]
    world = with_head.recipe.world
    sampled = world.prompts * world.answers * world.max_new_tokens
    old, now = (x.hosts[0].moments["a step"]["batch in Ray's store"] for x in (without, with_head))
    assert now - old == pytest.approx(12 * 32 * sampled)
    said = table.plan(with_head.recipe)
    assert f"{memory.TOKEN_BYTES + 512} bytes a token on the GPU" in said
    assert "head of 32: 256 bytes a sampled token in the controller, 384 in a batch" in said
    assert "head of" not in table.plan(without.recipe)


def test_a_host_without_replay():
    """No experts in answers and batch; r2 has those of the ranks; no checkpoint, nothing gathered."""
    changes = {"world.replay": ["none"], "world.checkpoint_every": 0}
    (node,) = memory.fits(load(CLUSTER, changes)).hosts
    of_sample = 32_768 * 36 + 31_744 * (4 + 8)
    assert node.always["answers of 16 batches"] == 16 * 4096 * of_sample
    step, _, _, save, resume = (list(x.values()) for x in node.moments.values())
    of_batch = 4096 * (32_768 * 8 + 31_744 * (4 + 8))
    assert step == [of_batch, 4096 * 8 * (32_768 + 31_744), 0]
    assert save == [0, 0]
    assert resume == [0]
    (node,) = memory.fits(load(CLUSTER, {"world.replay": ["none", "r2"]})).hosts
    assert node.always["answers of 16 batches"] == 16 * 4096 * of_sample
    assert node.moments["a step"]["batch in Ray's store"] == of_batch
    assert node.moments["a step"]["experts in ranks"] == 384 * 4096 * 32_768


def test_the_hosts_of_several_nodes():
    """Ranks and engines as they are packed; the controller's answers and rank 0's weights once."""
    found = memory.fits(load(CLUSTER + "_32gpu")).hosts
    assert [(x.ranks, x.engines) for x in found] == [(8, 0), (8, 0), (0, 2), (0, 2)]
    assert [x.always["answers of 16 batches"] > 0 for x in found] == [True, False, False, False]
    whole = 2 * 30_532_122_624
    pushes = [sum(x.moments["a push, from rank 0"].values()) for x in found]
    assert pushes == [2 * whole, 0, 0, 0]
    assert [x.always["weights in Ray's store"] for x in found] == [whole, 0, whole, whole]
    batch = found[0].moments["a step"]["batch in Ray's store"]
    assert [x.store for x in found] == [2 * whole, batch, whole, whole]
    assert found[3].moments["a push, to engines"]["new weights in engines"] == 2 * whole
    # the first 8 of 16 ranks gather 8 parts of the experts, the others send; a resume is on all
    experts = 12 * 28_991_029_248
    save, others = (list(x.moments["a checkpoint"].values()) for x in found[:2])
    dense = 4_018_747_392 - 28_991_029_248 // 8
    assert save == [experts + 4 * 12 * dense, experts * 1.5]
    assert others == [0, experts / 2]
    resumed = [sum(x.moments["a resume"].values()) for x in found]
    assert resumed == [8 * 12 * 4_018_747_392] * 2 + [0, 0]


# ---------------------------------------------------------------- recipes
@pytest.mark.parametrize("name", sorted(x.stem for x in RECIPES.glob("*.toml")))
def test_every_recipe_has_a_plan(name):
    """It loads, it fits, and the text has its model, its parameters and what is assumed."""
    recipe = load(name)
    text = table.plan(recipe)
    total = sum(map(math.prod, slots.names(config(recipe.world)).values()))
    for part in (recipe.world.model, f"{total:,}", "Assumed, not measured", "answers of at most"):
        assert part in text


def test_plans_of_the_cluster():
    """Nodes, the place of Adam, and what the ranks need at 80 GB."""
    known = {
        "": ("nodes of 8: 1", 4),
        "_16gpu": ("nodes of 8: 2", 8),
        "_32gpu": ("nodes of 8: 4", 16),
    }
    for end, (nodes, ranks) in known.items():
        recipe = load(CLUSTER + end)
        (found,) = memory.fits(recipe).ranks
        assert found.ranks == range(ranks)
        assert nodes in table.plan(recipe)
        assert (found.gpu["Adam"] > 0) == (end == "_32gpu") == (found.host["Adam"] == 0)
    eight = of_trainer({}, CLUSTER)
    assert eight.gpu["gradients"] == 4 * 7_642_626_048
    assert eight.host["Adam"] == 16 * 7_642_626_048
    assert eight.host["weights kept"] == 2 * 2 * 7_642_626_048  # reference, and those set aside
    kept = of_trainer({"keep_weights": True}, CLUSTER)
    assert kept.host["weights kept"] == 18 * 2 * 7_642_626_048  # lag 8: ages 0 to 15


FAILS = {
    "no offload": (
        {"trainer.optimizer_offload": False},
        r"rank 0 needs 172\.1 GB and a GPU has 80; it fits with optimizer_offload = true \(61 GB\), or "
        r"ep = 8 and ranks = 16 \(62 GB\)$",
    ),
    "no recompute": (
        {"trainer.recompute": False},
        r"rank 0 needs 127\.\d GB .*recompute = true \(61 GB\)",
    ),
    "tokens": ({"trainer.tokens": 262_144}, r"tokens = 32768 \(61 GB\)"),
    "second stage": ({"trainer.pp": 2, "trainer.tp": 1, "trainer.ep": 2}, "rank 2 needs"),
    "engine": ({"engine.tp": 1, "gpu_gb": 70}, "cache for 0 tokens and an answer takes 32,768"),
    "cache": ({"engine.options.mem_fraction_static": 0.2}, r"cache for 29,\d\d\d tokens"),
    "heads": ({"trainer.tp": 8, "trainer.ranks": 8}, "num_key_value_heads 4 .* by tp 8"),
    "host": ({"host_gb": 2000}, r"host_gb: node 0 needs [\d,.]+ GB .* has 2000; the largest part is"),
    "shm": ({"shm_gb": 64}, r"shm_gb: Ray's object store takes [\d,.]+ GB of node 0 and may take 64\.0"),
    "store": ({"host_gb": 1e6, "shm_gb": 1}, "may take 1.0"),
    "stages": ({"trainer.pp": 5, "trainer.ranks": 20}, "num_hidden_layers 48 .* by pp 5"),
    "experts": ({"trainer.ep": 3, "trainer.ranks": 12}, "num_experts 128 .* by ep 3"),
    "engine heads": ({"engine.tp": 3}, "num_attention_heads 32 .* by tp 3"),
    "engine on a node": ({"engine.tp": 16}, "tp 16 is more than the 8 GPUs of a node"),
    "context": ({"max_new_tokens": 32768}, "32768 tokens and a prompt do not fit into the 32768"),
    "model": ({"model": "nowhere"}, "nowhere holds no config.json"),
    "tiny": ({"model": "tiny:kind=gpt"}, "unknown kind 'gpt'"),
    "dense": ({"model": "tiny:kind=qwen3", "trainer.tp": 1, "max_new_tokens": 9}, "ep 4"),
    "replay": (
        {"model": "tiny:kind=llama", "trainer.tp": 1, "trainer.ep": 1, "engine.tp": 1,
         "max_new_tokens": 9},
        "replay: r3 needs a mixture of experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILS)
def test_what_cannot_be_is_refused(case):
    """One sentence with the field, the numbers and, for memory, what would help."""
    changes, sentence = FAILS[case]
    with pytest.raises(ConfigError, match=sentence) as error:
        memory.fits(load(CLUSTER, {f"world.{k}": v for k, v in changes.items()}))
    assert "\n" not in str(error.value)


def test_what_would_help_does():
    """The first advice, followed, is a recipe that fits."""
    changes = {"world.trainer.optimizer_offload": False}
    with pytest.raises(ConfigError):
        memory.fits(load(CLUSTER, changes))
    memory.fits(load(CLUSTER, changes | {"world.trainer.ep": 8, "world.trainer.ranks": 16}))


def test_the_nodes_that_there_are():
    """More than are there is refused; as many is not."""
    memory.fits(load(CLUSTER + "_16gpu"), available=2)
    with pytest.raises(ConfigError, match="needs 2 nodes of 8 GPUs, not 1"):
        memory.fits(load(CLUSTER + "_16gpu"), available=1)


@pytest.mark.parametrize(
    "layout", [Layout(tp=4), Layout(pp=3), Layout(ep=3), Layout(2, 2, 4), Layout(1, 2, 8)], ids=str
)
def test_the_layouts_that_megatron_s_config_refuses(layout):
    """`plan.layouts` and `models.megatron` agree on each."""
    try:
        transformer_config(tiny.config("qwen3_moe"), layout)
    except ValueError as error:
        refused = str(error).removeprefix("model: ")
    else:
        refused = None
    changes = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "ranks": 48}
    recipe = load("tiny_cpu", {f"world.trainer.{k}": v for k, v in changes.items()})
    if refused is None:
        memory.fits(recipe)
    else:
        with pytest.raises(ConfigError, match=refused):
            memory.fits(recipe)


def test_offload_needs_a_gpu():
    """On a CPU it is refused before anything is built."""
    from scaleup.trainer.trainer import Settings

    if torch.cuda.is_available():
        Settings(optimizer_offload=True)
    else:
        with pytest.raises(ValueError, match="there is no GPU"):
            Settings(optimizer_offload=True)


def test_a_plan_needs_neither_megatron_nor_an_engine():
    """None of them is imported."""
    code = (
        "import sys; from scaleup.plan.table import plan; from scaleup.recipe import load;"
        f"plan(load('{CLUSTER}')); print(sorted({{'megatron', 'sglang', 'ray', 'safetensors'}}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
