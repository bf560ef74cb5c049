"""Megatron models built from config.json against transformers, the same weights in both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scaleup.engines_report.launch import Ranks, shared
from scaleup.models import tiny
from scaleup.models.families import FAMILIES, Family

DENSE = [kind for kind, family in FAMILIES.items() if not family.moe]
MIXTURES = [kind for kind in FAMILIES if kind not in DENSE]
EVERY = [(kind, i % 2 == 1) for i, kind in enumerate(FAMILIES)]  # every other one tied


@pytest.fixture
def rank():
    """One process with Megatron in it."""
    return shared(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny checkpoint of every kind, tied and untied."""
    root = tmp_path_factory.mktemp("tiny")
    return {
        (kind, tie): tiny.write(root / f"{kind}-{tie}", kind, seed=1, tie=tie, std=0.2)
        for kind in FAMILIES
        for tie in (False, True)
    }


def sequences(vocabulary=512, lengths=(7, 16, 3)):
    """Random token ids."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (n,), generator=draw) for n in lengths]


def ours(folder, **overrides):
    """A loaded Megatron model on one rank."""
    from scaleup.models import megatron as model
    from scaleup.models import weights

    layout = model.Layout()
    model.start(layout)
    built = model.build(weights.read_config(folder), layout, **overrides)
    weights.load(built, weights.read(folder))
    return built


def theirs(folder):
    """The same checkpoint in transformers; every tensor of the file must be read."""
    from transformers import AutoModelForCausalLM

    built, loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loaded.values()), loaded
    return built


def scored(logits, sequence):
    """Log-probs of all tokens but the first."""
    return logits[:-1].log_softmax(-1).gather(-1, sequence[1:, None])[:, 0]


def compare(folder):
    """Largest gaps to transformers: log-probs one by one and packed, gradients of some weights."""
    from scaleup.models.packing import pack

    a, b, rows = ours(folder), theirs(folder), sequences()
    batch = pack(rows)
    packed = a(batch.tokens, batch.positions, None, packed_seq_params=batch.params)[0]
    gaps = {"alone": 0.0, "packed": 0.0}
    total_a, total_b, all_expected = 0.0, 0.0, []
    for row, logits in zip(rows, packed.split(batch.lengths), strict=True):
        alone = a(row[None], torch.arange(len(row))[None], None)[0]
        expected = scored(b(row[None]).logits[0], row)
        gaps["alone"] = max(gaps["alone"], (scored(alone, row) - expected).abs().max().item())
        gaps["packed"] = max(gaps["packed"], (scored(logits, row) - expected).abs().max().item())
        all_expected.append(expected.detach())
        total_a, total_b = total_a + scored(logits, row).sum(), total_b + expected.sum()
    total_a.backward()
    total_b.backward()
    pairs = (
        (a.embedding.word_embeddings, b.model.embed_tokens),
        (a.decoder.layers[0].input_layernorm, b.model.layers[0].input_layernorm),
        (a.decoder.layers[1].self_attention.linear_proj, b.model.layers[1].self_attn.o_proj),
        (a.decoder.final_layernorm, b.model.norm),
    )
    gaps["gradient"] = max(
        ((x.weight.grad - y.weight.grad).norm() / y.weight.grad.norm()).item() for x, y in pairs
    )
    return gaps | {"spread": torch.cat(all_expected).std().item()}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_log_probs_equal_transformers(rank, folders, kind, tie):
    """Float32 log-probs agree to 1e-5, alone and packed, and so do gradients."""
    (gaps,) = rank(compare, folders[kind, tie])
    print(kind, tie, gaps)
    assert gaps["alone"] < 1e-5
    assert gaps["packed"] < 1e-5
    assert gaps["gradient"] < 1e-5
    assert gaps["spread"] > 0.3  # log-probs that differ: agreement means something


def written_by_transformers(folder, out):
    """Another checkpoint of the same configuration, made and saved by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    made.save_pretrained(out, max_shard_size="200KB")
    return len(list(out.glob("*.safetensors")))


@pytest.mark.parametrize(("kind", "tie"), EVERY)
def test_a_checkpoint_of_transformers_is_read(rank, folders, tmp_path, kind, tie):
    """config.json and several files as save_pretrained writes them."""
    assert rank(written_by_transformers, folders[kind, tie], tmp_path)[0] > 1
    (gaps,) = rank(compare, tmp_path)
    assert gaps["packed"] < 1e-5
    assert gaps["gradient"] < 1e-5


def walked(record, folder):
    """`compare` of a family that is known for as long as it takes."""
    known = dict(FAMILIES)
    FAMILIES.update(eval(f"{{{record}}}", {"Family": Family}))
    try:
        (kind,) = FAMILIES.keys() - known.keys()
        return compare(tiny.write(folder, kind, seed=1, std=0.2))
    finally:
        FAMILIES.clear()
        FAMILIES.update(known)


def test_the_recipe_of_a_family(rank, tmp_path):
    """The record that CONTRIBUTING.md gives as an example is all it takes."""
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    section = page.split("## A model family")[1].split("\n## ")[0]
    record = section.split("```python\n")[1].split("```")[0]
    (gaps,) = rank(walked, record, tmp_path)
    assert gaps["packed"] < 1e-5
    assert gaps["gradient"] < 1e-5


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
VARIANTS = {
    "unnormalised top-k": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "llama3 rope": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "rope of transformers 5": (
        "llama",
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
    ),
    "a key for each query": ("llama", {"num_key_value_heads": None, "head_dim": None}),
    "one key": ("qwen3", {"num_key_value_heads": 1}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_fields_of_config_json_are_obeyed(rank, tmp_path, name):
    """Fields that change the function, or leave a default to the reader, agree too."""
    kind, fields = VARIANTS[name]
    (gaps,) = rank(compare, tiny.write(tmp_path, kind, seed=2, std=0.2, **fields))
    assert gaps["packed"] < 1e-5
    assert gaps["gradient"] < 1e-5


REFUSED = {
    "attention_bias must be False, got True": ("llama", {"attention_bias": True}, {}),
    "use_sliding_window must be False, got True": ("qwen3", {"use_sliding_window": True}, {}),
    "hidden_act must be silu, got gelu": ("llama", {"hidden_act": "gelu"}, {}),
    "mlp_only_layers must be [], got [0]": ("qwen3_moe", {"mlp_only_layers": [0]}, {}),
    "num_key_value_heads 2 cannot be shared by tp 4": ("qwen3", {}, {"tp": 4}),
    "num_experts 8 cannot be shared by ep 3": ("qwen3_moe", {}, {"ep": 3}),
    "num_hidden_layers 2 cannot be shared by pp 4": ("llama", {}, {"pp": 4}),
    "a dense model has no experts for ep 2": ("llama", {}, {"ep": 2}),
    "no rope scaling of type 'yarn'": ("llama", {"rope_scaling": {"rope_type": "yarn"}}, {}),
    "rope high_freq_factor must be 4, got 2": (
        "llama",
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 2}},
        {},
    ),
}


def refusal(hf, layout):
    """The sentence of a configuration that cannot be built."""
    from scaleup.models import megatron as model

    try:
        model.transformer_config(hf, model.Layout(**layout))
        model.rope(hf)
    except ValueError as error:
        return str(error)
    return "built"


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_model_that_would_be_wrong_is_refused(rank, sentence):
    """A field that Megatron would not obey, or a layout that does not fit, is one sentence."""
    kind, fields, layout = REFUSED[sentence]
    assert rank(refusal, tiny.config(kind, **fields), layout) == ["config.json: " + sentence]


def bad_layout():
    """The sentence of a layout that is larger than the world."""
    from scaleup.models import megatron as model

    try:
        model.start(model.Layout(tp=2))
    except ValueError as error:
        return str(error)
    return "started"


def test_a_layout_must_fit_the_world(rank):
    """TP 2 on one rank is one sentence."""
    assert rank(bad_layout) == ["layout TP2 does not fit a world of 1 ranks"]


def step(hf, layout, source, overrides, export=False):
    """One Adam step through Megatron's schedule, two packed micro-batches: loss, norm, next loss.

    With `export`, the weights after the step, from rank 0.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from scaleup.models import megatron as model
    from scaleup.models import weights
    from scaleup.models.packing import pack
    from simlab.core.logits import VocabShard, token_log_probs

    layout = model.Layout(*layout)
    model.start(layout)
    built = model.build(hf, layout, **overrides)
    weights.load(built, source)
    parallel = model.parallel_state
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(built.config, ddp, built)
    built.config.finalize_model_grads_func = finalize_model_grads
    settings = OptimizerConfig(
        lr=1e-2, clip_grad=0.1, use_distributed_optimizer=True, bf16=built.config.bf16
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    rows, ranks = sequences(lengths=(7, 16, 3, 11)), parallel.get_data_parallel_world_size()
    mine = rows[parallel.get_data_parallel_rank() :: ranks]
    micro = [mine[i::2] for i in range(2)]

    def reduce(op):
        def over_tp(x):
            torch.distributed.all_reduce(x, op, parallel.get_tensor_model_parallel_group())
            return x

        return over_tp

    def forward(batches, chunk):
        rows = next(batches)
        batch = pack(rows, multiple=layout.tp)
        logits = chunk(batch.tokens, batch.positions, None, packed_seq_params=batch.params)

        def loss(logits):
            logits = logits[0, : sum(batch.lengths)]
            token = torch.cat([row.roll(-1) for row in rows])
            start = parallel.get_tensor_model_parallel_rank() * logits.shape[-1]
            op = torch.distributed.ReduceOp
            shard = VocabShard(start, reduce(op.MAX), reduce(op.SUM))
            total = -token_log_probs(logits, token, parallel=shard).logp.sum()
            sums = torch.stack([total.detach(), torch.tensor(float(len(token)))])
            return total, torch.tensor(len(token), dtype=torch.int), sums

        return logits, loss

    def run(forward_only):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro),
            model=[wrapped],
            num_microbatches=2,
            seq_length=64,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        sums = torch.stack(found).sum(0) if found else torch.zeros(2)
        torch.distributed.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    first = run(False)
    _, norm, _ = optimizer.step()
    if export:
        tensors = dict(weights.export(wrapped))
        return run(True), tensors if torch.distributed.get_rank() == 0 else None
    return first, float(norm), run(True)


LAYOUTS = {
    "1": (1, (1, 1, 1), {}),
    "1 recompute": (
        1,
        (1, 1, 1),
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "DP2": (2, (1, 1, 1), {}),
    "EP2": (2, (1, 1, 2), {}),
    "TP2": (2, (2, 1, 1), {}),
    "TP2 EP2": (2, (2, 1, 2), {}),
    "PP2": (2, (1, 2, 1), {}),
}


@pytest.fixture(scope="module")
def reference():
    """The step of one rank, for each kind."""
    found = {}

    def of(kind, tie):
        if (kind, tie) not in found:
            hf = tiny.config(kind, tie=tie)
            arguments = (
                hf,
                (1, 1, 1),
                tiny.tensors(hf, 1, 0.2),
                {"calculate_per_token_loss": True},
            )
            found[kind, tie] = shared(1)(step, *arguments)[0]
        return found[kind, tie]

    return of


@pytest.mark.parametrize(
    ("kind", "tie", "name"),
    [
        *((kind, False, name) for kind in MIXTURES for name in LAYOUTS),
        *((kind, True, "PP2") for kind in DENSE),
        *((kind, tie, "TP2") for kind, tie in EVERY if kind in DENSE),
    ],
)
def test_every_layout_takes_the_same_step(reference, kind, tie, name):
    """Loss, gradient norm and the loss after a clipped Adam step equal those of one rank."""
    n, layout, overrides = LAYOUTS[name]
    hf = tiny.config(kind, tie=tie)
    overrides = overrides | {"calculate_per_token_loss": True}
    expected = reference(kind, tie)
    for found in shared(n)(step, hf, layout, tiny.tensors(hf, 1, 0.2), overrides):
        print(kind, tie, name, found)
        assert found == pytest.approx(expected, rel=1e-5)
    assert expected[2] < expected[0] - 0.1


def loss_of(hf, tensors):
    """The loss of `step`, computed on one rank without a schedule."""
    from scaleup.models import megatron as model
    from scaleup.models import weights
    from scaleup.models.packing import pack

    layout = model.Layout()
    model.start(layout)
    built = model.build(hf, layout)
    weights.load(built, tensors)
    rows = sequences(lengths=(7, 16, 3, 11))
    batch = pack(rows)
    with torch.no_grad():
        logits = built(batch.tokens, batch.positions, None, packed_seq_params=batch.params)[0]
    token = torch.cat([row.roll(-1) for row in rows])
    return torch.nn.functional.cross_entropy(logits, token).item()


@pytest.mark.parametrize(
    ("kind", "tie", "name"),
    [
        ("qwen3_moe", False, "TP2 EP2"),
        ("qwen3_moe", False, "EP2"),
        ("qwen3_moe", True, "PP2"),
        *((kind, True, "TP2") for kind in DENSE),
    ],
)
def test_what_was_trained_is_exported(kind, tie, name):
    """Weights after a step, exported and loaded on one rank, have the loss the layout measured."""
    n, layout, _ = LAYOUTS[name]
    hf = tiny.config(kind, tie=tie)
    source = tiny.tensors(hf, 1, 0.2)
    (found, tensors), _ = shared(n)(
        step, hf, layout, source, {"calculate_per_token_loss": True}, True
    )
    assert shared(1)(loss_of, hf, tensors) == [pytest.approx(found, rel=1e-5)]
    assert all((tensors[name] != source[name]).any() for name in source)


def test_bf16_takes_a_step(reference):
    """The same step in bf16: near the float32 one, and the loss falls."""
    hf = tiny.config()
    overrides = {"calculate_per_token_loss": True, "dtype": torch.bfloat16}
    source = tiny.tensors(hf, 1, 0.2)
    for first, _, second in shared(2)(step, hf, (2, 1, 2), source, overrides):
        assert first == pytest.approx(reference("qwen3_moe", False)[0], rel=0.02)
        assert second < first - 0.1


def threads(layout):
    """Threads of a rank after it has changed to a layout (tp, pp, ep)."""
    from scaleup.models.megatron import Layout, start

    start(Layout(*layout))
    return len(os.listdir("/proc/self/task"))


def test_layouts_leave_no_threads_behind():
    """Gloo's threads poll, so a rank has those of a few groups, whatever layouts it has had."""
    with Ranks(2) as ranks:
        layouts = [(1, 1, 1), (2, 1, 2), (1, 2, 1), (1, 1, 2)] * 2
        counts = [max(ranks(threads, layout)) for layout in layouts]
    assert (
        counts[-1] == counts[1] < 32
    )  # one group a purpose: 65 of the first layout, 51 more of each


NO_SHIM = """
import sys, torch
torch.cuda.is_available = lambda: True
before = [torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.cuda]
from scaleup.cpu import mcore
assert mcore.install() is False
assert before == [torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.cuda]
assert not any(name.startswith("megatron") for name in sys.modules)
"""


def test_the_shim_does_nothing_where_cuda_is():
    """With CUDA, install() replaces nothing and imports nothing."""
    subprocess.run([sys.executable, "-c", NO_SHIM], check=True, timeout=120)


def failing():
    """A rank that fails while the other waits for it."""
    if torch.distributed.get_rank() == 1:
        raise KeyError("lost")
    torch.distributed.barrier()


def test_a_failing_rank_ends_the_call():
    """The error of the first rank that fails is raised, and the ranks are gone."""
    with Ranks(2) as ranks:
        with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed(.|\n)*KeyError: 'lost'"):
            ranks(failing)
        with pytest.raises(RuntimeError, match="these ranks are closed"):
            ranks(failing)
