"""What every stabilizer promises, each promise a function that raises BrokenPromise.

The test-suite runs them over the registry, `--method-file` over a user's file before it may join a
comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from simlab.aggregate import AGGREGATIONS, mean
from simlab.batch_stats import reduce_diagnostics
from simlab.batches import (
    INTEGER,
    aggregate,
    by_response,
    cast,
    extreme,
    graded,
    ragged,
)
from simlab.stabilizers import Stabilizer
from simlab.tokens import OPTIONAL, TOP, nothing

# columns that a run has of itself, in the simulator or on real engines
LOGGED = frozenset((
    "experiment", "version", "commit", "config", "arm", "method", "arguments", "lag", "replay",
    "seed", "step", "J", "J_mu", "L_prime", "remainder", "S", "D_max", "penalty_mean",
    "penalty_max", "tokens", "d_bar", "d_mean", "d_max", "d_kurtosis", "d_square", "d_q50",
    "d_q90", "d_q99", "k1", "k2", "k3", "kl", "kl_k1", "kl_k3", "ess", "chi2", "d_policy",
    "d_impl", "d_engine", "reward", "mixed", "flat_groups", "cut", "unlike_ppo", "active",
    "loss", "grad_norm", "updated", "skipped_steps", "age", "age_max", "length", "entropy",
    "screened", "samples", "micro_batches", "queue", "in_flight", "served", "aborted",
    "seconds", "engine_busy", "trainer_busy", "engine_restarts",
))  # fmt: skip


class BrokenPromise(ValueError):
    """A stabilizer does not do what every stabilizer must; the message says what."""


def _need(holds: bool | Tensor, detail: str) -> None:
    if not bool(torch.as_tensor(holds).all()):
        raise BrokenPromise(detail)


def _close(got: Tensor, want: Tensor, detail: str, tol: float = 1e-10) -> None:
    _need(torch.allclose(got, want, rtol=tol, atol=tol * 0.01), detail)


def shapes(bound: Stabilizer) -> None:
    """S and active are [..., N] and off under the mask; active is bool; S is not all 0."""
    b = ragged(lanes=(2, 3), by_token=True)
    out = bound(b)
    _need(
        out.S.shape == b.mask.shape, f"S has shape {tuple(out.S.shape)}, not {tuple(b.mask.shape)}"
    )
    _need(
        out.active.shape == b.mask.shape and out.active.dtype == torch.bool,
        "active is not bool [..., N]",
    )
    _need(~out.active[~b.mask], "a masked token is active")
    _need(out.S[~b.mask] == 0, "S is not 0 on a masked token")
    _need((out.S[b.mask] != 0).any(), "S is 0 everywhere")


def lanes(bound: Stabilizer) -> None:
    """Lanes do not see each other: [2, 3, N] gives the answers of its six lanes."""
    b = ragged(1, lanes=(2, 3), by_token=True)
    out, grad = graded(bound, b)
    shown = reduce_diagnostics(b, out.diagnostics)
    for i, j in ((0, 0), (0, 2), (1, 1)):
        lane = replace(b, **{name: x[i, j] for name, x in b.held().items()})
        alone, alone_grad = graded(bound, lane)
        _close(out.S[i, j].detach(), alone.S.detach(), "S of a lane depends on the other lanes")
        _close(grad[i, j], alone_grad, "the gradient of a lane depends on the other lanes")
        _need(out.active[i, j] == alone.active, "active of a lane depends on the other lanes")
        for name, value in reduce_diagnostics(lane, alone.diagnostics).items():
            _close(shown[name][i, j], value, f"{name} of a lane depends on the other lanes")


def diagnostics(bound: Stabilizer) -> None:
    """Every diagnostic reduces by mean, min or max to one number a lane, under a name of its own."""
    b = ragged(2, lanes=(2,))
    found = bound(b).diagnostics
    for name, value in reduce_diagnostics(b, found).items():
        _need(name not in LOGGED, f"{name} is a column that every run has; call it otherwise")
        _need(found[name].reduce in ("mean", "min", "max"), f"{name} has an unknown reducer")
        _need(value.shape == (2,), f"{name} does not reduce to one number a lane")
        _need(~value.isnan(), f"{name} is NaN")


def masked(bound: Stabilizer) -> None:
    """What stands under the mask is never read: NaN, infinities and wild indices change no bit."""
    clean = ragged(3, by_token=True)
    want, want_grad = graded(bound, clean)
    shown = reduce_diagnostics(clean, want.diagnostics)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        dirty = {}
        for name, x in clean.held().items():
            mask = clean.mask.unsqueeze(-1) if name in TOP else clean.mask
            if name != "mask":
                dirty[name] = torch.where(mask, x, -1 if name in INTEGER else garbage)
        b = replace(clean, **dirty)
        got, got_grad = graded(bound, b)
        what = f"{garbage} under the mask changes"
        _need(got.S == want.S, f"{what} S")
        _need(got_grad == want_grad, f"{what} the gradient")
        _need(got.active == want.active, f"{what} active")
        for name, value in reduce_diagnostics(b, got.diagnostics).items():
            _need(value == shown[name], f"{what} {name}")
        for how in AGGREGATIONS:
            parts = (aggregate(how, x.S, y)[0] for x, y in ((got, b), (want, clean)))
            _need(torch.equal(*parts), f"{what} the loss")


def order(bound: Stabilizer) -> None:
    """The order of tokens does not matter: a permutation permutes S, the gradient and active."""
    for seed in range(3):
        b = ragged(seed, by_token=True)
        turn = torch.randperm(b.mask.shape[-1], generator=torch.Generator().manual_seed(seed))
        (want, want_grad), (got, got_grad) = graded(bound, b), graded(bound, b.take(turn))
        _close(got.S.detach(), want.S.detach()[turn], "S depends on the order of tokens")
        _close(got_grad, want_grad[turn], "the gradient depends on the order of tokens")
        _need(got.active == want.active[turn], "active depends on the order of tokens")


def micro_batches(bound: Stabilizer) -> None:
    """Loss and gradient do not depend on how the batch is cut into micro-batches of whole responses."""
    b = ragged(4)
    leaf = b.logp.clone().requires_grad_()
    whole = replace(b, logp=leaf)
    micros = by_response(whole, [[5], [0, 3], [1, 2, 4, 6], []])
    out, stats = bound(whole), bound.stats(micros)
    parts = [bound.surrogate(micro, **stats) for micro in micros]
    for how in AGGREGATIONS:
        loss = mean(*aggregate(how, out.S, whole))
        (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        terms = [aggregate(how, x.S, micro) for x, micro in zip(parts, micros, strict=True)]
        split = mean(sum(t[0] for t in terms), sum(t[1] for t in terms))
        (split_grad,) = torch.autograd.grad(split, leaf, retain_graph=True)
        _need(loss != 0, "the loss is 0")
        _close(split.detach(), loss.detach(), f"the {how} loss depends on the micro-batch")
        _close(split_grad, grad, f"the {how} gradient depends on the micro-batch")


def empty(bound: Stabilizer) -> None:
    """A batch without active tokens has loss 0, gradient 0, count 0 and no NaN, even over NaN."""
    for shape in ((0,), (2, 0), (6,), (2, 6)):
        b = nothing(*shape)
        logp = b.logp.clone().requires_grad_()
        out = bound(replace(b, logp=logp))
        for how in AGGREGATIONS:
            total, count = aggregate(how, out.S, b)
            loss = mean(total, count)
            (grad,) = torch.autograd.grad(loss.sum(), logp, retain_graph=True)
            _need(loss.shape == shape[:-1], "the loss of an empty batch is not one number a lane")
            _need(loss == 0, f"the {how} loss of an empty batch is not 0")
            _need(count == 0, f"the {how} count of an empty batch is not 0")
            _need(grad == 0, f"the {how} gradient of an empty batch is not 0")
        _need(~out.active, "a token of an empty batch is active")
        for name, value in reduce_diagnostics(b, out.diagnostics).items():
            _need(~value.isnan(), f"{name} of an empty batch is NaN")


def overflow(bound: Stabilizer) -> None:
    """Log-ratios of 50 and 700 give finite S and gradient, and active is still exact."""
    for anchor in (0.0, 1.0, 0.5):
        for dtype in (torch.float32, torch.float64):
            out, grad = graded(bound, extreme(anchor, dtype))
            _need(torch.isfinite(out.S) & torch.isfinite(out.S.sum()), "S overflows")
            _need(torch.isfinite(grad), "the gradient overflows")
        _need(out.active == (grad != 0), "active is wrong at a large log-ratio")


def precision(bound: Stabilizer) -> None:
    """bf16 is widened before anything is computed, float64 stays, float32 agrees to rounding."""
    low = ragged(5, dtype=torch.bfloat16, by_token=True)
    got, want = bound(low), bound(cast(low, torch.float32))
    _need(got.S.dtype == torch.float32, f"S of bf16 input is {got.S.dtype}")
    _need(got.S == want.S, "bf16 input is not widened to float32 first")
    _need(got.active == want.active, "active of bf16 input is not that of float32")
    wide = ragged(6, by_token=True)
    (want, want_grad), (got, got_grad) = graded(bound, wide), graded(bound, cast(wide, torch.float))
    _need(want.S.dtype == torch.float64, f"S of float64 input is {want.S.dtype}")
    _close(got.S.double(), want.S, "float32 and float64 disagree on S", 2e-5 * 100)
    _close(got_grad.double(), want_grad, "float32 and float64 disagree on the gradient", 2e-3)


def active(bound: Stabilizer) -> None:
    """active names exactly the tokens whose log-prob receives a gradient from the sum of S."""
    for seed in range(6):
        out, grad = graded(bound, ragged(seed, by_token=seed % 2 == 1))
        _need(out.active == (grad != 0), "active is not the support of the gradient")


def constants(bound: Stabilizer) -> None:
    """Every field but logp is a constant of the objective: no gradient reaches it."""
    b = ragged(7)
    stats = bound.stats([b])
    leaves = {
        name: x.clone().requires_grad_() for name, x in b.held().items() if x.is_floating_point()
    }
    out = bound.surrogate(replace(b, **leaves), **stats)
    grads = torch.autograd.grad(out.S.sum(), list(leaves.values()), allow_unused=True)
    for name, grad in zip(leaves, grads, strict=True):
        reached = grad is not None and bool((grad != 0).any())
        if name == "logp":
            _need(reached, "no gradient reaches logp")
        elif name != "advantage":
            _need(not reached, f"a gradient reaches {name}")


def fields_named(bound: Stabilizer) -> None:
    """Without an optional field a method works, or names itself and the field in one line."""
    b = ragged(8)
    for name in OPTIONAL:
        try:
            bound(replace(b, **{name: None}))
        except ValueError as error:
            said = str(error)
            good = bound.name in said and name in said and "\n" not in said
            _need(good, f"without {name} it says {said!r}")


PROMISES: dict[str, Callable[[Stabilizer], None]] = {
    f.__name__: f
    for f in (
        shapes, precision, active, lanes, diagnostics, masked, order, micro_batches, empty, overflow,
        constants, fields_named,
    )
}  # fmt: skip


def check(bound: Stabilizer) -> None:
    """Raises BrokenPromise in one sentence, naming the promise, at the first that does not hold."""
    for name, promise in PROMISES.items():
        summary = promise.__doc__.splitlines()[0].split(". ")[0].rstrip(".")
        try:
            promise(bound)
        except BrokenPromise as error:
            raise BrokenPromise(
                f"{bound.name} breaks the promise {name} ({summary}): {error}"
            ) from error
        except Exception as error:
            text = " ".join(str(error).split())
            raise BrokenPromise(
                f"{bound.name} breaks the promise {name} ({summary}): {type(error).__name__}: {text}"
            ) from error
