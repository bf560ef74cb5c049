"""One real SGLang engine a session, on a tiny Qwen3-MoE, and transformers as the reference."""

from __future__ import annotations

import itertools
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from safetensors.torch import load_file

from scaleup.models import tiny
from scaleup.rollout.local import LocalEngine

torch.set_num_threads(1)


class Reference:
    """The eager float32 model of transformers for a checkpoint folder."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM

        self.folder = folder
        self.tensors = load_file(folder / "model.safetensors")
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def logits(self, ids):
        """Logits [T, V] of token ids [T]."""
        return self.model(torch.tensor([ids])).logits[0]

    def logp(self, sample, temperature=1.0):
        """Log-probs [T] of the tokens of a sample, nats."""
        ids, P = sample.prompt + sample.output, len(sample.prompt)
        logits = self.logits(ids)[P - 1 : -1]
        output = torch.tensor(sample.output)[:, None]
        return (logits / temperature).log_softmax(-1).gather(1, output)[:, 0]

    def gap(self, sample, mine=slice(None), temperature=1.0, ties=False):
        """Largest distance, nats, of a sample's log-probs from these weights', over the tokens `mine`.

        Tokens behind a tie of experts count with `ties` alone: to ask for a difference, set it.
        """
        decided = self.decided(sample.prompt + sample.output)[len(sample.prompt) - 1 : -1]
        d = (self.logp(sample, temperature) - sample.logp_mu).abs()
        return torch.where(decided | ties, d, 0)[mine].max().item()

    def decided(self, ids):
        """For token ids [T], True up to the first that two experts tie for to 2e-5.

        Rounding decides a tie, and every later token of the answer may differ as if by other weights.
        One token in ten thousand is such a tie.
        """
        return (self.margins(ids) > 2e-5).cumprod(0).bool()

    @torch.no_grad()
    def margins(self, ids):
        """Smallest lead [T], over the layers, of the last expert chosen over the first that is not."""
        K = getattr(self.model.config, "num_experts_per_tok", None)
        if not K:
            return torch.full((len(ids),), torch.inf)
        layers = self.model(torch.tensor([ids]), output_router_logits=True).router_logits
        tops = [r.view(len(ids), -1).topk(K + 1).values for r in layers]
        return torch.stack([top[:, K - 1] - top[:, K] for top in tops]).amin(0)

    @torch.no_grad()
    def experts(self, ids):
        """Sorted expert ids [T, layers, K] of token ids [T]."""
        found = self.model(torch.tensor([ids]), output_router_logits=True).router_logits
        K = self.model.config.num_experts_per_tok
        return torch.stack([r.view(len(ids), -1).topk(K).indices.sort().values for r in found], 1)


@pytest.fixture(scope="session")
def old(tmp_path_factory):
    """The tiny Qwen3-MoE that the session engine starts with."""
    return Reference(tiny.write(tmp_path_factory.mktemp("old"), "qwen3_moe", seed=0))


@pytest.fixture(scope="session")
def new(tmp_path_factory):
    """The same architecture with other weights."""
    return Reference(tiny.write(tmp_path_factory.mktemp("new"), "qwen3_moe", seed=1))


@pytest.fixture(scope="session")
def reference():
    """Reference(folder), for a checkpoint of the test's own."""
    return Reference


@pytest.fixture(scope="session")
def new_version():
    """A version number that was not used before, at each call."""
    counter = itertools.count(1)
    return lambda: next(counter)


@pytest.fixture(scope="session")
def session_engine(old):
    """The one engine; use `engine`, which hands it over in a known state."""
    engine = LocalEngine(old.folder)
    yield engine
    engine.close()


@pytest.fixture
def engine(session_engine, old, new_version):
    """The engine of the session, idle, running, and serving the weights of `old`."""
    session_engine.abort_all()
    session_engine.push(old.tensors, new_version())
    if session_engine.paused:
        session_engine.resume()
    return session_engine
