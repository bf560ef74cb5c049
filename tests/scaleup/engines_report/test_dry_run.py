"""The dry run: Qwen3-30B-A3B whole, and that each of its checks can fail."""

import math
from dataclasses import replace

import pytest
import torch

from scaleup.engines_report import dry_run, walk
from scaleup.engines_report.launch import Ranks
from scaleup.models import slots, tiny, weights
from scaleup.models.families import FAMILIES
from scaleup.models.megatron import Layout, build, start
from scaleup.plan import memory
from simlab.stabilizers import bind

HF = tiny.config("qwen3_moe")
SMALL = (12, 20)  # tokens of the sequences of a micro-batch


def small(hf=HF, layout=Layout(tp=2, ep=2), world=2, stabilizer="sat"):  # noqa: B008  frozen
    """A dry run of a tiny model in one layout."""
    return dry_run.dry_run(hf, [(layout, world)], SMALL, bind(stabilizer))


# ---------------------------------------------------------------- the large model
@pytest.fixture(scope="module")
def whole():
    return dry_run.dry_run()


def test_the_whole_model_is_mapped(whole):
    """Published size, every tensor, in all four layouts; ranks add up to whole copies."""
    assert whole.parameters == 30_532_122_624
    assert whole.tensors == 3 + 48 * (9 + 3 * 128)
    assert [str(x.layout) for x in whole.layouts] == ["TP4 EP4", "TP4 EP8", "EP8", "TP4 PP2 EP4"]
    experts = 48 * 128 * 3 * 768 * 2048
    small = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048  # norms and routers, on every TP rank
    split = whole.parameters - experts - small
    for x in whole.layouts:
        replicas = x.world // x.layout.pp
        total = (
            experts * replicas // x.layout.ep + replicas * small + split * replicas // x.layout.tp
        )
        assert sum(x.parameters) == total


def test_shapes_and_memory_of_the_whole_model(whole):
    """Logits by hand in every layout, the experts' rows, and memory against numbers known before."""
    for x in whole.layouts:
        tp, last = x.layout.tp, x.layout.pp - 1
        assert x.shapes[f"stage {last}: logits"] == (1, 20480, 151936 // tp)
        assert x.shapes["stage 0: attention"] == (20480 // tp, 1, 2048)
        assert x.shapes["loss: gradient"] == (1, 64, 151936 // tp)
        assert x.shapes["loss: q"] == ()
        assert ("stage 1: expert" in x.shapes) == (last == 1)
    known = {
        "TP4 EP8": (8.0, 16.0, 45.8),
        "EP8": (10.3, 20.7, 45.8),
        "TP4 PP2 EP4": (7.6, 15.3, 45.8),
    }
    for x in whole.layouts:
        *state, logits = (size / 1e9 for size in x.memory.values())
        if str(x.layout) in known:
            assert state == pytest.approx(known[str(x.layout)], abs=0.1)
        # bf16, with their gradient, and two blocks of 32 MiB
        wanted = 4 * 20480 * 151936 / x.layout.tp + 2 * 2**25
        assert logits == pytest.approx(wanted / 1e9)
    page = dry_run.table(whole)
    assert "| EP8 | 8 | 5,164,972,032 | 10.3 | 20.7 | 45.8 | 12.5 |" in page


# ---------------------------------------------------------------- any model
@pytest.mark.parametrize(
    ("kind", "tie", "layout", "world"),
    [("qwen3_moe", False, Layout(2, 2, 2), 4), ("qwen3_moe", True, Layout(), 2),
     ("llama", False, Layout(2), 4),
     *((kind, True, Layout(2, 2), 4) for kind, family in FAMILIES.items() if not family.moe)],
)  # fmt: skip
def test_other_models_and_layouts(kind, tie, layout, world):
    """Dense, tied, pipelines, data parallel replicas; the count is that of the tiny model."""
    hf = tiny.config(kind, tie=tie)
    found = small(hf, layout, world)
    assert found.parameters == sum(map(math.prod, slots.names(hf).values()))
    shape = found.layouts[0].shapes[f"stage {layout.pp - 1}: logits"]
    assert shape == (1, 32, 512 // layout.tp)


@pytest.mark.parametrize("name", ["ppo", "gspo", "none", "cispo"])
def test_the_loss_path_of_other_methods(name):
    """With and without whole-batch numbers."""
    shapes = walk.walk_loss(512, 2, bind(name), tokens=16)
    assert shapes["loss: gradient"] == (1, 16, 256)


def names_of(hf, layout):
    """Names and shapes of a real rank's parameters."""
    start(layout)
    model = build(hf, layout, device="meta")
    return {name: tuple(p.shape) for name, p in weights.local_parameters(model).items()}


@pytest.mark.parametrize("layout", [Layout(tp=2, ep=2), Layout(pp=2)])
def test_a_rank_that_is_not_there_is_like_one_that_is(layout):
    """Parameters of both ranks under the fake group are those of two real processes."""
    with Ranks(2) as ranks:
        real = ranks(names_of, HF, layout)
    for rank in range(2):
        with dry_run.as_rank(rank, layout, 2):
            model = build(HF, layout, device="meta")
            found = {name: tuple(p.shape) for name, p in weights.local_parameters(model).items()}
        assert found == real[rank]
    assert real[0] != real[1]


# ---------------------------------------------------------------- every check can fail
def change_rules(patch, change):
    """Let the mapping be another one: `change` takes a slot and returns it, changed, or None."""
    rules = slots.rules

    def changed(hf, tp=1):
        yield from (new for slot in rules(hf, tp) if (new := change(slot)) is not None)

    patch.setattr(slots, "rules", changed)


GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
UP, DOWN = GATE.replace("gate", "up"), GATE.replace("gate", "down")
MISSING = {
    "a tensor that nothing maps": lambda s: None if s.hf == UP else s,
    "a tensor of another shape": lambda s: s._replace(shape=(95, 64)) if s.hf == UP else s,
    "a tensor of another name": lambda s: s._replace(hf=UP + "2") if s.hf == UP else s,
}


@pytest.mark.parametrize("case", MISSING)
def test_the_checkpoint_is_held_against_transformers(monkeypatch, case):
    """A mapping that is complete in itself but not of this model."""
    change_rules(monkeypatch, MISSING[case])
    with pytest.raises(dry_run.DryRunError, match=r"mlp\.experts\.3\.up_proj\.weight2? is "):
        small()


def held(change, layout=Layout(tp=2, ep=2)):  # noqa: B008  frozen
    """`shares` of rank 0 under a changed mapping."""
    with pytest.MonkeyPatch.context() as patch, dry_run.as_rank(0, layout, 2):
        model = build(HF, layout, device="meta")
        change_rules(patch, change)
        return dry_run.shares(model, layout)


def test_every_number_has_one_place():
    """The same half twice, a part of a parameter, a share that is no share, a slot left out."""
    first = GATE.replace("layers.1", "layers.0")
    up, down = first.replace("gate", "up"), first.replace("gate", "down")
    with pytest.raises(dry_run.DryRunError, match=r"linear_fc1\.weight is not filled exactly once"):
        held(lambda s: s._replace(view=lambda p: p.view(2, -1, 64)[0]) if s.hf == up else s)
    with pytest.raises(dry_run.DryRunError, match=r"linear_fc1\.weight is not filled exactly once"):
        held(lambda s: None if s.hf == up else s)
    with pytest.raises(
        dry_run.DryRunError, match=r"linear_fc2\.weight holds 6048 numbers of model"
    ):
        held(lambda s: s._replace(view=lambda p: p[:-1]) if s.hf == down else s)
    with pytest.raises(dry_run.DryRunError, match=r"norm\.weight holds 64 numbers of model\.norm"):
        held(lambda s: s._replace(axis=0) if s.hf == "model.norm.weight" else s)
    assert first in held(lambda s: s)


def test_every_rank_that_needs_a_tensor_holds_it(monkeypatch):
    """An expert that only one of two ranks counts."""
    shares = dry_run.shares
    seen = []

    def forgetful(model, layout):
        seen.append(1)
        found = shares(model, layout)
        return found if len(seen) == 1 else [x for x in found if x != "model.norm.weight"]

    monkeypatch.setattr(dry_run, "shares", forgetful)
    with pytest.raises(
        dry_run.DryRunError, match=r"TP2 EP2, 1 ranks hold model\.norm\.weight, not 2"
    ):
        small()


def test_a_wrong_count_of_the_plan_is_found(monkeypatch):
    """`scaleup plan` counts a number too few of the experts of a rank."""
    parameters = memory.parameters
    fewer = lambda *sizes: [(dense, experts - 1) for dense, experts in parameters(*sizes)]  # noqa: E731
    monkeypatch.setattr(memory, "parameters", fewer)
    sentence = r"TP2 EP2, rank 0 has \d+ parameters and 147456 of experts, .* \(\d+, 147455\)"
    with pytest.raises(dry_run.DryRunError, match=sentence):
        small()


def test_a_wrong_export_is_found(monkeypatch):
    """A tensor that comes back in another shape."""
    export = weights.export

    def turned(model):
        for name, x in export(model):
            yield name, x.t() if name == GATE else x

    monkeypatch.setattr(weights, "export", turned)
    with pytest.raises(
        dry_run.DryRunError, match=r"TP2 EP2 exports .*experts\.3\.gate_proj.* as \(64, 96\)"
    ):
        small()


def test_wrong_shapes_on_the_way_are_found(monkeypatch):
    """Logits of another vocabulary; a stabilizer without gradient; whole-batch numbers per token."""
    with dry_run.as_rank(0, Layout(), 1):
        model = build(HF, Layout(), device="meta")
        model.vocab_size = 500
        with pytest.raises(
            dry_run.DryRunError, match=r"logits is \(1, 32, 512\), not \(1, 32, 500\)"
        ):
            walk.walk_model(model, Layout(), SMALL)
    flat = replace(
        bind("none"), surrogate=lambda b: bind("none").surrogate(replace(b, logp=0 * b.logp))
    )
    with pytest.raises(dry_run.DryRunError, match="no finite gradient"):
        walk.walk_loss(512, 1, flat, tokens=16)
    wide = replace(bind("none"), whole_batch=lambda batches, reduce: {"q": torch.zeros(3)})
    with pytest.raises(dry_run.DryRunError, match=r"q is .*\(3,\), not .*\(\)"):
        walk.walk_loss(512, 1, wide, tokens=16)


def test_a_group_in_use_is_left_alone():
    """A dry run in a process of a training job is refused; afterwards no group is left."""
    with dry_run.as_rank(0, Layout(), 1), pytest.raises(RuntimeError, match="without a torch"):
        small()
    assert not torch.distributed.is_initialized()
