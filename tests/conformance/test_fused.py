"""torch.compile takes every stabilizer whole, and the compiled loss is the same loss."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from simlab.contract.batches import ragged
from simlab.core.aggregate import seq_mean_token_mean, token_mean
from simlab.stabilizers import STABILIZERS, bind, required
from simlab.stabilizers.fused import fuse, terms

OPEN = {"seqclip": {"low": 0.5, "high": 2.0}, "spo_scaled": {"alpha": 0.5}}


def method(name):
    assert name in OPEN or not required(STABILIZERS[name].surrogate)
    return bind(name, **OPEN.get(name, {}))


def run(f, b, stats):
    """(terms, gradient) of a loss function on a fresh leaf."""
    logp = b.logp.clone().requires_grad_()
    found = f(replace(b, logp=logp), **stats)
    (grad,) = torch.autograd.grad(found.total.sum(), logp)
    return found, grad


def agree(got, want):
    (a, x), (b, y) = got, want
    assert torch.equal(a.count, b.count)
    torch.testing.assert_close(a.total, b.total, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    assert (y != 0).any()
    assert a.shown.keys() == a.how.keys()
    assert a.how == b.how
    for name, value in b.shown.items():
        torch.testing.assert_close(a.shown[name], value, rtol=1e-5, atol=1e-6)
    assert torch.equal(a.active, b.active)


@pytest.mark.parametrize("name", STABILIZERS)
def test_no_graph_breaks(name):
    """Every stabilizer is traced as one graph, which gives the same numbers and gradient."""
    torch.compiler.reset()
    stabilizer, b = method(name), ragged(3, by_token=True, dtype=torch.float32)
    stats = stabilizer.stats([b])
    want = run(partial(terms, stabilizer, token_mean, True), b, stats)
    agree(run(fuse(stabilizer, backend="eager"), b, stats), want)


def test_nothing_more_than_the_loss_unless_it_is_asked_for():
    """Without `show` a compiled loss returns its sum and count, and keeps nothing per token."""
    torch.compiler.reset()
    stabilizer, b = bind("sat"), ragged(3, dtype=torch.float32)
    stats = stabilizer.stats([b])
    lean, want = (
        fuse(stabilizer, show=show, backend="eager")(b, **stats) for show in (False, True)
    )
    assert lean[2:] == ({}, {}, None)
    assert want.shown
    assert torch.equal(lean.total, want.total)
    assert torch.equal(lean.count, want.count)


@pytest.mark.parametrize(("name", "backend"), [("sat", "inductor"), ("gspo", "aot_eager")])
def test_the_compiled_loss_is_the_same_loss(name, backend):
    """Machine code (one method; benchmarks/losses.py checks all) agrees to 1e-6 in the gradient and
    takes masked NaN; a second batch size works as well."""
    torch.compiler.reset()
    stabilizer = bind(name)
    f = fuse(stabilizer, seq_mean_token_mean, backend=backend)
    sizes = [(3, 5, 9, 40), (31, 2, 60, 7, 8)]
    for seed, lengths in enumerate(sizes[: 1 if backend == "inductor" else 2]):
        b = ragged(seed, sizes=lengths, dtype=torch.float32)
        b = replace(b, logp_mu=torch.where(b.mask, b.logp_mu, torch.nan))
        stats = stabilizer.stats([b])
        want = run(partial(terms, stabilizer, seq_mean_token_mean, True), b, stats)
        agree(run(f, b, stats), want)
