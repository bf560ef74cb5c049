"""Seeded logs of a language-like policy, clean or with one fault, and what is said of a bad one."""

import json

import numpy as np
import pytest

from simlab.token_log.names import Names
from simlab.token_log.pairs import read_pairs

V = 50  # words


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def bf16(x):
    """Rounded to the grid of bfloat16."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def states(rng, n):
    """Logits `[n, V]` of a trainer: peaked, flat and in between, as a language model's are."""
    return rng.normal(size=(n, V)) * rng.uniform(0.5, 8, size=(n, 1))


def draw(rng, logp):
    """One word of each row."""
    return (logp + rng.gumbel(size=logp.shape)).argmax(-1)


def engine(rng, z, noise, size):
    """The engine's logits at equal weights."""
    if noise == "gaussian":
        return z + rng.normal(size=z.shape) * size
    if noise == "student_t":
        return z + rng.standard_t(4, size=z.shape) * size
    return bf16(z * size) / size  # a coarser grid where `size` is small


def log(
    seed,
    responses,
    tokens,
    noise="gaussian",
    size=0.05,
    trainer_t=1.0,
    engine_t=1.0,
    drawn_t=None,
    keep=1.0,
):
    """(trainer, rollout) `[responses, tokens]`: an engine draws, both sides score.

    `trainer_t` and `engine_t` are the temperatures that the two columns are scored at, `drawn_t` that
    of the draw; the engine keeps the likeliest words of a nucleus `keep`.
    """
    rng = np.random.default_rng(seed)
    z = states(rng, responses * tokens)
    e = engine(rng, z, noise, size)
    mu = log_softmax(e / (engine_t if drawn_t is None else drawn_t))
    scored = log_softmax(e / engine_t)
    if keep < 1:
        order = np.argsort(-mu, axis=-1)
        sorted_p = np.exp(np.take_along_axis(mu, order, -1))
        out = np.cumsum(sorted_p, -1) - sorted_p >= keep
        cut = np.zeros_like(out)
        np.put_along_axis(cut, order, out, -1)
        mu = log_softmax(np.where(cut, -1e9, mu))
        scored = mu
    a = draw(rng, mu)[:, None]
    pi = log_softmax(z / trainer_t)
    trainer, rollout = (
        np.take_along_axis(x, a, -1).reshape(responses, tokens) for x in (pi, scored)
    )
    return trainer, rollout


def measured(seed, responses, tokens, size=0.05):
    """(trainer, rollout): noise on the log-probs themselves, added after the draw."""
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, size=(responses, tokens))
    return np.minimum(rollout + rng.normal(size=rollout.shape) * size, 0), rollout


def rows_of(trainer, rollout, **more):
    """Rows of a log `[R, T]`; further columns by name, a list a row."""
    rows = [
        {"rollout_logprobs": r.tolist(), "trainer_logprobs": t.tolist()}
        for t, r in zip(trainer, rollout, strict=True)
    ]
    for name, column in more.items():
        for row, value in zip(rows, column, strict=True):
            row[name] = value
    return rows


def wrote(tmp_path, rows, name="log.jsonl"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def small(seed=0, rows=8, tokens=6, size=0.03):
    """The small input of most cases: (trainer, rollout), rollout in -0.2 .. -6."""
    rng = np.random.default_rng(seed)
    rollout = rng.uniform(-6, -0.2, size=(rows, tokens))
    return rollout + rng.normal(size=rollout.shape) * size, rollout


def sentence(tmp_path, rows, names=Names()):  # noqa: B008
    """The refusal of a log: one line of at most 200 characters behind the path."""
    path = wrote(tmp_path, rows)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_pairs(path, names)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: ")
    text = text.removeprefix(f"{path}: ")
    assert len(text.split("; columns: ")[0]) <= 200
    return text
