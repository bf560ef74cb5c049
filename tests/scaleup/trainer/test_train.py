"""A training step in Megatron-Core: whose loss it calls, the same in every layout and in the simulator."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from scaleup.engines_report.launch import Ranks
from scaleup.engines_report.measure import (
    LAYOUTS,
    STEPS,
    gap,
    local,
    run,
    simulated,
    some_responses,
    start,
)
from scaleup.models import tiny
from scaleup.plan.memory import largest_row
from scaleup.recipe import load
from scaleup.trainer.responses import Response, collate, share, share_by_tokens


@pytest.fixture(scope="module")
def one():
    """One process with Megatron in it."""
    with Ranks(1, timeout=300) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    """Two processes that share a model."""
    with Ranks(2, timeout=300) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny mixture of experts."""
    return tiny.write(tmp_path_factory.mktemp("tiny"), "qwen3_moe", seed=1)


@pytest.fixture(scope="module")
def alone(one, folder):
    """Three Adam steps of SAT on one rank, with a KL term."""
    return one(run, folder, {}, 3, grad_cosine=True)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(two, folder, alone, layout):
    """Loss, gradient norm, quantile and every diagnostic of three Adam steps equal those of one rank."""
    first, second = two(run, folder, LAYOUTS[layout], grad_cosine=True)
    assert first == second  # every rank reports the whole batch
    worst = gap(alone, first)
    print(layout, f"{worst:.1e}", [(x["loss"], x["norm"], x["q"]) for x in first])
    assert worst < 1e-5
    assert len({round(x["loss"], 3) for x in alone}) == STEPS  # the steps do something
    assert all(0 < x["active"] < x["tokens"] for x in alone)
    assert all(x["gate_rate"] > 0 for x in alone)
    assert [0.5 < x.get("grad_cosine", 0) < 1 for x in alone] == [False, True, True]  # one batch


def test_a_head_over_ranks(one, two, folder):
    """Score centering: the same step where the vocabulary, and so the head, lies on two ranks."""
    (whole,) = one(run, folder, {}, 2, name="centering", head=3)
    first, second = two(run, folder, LAYOUTS["TP2 SP"], 2, name="centering", head=3)
    assert first == second
    assert gap(whole, first) < 1e-5
    assert all(x["centered"] > 0.05 for x in whole)
    (plain,) = one(run, folder, {}, 1, name="none", head=3)
    assert abs(plain[0]["norm"] - whole[0]["norm"]) > 1e-3


def bf16(folder):
    """Three steps with bf16 weights, float32 main weights and gradients."""
    return run(folder, {}, build={"dtype": torch.bfloat16})


def test_bf16(one, two, folder, alone):
    """bf16 starts near float32 (its small steps are then rounded), and is alike on two ranks."""
    (a,), (b, _) = one(bf16, folder), two(bf16, folder)
    print(
        "bf16", *((x["loss"], x["norm"], y["loss"], y["norm"]) for x, y in zip(a, b, strict=True))
    )
    assert a[0]["loss"] == pytest.approx(alone[0]["loss"], abs=1e-2)
    assert a[0]["norm"] == pytest.approx(alone[0]["norm"], rel=2e-2)
    assert a[2]["loss"] < a[1]["loss"] < a[0]["loss"]
    for x, y in zip(a, b, strict=True):
        assert x["loss"] == pytest.approx(y["loss"], abs=2e-3)


def spied(folder):
    """Calls of the registry's function in one step: how many, and whether Megatron's schedule called."""
    import sys

    from simlab.stabilizers import STABILIZERS

    trainer = start(folder, {})
    micro = trainer.collate(some_responses(trainer))
    wanted, calls = STABILIZERS["sat"].surrogate.__code__, []

    def spy(frame, event, _):
        if event == "call" and frame.f_code is wanted:
            above = frame
            names = set()
            while above := above.f_back:
                names.add((above.f_globals["__name__"], above.f_code.co_name))
            calls.append(("megatron.core.pipeline_parallel.schedules", "forward_step") in names)

    sys.setprofile(spy)
    try:
        trainer.step(micro)
    finally:
        sys.setprofile(None)
    return calls, trainer.stabilizer.surrogate.func is STABILIZERS["sat"].surrogate


def test_the_registry_s_function_is_called(one, folder):
    """In Megatron's closure runs the function object of the registry, once for each micro-batch."""
    ((calls, same),) = one(spied, folder)
    assert same
    assert calls == [True, True]


def compiled(folder, name):
    """One step, eager and compiled, of two micro-batches: plain numbers and the active tokens."""
    found = []
    for compiles in (False, True):
        trainer = start(folder, {}, name=name, compile=compiles, kl_coef=0.01)
        x = trainer.step(trainer.collate(some_responses(trainer)))
        found.append((x.loss, x.grad_norm, x.diagnostics, torch.cat(x.actives).tolist()))
    return found


@pytest.mark.parametrize("name", ["sat", "gspo"])
def test_the_compiled_loss(one, folder, name):
    """With `compile` one step has the same loss, gradient norm, diagnostics and active tokens."""
    ((a, b),) = one(compiled, folder, name)
    assert b[0] == pytest.approx(a[0], abs=1e-6)
    assert b[1] == pytest.approx(a[1], rel=1e-6)
    assert b[2] == pytest.approx(a[2], abs=1e-6)
    assert b[3] == a[3]
    assert 0 < sum(a[3]) < len(a[3])


@pytest.mark.parametrize(
    ("aggregation", "kl_coef"), [("token_mean", 0.0), ("seq_mean_token_mean", 0.01)]
)
def test_the_simulator_s_loss(one, folder, aggregation, kl_coef):
    """Every method: the simulator's loss call on plain log-probs gives the loss of Megatron's closure
    to 1e-6, the same active tokens, and the same gradient norm."""
    from simlab.stabilizers import NAMES

    (found,) = one(simulated, folder, NAMES, aggregation, kl_coef)
    print(len(found), max(x[0] for x in found.values()), max(x[1] for x in found.values()))
    assert len(found) >= len(NAMES) - 2
    for name, (loss, norm, active, value) in found.items():
        # a product over the response: the rounding of its log, about T eps |log pi|, times a weight of up to 8
        product = name in ("vcpo", "vespo")
        rounding = 1e-4 if product else 1e-6
        assert loss < rounding * max(1, abs(value)), name
        assert norm < 1e-5, name
        assert active, name
    assert len({round(x[3], 6) for x in found.values()}) > 10  # the methods differ on this batch


def test_a_local_quantile_depends_on_the_cut(one, two, folder, alone):
    """A quantile of each micro-batch gives another loss, and another one again on two ranks."""
    ((alike, q),) = one(local, folder, {})
    (split, _), _ = two(local, folder, {})
    exact = alone[0]
    print("loss, norm", *((x["loss"], x["norm"]) for x in (exact, alike, split)), q, exact["q"])
    assert q[0] != q[1]
    for a, b in ((alike, exact), (split, exact), (alike, split)):
        assert abs(a["loss"] - b["loss"]) > 1e-4  # layouts agree to 1e-5


def run_choices(folder):
    """q of three steps under every choice that is exact."""
    return {
        quantile: run(folder, {}, STEPS, quantile=quantile)
        for quantile in ("each_step", "pre_step", "ema")
    }


def test_choices_of_the_quantile(one, two, folder):
    """pre_step keeps the first q, ema follows at a tenth, and both are exact over two ranks."""
    (found,) = one(run_choices, folder)
    split, _ = two(run_choices, folder)
    q = {name: [x["q"] for x in rows] for name, rows in found.items()}
    assert q["pre_step"] == [q["each_step"][0]] * STEPS
    assert q["ema"][:2] == pytest.approx([q["each_step"][0]] * 2, rel=1e-5)
    assert q["ema"][2] == pytest.approx(0.9 * q["each_step"][0] + 0.1 * q["each_step"][1], rel=1e-4)
    assert abs(q["each_step"][1] - q["each_step"][0]) > 0.02
    for name in q:
        assert gap(found[name], split[name]) < 1e-5


def edge_cases(folder):
    """Steps that must not go wrong, on however many ranks."""
    from scaleup.models import weights

    out = {}
    trainer = start(folder, {}, grad_clip=0.5, quantile="each_step")
    rows = some_responses(trainer)
    few = trainer.collate([rows[0][:1] if trainer.dp_rank == 0 else [], []])
    x = trainer.step(few)
    out["empty micro-batches"] = x.loss, x.grad_norm, x.tokens

    trainer = start(folder, {})
    nothing = [replace(r, mask=torch.zeros_like(r.mask)) for r in rows[0]]
    before = weights.checksum(weights.export(trainer.model))
    x = trainer.step(trainer.collate([nothing, []]))
    out["nothing to learn"] = x.loss, x.grad_norm, x.tokens
    out["nothing moved"] = weights.checksum(weights.export(trainer.model)) == before

    bad = [replace(r, advantage=torch.full_like(r.logp_mu, 3e38)) for r in rows[0]]
    x = trainer.step(trainer.collate([bad]))
    out["overflow"] = x.updated, weights.checksum(weights.export(trainer.model)) == before

    screened = replace(rows[0][0], logp_mu=rows[0][0].logp_mu * torch.nan)
    x = trainer.step(trainer.collate([[screened, *rows[0][1:]]]))
    out["screened"] = x.diagnostics["screened"], x.updated
    return out


def test_edge_cases(one, two, folder):
    """Empty micro-batches and masks, gradients that overflow, numbers that are not finite."""
    (a,), (b, c) = one(edge_cases, folder), two(edge_cases, folder)
    for x in (a, b, c):
        assert x["empty micro-batches"] == pytest.approx(a["empty micro-batches"], rel=1e-5)
        assert x["nothing to learn"] == (0.0, 0.0, 0)
        assert x["nothing moved"]
        assert x["overflow"] == (False, True)
        assert x["screened"][0] > 0
        assert x["screened"][1]


def clipped(folder):
    """The first step's change of the weights, by limit of the norm: Adam with an eps that dominates."""
    from scaleup.models import weights

    sizes = {}
    for limit in (1e9, 0.5):
        trainer = start(folder, {}, grad_clip=limit, eps=1e3, lr=1.0)
        first = dict(weights.export(trainer.model))
        x = trainer.step(trainer.collate(some_responses(trainer)))
        change = [(y - first[name]).flatten() for name, y in weights.export(trainer.model)]
        sizes[limit] = x.grad_norm, torch.cat(change).norm().item()
    return sizes


def test_clipping(two, folder):
    """The gradient is scaled down to the limit; the norm that is reported is the one before."""
    sizes, _ = two(clipped, folder)
    (norm, free), (same, held) = sizes[1e9], sizes[0.5]
    assert norm == pytest.approx(same)
    assert norm > 1
    assert held / free == pytest.approx(0.5 / norm, rel=1e-3)


def wrong(folder):
    """One-sentence errors, by what was wrong."""
    from scaleup.trainer.responses import Response, collate
    from scaleup.trainer.settings import Settings

    out = {}

    def attempt(name, call):
        try:
            call()
        except ValueError as error:
            out[name] = str(error)

    trainer = start(folder, {}, quantile="pre_step")
    rows = some_responses(trainer)
    attempt("pre_step", lambda: trainer.step(trainer.collate(rows)))
    attempt("quantile", lambda: Settings(quantile="global"))
    attempt("kl", lambda: Settings(kl="k4"))
    attempt("clip", lambda: Settings(grad_clip=0.0))
    short = Response(torch.arange(5), 2, torch.zeros(2), 1.0)
    attempt("short", lambda: collate([short]))
    attempt("lack", lambda: collate([replace(rows[0][0], fields={}), rows[0][1]]))
    attempt("dense", lambda: start(folder, {}, replay="r3"))
    return out


def test_errors(one, folder):
    """What cannot be done is refused in one sentence that names it."""
    (found,) = one(wrong, folder)
    parts = {
        "pre_step": "before(micro_batches)",
        "quantile": "'global'",
        "kl": "'k4'",
        "clip": "grad_clip",
        "short": "got 2",
        "lack": "logp_ref",
        "dense": "moe_enable_routing_replay",
    }
    assert found.keys() == parts.keys()
    for name, part in parts.items():
        assert part in found[name]


def test_equal_shares_are_those_of_a_plain_search():
    """The largest first, each to the bin with the fewest tokens, then responses, then the first."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 30, rng.integers(1, 12)).tolist()
        rows = [
            Response(torch.zeros(n, dtype=torch.int64), 1, torch.zeros(n - 1), 0.0) for n in lengths
        ]
        bins = [[] for _ in range(6)]
        for i in sorted(range(len(rows)), key=lambda i: -lengths[i]):
            least = min(bins, key=lambda x: (sum(lengths[j] for j in x), len(x)))
            least.append(i)
        found = [[[id(r) for r in m] for m in mine] for mine in share(rows, 3, 2)]
        assert found == [[[id(rows[i]) for i in sorted(x)] for x in bins[r::2]] for r in range(2)]


def test_the_plan_knows_the_largest_micro_batch():
    """Answers of full length on fewer and more ranks than divide them."""
    for answers, ranks, tokens in ((5, 4, 200), (5, 2, 250), (7, 3, 1000), (8, 2, 150)):
        world = load("tiny_cpu", {"world.prompts": 1, "world.answers": answers}).world
        rows = [Response(torch.zeros(100, dtype=torch.int64), 1, torch.zeros(99), 0.0)] * answers
        found = share_by_tokens(rows, tokens, ranks)
        largest = max(sum(len(r.tokens) for r in m) for mine in found for m in mine)
        at = world.trainer.model_copy(update={"ranks": ranks, "tokens": tokens})
        assert largest <= largest_row(world, at, 100) <= tokens


def test_what_is_empty_has_its_fields():
    """A micro-batch without responses has ages too, and an answer without tokens needs no experts."""
    assert collate([]).b.age.dtype == torch.int64
    two = torch.tensor([3, 4])
    bare = Response(two, 2, torch.zeros(0), 0.0, fields={"age": torch.zeros(0)})
    whole = Response(
        two, 1, torch.zeros(1), 1.0, experts=torch.ones(1, 2, 2), fields={"age": torch.ones(1)}
    )
    micro = collate([bare, whole], routed=(2, 2))
    assert micro.b.logp.shape == (1,)
    assert micro.experts.tolist() == [[[0, 1]] * 2, [[1, 1]] * 2]


@pytest.mark.parametrize(
    ("lengths", "tokens"), [([5, 5, 5], 9), ([20] * 7, 32), ([3, 50], 10), ([4], 99)]
)
def test_micro_batches_keep_to_their_tokens(lengths, tokens):
    """No micro-batch has more tokens than allowed, a longer response aside; each response is in one."""
    rows = [
        Response(torch.zeros(n, dtype=torch.int64), 1, torch.zeros(n - 1), 0.0) for n in lengths
    ]
    for ranks in (1, 2):
        found = share_by_tokens(rows, tokens, ranks)
        sizes = [sum(len(r.tokens) for r in m) for mine in found for m in mine]
        assert max(sizes) <= max(tokens, *lengths)
        assert sorted(id(r) for mine in found for m in mine for r in m) == sorted(map(id, rows))
        assert len({len(mine) for mine in found}) == 1
