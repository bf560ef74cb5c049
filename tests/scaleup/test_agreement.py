"""Hugging Face -> Megatron -> SGLang: the two engines give the same log-probs, in every layout."""

import pytest
import torch

from scaleup import tiny, weights
from scaleup.launch import shared
from scaleup.rollout import serve

TOLERANCE = 1e-5  # nats, float32
PROMPTS = [[1, 2, 3], [400, 5, 6, 7, 8, 9], [77]]


def through(hf, layout, source):
    """The full tensors after a way through Megatron in layout (tp, pp, ep), from rank 0."""
    from scaleup import model

    layout = model.Layout(*layout)
    model.start(layout)
    built = model.build(hf, layout)
    weights.load(built, source)
    tensors = dict(weights.export(built))
    return tensors if torch.distributed.get_rank() == 0 else None


def score(hf, tensors, answers):
    """Megatron's log-probs of the sampled tokens, packed, for pairs of prompt and output."""
    from scaleup import model

    layout = model.Layout()
    model.start(layout)
    built = model.build(hf, layout)
    weights.load(built, tensors)
    batch = model.pack([prompt + output for prompt, output in answers])
    with torch.no_grad():
        logits = built(batch.tokens, batch.positions, None, packed_seq_params=batch.params)[0]
    found = []
    for (prompt, output), rows in zip(answers, logits.split(batch.lengths), strict=True):
        rows = rows[len(prompt) - 1 : -1].log_softmax(-1)
        found.append(rows.gather(-1, torch.tensor(output)[:, None])[:, 0])
    return found


def check(engine, hf, layout, version, seed):
    """Weights that the engine has not seen go through Megatron to it; the largest gap in nats."""
    n = max(layout[0] * layout[1], layout[2])
    source = tiny.tensors(hf, seed, 0.2)
    tensors = shared(n)(through, hf, layout, source)[0]
    engine.push(tensors.items(), version)
    samples = engine.generate(PROMPTS, n=4, max_new_tokens=24)
    assert all((s.version == version).all() for s in samples)
    answers = [(s.prompt, s.output) for s in samples]
    ours = torch.cat(shared(1)(score, hf, source, answers)[0])
    theirs = torch.cat([s.logp_mu for s in samples])
    assert ours.std() > 0.3  # agreement means something
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 2), (1, 1, 2), (1, 2, 1)])
def test_mixture_of_experts(engine, new_version, layout):
    """Qwen3-MoE: SGLang's log-probs of its own samples equal Megatron's to 1e-5."""
    gap = check(engine, tiny.config(), layout, new_version(), seed=11 + sum(layout))
    print("qwen3_moe", layout, gap)
    assert gap < TOLERANCE


@pytest.mark.parametrize(("kind", "tie"), [("qwen3", True), ("llama", False)])
def test_dense(tmp_path, kind, tie):
    """Dense Qwen3, tied, and Llama: the same, on a server, for every layout of a dense model."""
    hf = tiny.config(kind, tie=tie)
    engine = serve(tiny.write(tmp_path, kind, seed=0, tie=tie))
    try:
        for version, layout in enumerate([(1, 1, 1), (2, 1, 1), (1, 2, 1)], 1):
            gap = check(engine, hf, layout, version, seed=20 + version)
            print(kind, layout, gap)
            assert gap < TOLERANCE
    finally:
        engine.close()
