"""Promises about being called: again, on another device, without a field, as one graph."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from simlab.contract.batches import graded_head, ragged
from simlab.contract.require import BrokenPromise, need
from simlab.core.tokens import OPTIONAL, TokenBatch
from simlab.stabilizers import Stabilizer
from simlab.stabilizers.fused import fuse

REPEATS = 12
SIZES = (3, 60, 1, 30, 90)


def again(bound: Stabilizer) -> None:
    """The same batch gives the same bits however often it comes, whatever came between, with no draw."""
    b, other = ragged(12, sizes=SIZES, by_token=True), ragged(13, by_token=True)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    want, want_grad = graded_head(bound, b)
    graded_head(bound, other)
    got, got_grad = graded_head(bound, b)
    cure = "keep nothing between calls, and read b.uniform instead of drawing"
    need(got.S == want.S, f"S of the same batch differs from call to call: {cure}")
    need(got_grad == want_grad, f"the gradient differs from call to call: {cure}")
    twice = [bound.stats([b]) for _ in range(2)]
    silent = [bound.surrogate(b, **twice[i % 2]).S for i in range(REPEATS)]
    for S in silent:
        need(S == silent[0], f"S of the same batch differs from call to call: {cure}")
    need(torch.equal(before[0], torch.get_rng_state()), f"it draws from torch's generator: {cure}")
    need(before[1] == random.getstate(), f"it draws from Python's generator: {cure}")
    need(before[2] == str(np.random.get_state()), f"it draws from numpy's generator: {cure}")


def untouched(bound: Stabilizer) -> None:
    """No field of the batch and none of the whole-batch numbers is written to."""
    b = ragged(14, by_token=True)
    copy = {name: x.clone() for name, x in b.held().items()}
    stats = bound.stats([b])
    for step in ("whole_batch", "surrogate"):
        kept = {name: x.clone() for name, x in stats.items() if isinstance(x, Tensor)}
        if step == "surrogate":
            out = graded_head(bound, b, **stats)[0]
            bound.surrogate(b, **stats)
            [diagnostic.value for diagnostic in out.diagnostics.values()]
        for name, x in copy.items():
            need(torch.equal(x, getattr(b, name)), f"{step} writes into b.{name}: work on a copy")
        for name, x in kept.items():
            need(torch.equal(x, stats[name]), f"surrogate writes into {name}: work on a copy")


def device(bound: Stabilizer) -> None:
    """Every tensor is made where the batch is."""
    b = ragged(15, by_token=True)
    try:
        with torch.device("meta"):  # what is made without a device ends elsewhere than the batch
            stats = bound.stats([b])
            out = bound.surrogate(b, **stats)
            shown = {name: diagnostic.value for name, diagnostic in out.diagnostics.items()}
    except (RuntimeError, NotImplementedError, TypeError) as error:
        text = " ".join(str(error).split())
        raise BrokenPromise(
            f"a tensor is made on the default device: pass device=b.logp.device ({text})"
        ) from error
    for name, x in (stats | {"S": out.S, "active": out.active} | shown).items():
        if isinstance(x, Tensor):
            need(not x.is_meta, f"{name} is made on the default device: pass device=b.logp.device")


def fields_named(bound: Stabilizer) -> None:
    """Without an optional field a method works, or names itself and the field in one line."""
    b = ragged(8)
    for name in OPTIONAL:
        try:
            bound(replace(b, **{name: None}))
        except ValueError as error:
            said = str(error)
            good = bound.name in said and name in said and "\n" not in said
            need(good, f"without {name} it says {said!r}")


def one_graph(bound: Stabilizer) -> None:
    """`fuse` takes the method as one graph."""
    b: TokenBatch = ragged(16, by_token=True, dtype=torch.float32)
    stats = bound.stats([b])
    torch.compiler.reset()
    try:
        fuse(bound, backend="eager")(b, **stats)
    except Exception as error:  # dynamo's own, of many classes
        text = str(error).strip().splitlines()[0]
        raise BrokenPromise(
            f"the graph breaks under fuse: no .item(), no branch on a tensor, no print ({text})"
        ) from error
