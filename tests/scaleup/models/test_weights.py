"""Weights between Hugging Face and Megatron, in every layout, bit by bit."""

import re

import pytest
import torch

from scaleup.engines_report.launch import shared
from scaleup.models import slots, tiny, weights
from scaleup.models.families import FAMILIES

DENSE = [kind for kind, family in FAMILIES.items() if not family.moe]
# kind, tied, (tp, pp, ep); sequence parallelism is on with tp
ROUND_TRIPS = [
    *((kind, tie, (1, 1, 1)) for kind in FAMILIES for tie in (False, True)),
    *((kind, True, (1, 2, 1)) for kind in FAMILIES),
    *((kind, tie, (2, 1, 1)) for kind in DENSE for tie in (False, True)),
    ("qwen3_moe", False, (2, 1, 2)),
    ("qwen3_moe", True, (2, 1, 2)),
    ("qwen3_moe", False, (1, 1, 2)),
    ("qwen3_moe", False, (1, 2, 1)),
]


@pytest.fixture
def two():
    """Two ranks, used by every layout after the other."""
    return shared(2)


@pytest.fixture
def one():
    """One rank: the world of the layout 1."""
    return shared(1)


@pytest.fixture
def four():
    """Four ranks."""
    return shared(4)


def built(hf, layout=(1, 1, 1), **overrides):
    """A Megatron model without weights, in layout (tp, pp, ep)."""
    from scaleup.models import megatron as model

    layout = model.Layout(*layout)
    model.start(layout)
    return model.build(hf, layout, **overrides)


def round_trip(hf, layout, dtype):
    """Names in order, checksum of the export, and how many numbers this rank holds."""
    model = built(hf, layout, dtype=dtype)
    source = {name: t.to(dtype) for name, t in tiny.tensors(hf, seed=3).items()}
    weights.load(model, source)
    exported = list(weights.export(model))
    for name, tensor in exported:  # a push serialises the storage
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    found = weights.checksum(exported)
    for parameter in model.parameters():
        parameter.detach().zero_()
    assert weights.checksum(exported) == found  # copies, not views of the parameters
    names = [name for name, _ in exported]
    parameters = sum(p.numel() for p in model.parameters())
    return names, found, weights.checksum(source), parameters


def of(ranks_by_size, layout):
    """The ranks whose number the layout needs."""
    return ranks_by_size[0] if layout == (1, 1, 1) else ranks_by_size[1]


@pytest.mark.parametrize(("kind", "tie", "layout"), ROUND_TRIPS)
def test_round_trip_is_bit_exact(one, two, kind, tie, layout):
    """Hugging Face to Megatron and back: every name, in order, and every bit, on every rank."""
    hf = tiny.config(kind, tie=tie)
    results = of((one, two), layout)(round_trip, hf, layout, torch.float32)
    for names, exported, source, parameters in results:
        assert names == list(slots.names(hf))
        assert exported == source
        whole = sum(torch.Size(shape).numel() for shape in slots.names(hf).values())
        assert layout == (1, 1, 1) or parameters < whole * (0.8 if not tie else 0.9)


def test_round_trip_in_bf16(two):
    """bf16 weights keep their bits too."""
    for _, exported, source, _ in two(round_trip, tiny.config(), (2, 1, 2), torch.bfloat16):
        assert exported == source


@pytest.mark.parametrize("layout", [(2, 2, 2), (2, 1, 4), (1, 2, 2), (1, 1, 2)])
def test_round_trip_on_four_ranks(four, layout):
    """TP, PP and EP at once, and experts with data parallel copies."""
    for _, exported, source, _ in four(round_trip, tiny.config(), layout, torch.float32):
        assert exported == source


def wrong(hf, layout, what):
    """The sentences of a load that must fail."""
    source = tiny.tensors(hf)
    name = "model.layers.1.self_attn.k_proj.weight"
    if what == "name":
        source["model.layers.9.self_attn.k_proj.weight"] = source[name]
    elif what == "shape":
        source[name] = source[name][:-1]
    elif what == "missing":
        del source[name]
    elif what == "many":
        source = {"model.norm.weight": source["model.norm.weight"]}
    elif what == "twice":
        source = [*source.items(), (name, source[name])]
    elif what == "head":
        source["lm_head.weight"] = source["model.embed_tokens.weight"] + 1
    try:
        weights.load(built(hf, layout), source)
    except weights.WeightsError as error:
        return str(error)
    return "loaded"


SENTENCES = {
    "name": "weights: the model has no tensor 'model.layers.9.self_attn.k_proj.weight'",
    "shape": "weights: 'model.layers.1.self_attn.k_proj.weight' has shape (63, 64), the model needs (64, 64)",
    "missing": "weights: 'model.layers.1.self_attn.k_proj.weight' did not come",
    "many": "weights: 'model.embed_tokens.weight' and 22 more did not come",
    "twice": "weights: 'model.layers.1.self_attn.k_proj.weight' came twice",
    "head": "weights: the model is tied, but 'lm_head.weight' is not the embedding",
}


@pytest.mark.parametrize("what", SENTENCES)
def test_a_load_that_does_not_fit_is_one_sentence(one, two, what):
    """The same sentence on every rank, also on a rank that does not hold the tensor."""
    hf = tiny.config("qwen3", tie=True)
    assert one(wrong, hf, (1, 1, 1), what) == [SENTENCES[what]]
    assert two(wrong, hf, (1, 2, 1), what) == [SENTENCES[what]] * 2


def tied_head(hf):
    """Load a tied checkpoint that also holds its head."""
    model, source = built(hf), tiny.tensors(hf)
    weights.load(model, source | {"lm_head.weight": source["model.embed_tokens.weight"]})
    return weights.checksum(weights.export(model)) == weights.checksum(source)


def test_a_tied_checkpoint_may_hold_its_head(one):
    """lm_head.weight equal to the embedding is accepted, and not exported."""
    assert one(tied_head, tiny.config("llama", tie=True)) == [True]


def last_stage(hf):
    """The weight the last stage multiplies with, and the embedding of the file."""
    from megatron.core import parallel_state

    model, source = built(hf, (1, 2, 1)), tiny.tensors(hf)
    weights.load(model, source)
    if not parallel_state.is_pipeline_last_stage():
        return None
    return torch.equal(model.output_layer.weight, source["model.embed_tokens.weight"])


def test_tied_head_of_a_pipeline_is_filled(two):
    """The last stage has a copy of the embedding of its own, and the load writes it."""
    assert two(last_stage, tiny.config("llama", tie=True)) == [None, True]


def unloaded(hf):
    """Log-probs of a model nobody loaded."""
    model = built(hf)
    return model(torch.tensor([[1, 2]]), torch.arange(2)[None], None).isnan().all().item()


def test_a_model_without_weights_says_so(one):
    """Parameters are NaN until a load: nothing stale can pass for a result."""
    assert one(unloaded, tiny.config("qwen3")) == [True]


def test_checksum_sees_every_change():
    """One bit, a swap of names, a dtype, a shape; not the order."""
    source = tiny.tensors(tiny.config("llama"))
    base = weights.checksum(source)
    assert weights.checksum(reversed(source.items())) == base
    k, v = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "kv")
    bit = source[k].clone()
    bit.view(torch.int32)[3, 5] ^= 1
    for change in (
        {k: bit},
        {k: source[v], v: source[k]},
        {k: source[k].double()},
        {k: source[k].flatten()},
    ):
        assert weights.checksum(source | change) != base
    assert weights.checksum({n: t for n, t in source.items() if n != k}) != base


def test_files_on_disk(tmp_path):
    """What tiny writes is what read gives; an empty folder is one sentence."""
    folder = tiny.write(tmp_path / "model", "qwen3", seed=5, tie=True)
    expected = tiny.tensors(tiny.config("qwen3", tie=True), seed=5)
    assert weights.checksum(weights.read(folder)) == weights.checksum(expected)
    with pytest.raises(weights.WeightsError, match=r"has no \.safetensors file"):
        next(weights.read(tmp_path))


def test_unknown_kinds_are_refused():
    """A model this mapping does not know, or knows too little of, is one sentence."""
    with pytest.raises(ValueError, match="model_type 'mixtral' is not known"):
        slots.names({"model_type": "mixtral"})
    with pytest.raises(ValueError, match="json has no rms_norm_eps"):
        slots.names(tiny.config(rms_norm_eps=None))
    with pytest.raises(ValueError, match="unknown kind 'gpt2'"):
        tiny.config("gpt2")


def test_a_published_size():
    """Qwen2.5-0.5B has 494,032,768 parameters; 24 layers x (896 + 2 x 128) of them are biases."""
    hf = {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "use_sliding_window": False, "sliding_window": 32768,
    }  # fmt: skip
    sizes = {name: torch.Size(shape).numel() for name, shape in slots.names(hf).items()}
    assert sum(sizes.values()) == 494_032_768
    assert sum(n for name, n in sizes.items() if name.endswith("bias")) == 24 * (896 + 2 * 128)


def te_names(hf, layout):
    """Names of a model of Transformer Engine's parts, brought back to those of the local spec."""
    model = built(hf, layout)
    local = weights.local_parameters(model)
    norm = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
    renamed = []
    for name, parameter in model.named_parameters():
        for module, linear in norm.items():
            if module == "input_layernorm" or not model.config.num_moe_experts:
                name = name.replace(f"{module}.weight", f"{linear}.layer_norm_weight")
        name = re.sub(r"local_experts\.(\d+)\.(\w+)\.weight", r"\2.weight\1", name)
        renamed.append((name, parameter))
    model.named_parameters = lambda: iter(renamed)
    again = weights.local_parameters(model)
    changed = sum(a != b for (a, _), b in zip(renamed, local, strict=True))
    same = again.keys() == local.keys() and all(again[n] is local[n] for n in local)
    return same, changed > 0


@pytest.mark.parametrize(("kind", "layout"), [("qwen3_moe", (1, 1, 2)), ("llama", (1, 2, 1))])
def test_names_of_transformer_engine(two, kind, layout):
    """Norms inside linear layers and grouped experts get the names of the local spec."""
    assert two(te_names, tiny.config(kind), layout) == [(True, True)] * 2
