"""What every stabilizer promises, each promise a function that raises BrokenPromise.

The test-suite runs them over the registry, `--method-file` over a user's file before it may join a
comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from simlab.contract import calls, cuts, gradients
from simlab.contract.batches import INTEGER, aggregate, cast, certain, extreme, graded_head, ragged
from simlab.contract.require import BrokenPromise, close, need
from simlab.core.aggregate import AGGREGATIONS, mean, reduce_diagnostics
from simlab.core.columns import LOGGED
from simlab.core.tokens import TOP, nothing
from simlab.stabilizers import Stabilizer


def shapes(bound: Stabilizer) -> None:
    """S and active are [..., N] and off under the mask; active is bool; S is not all 0."""
    b = ragged(lanes=(2, 3), by_token=True)
    out = bound(b)
    need(
        out.S.shape == b.mask.shape, f"S has shape {tuple(out.S.shape)}, not {tuple(b.mask.shape)}"
    )
    need(
        out.active.shape == b.mask.shape and out.active.dtype == torch.bool,
        "active is not bool [..., N]",
    )
    need(~out.active[~b.mask], "a masked token is active")
    need(out.S[~b.mask] == 0, "S is not 0 on a masked token")
    need((out.S[b.mask] != 0).any(), "S is 0 everywhere")


def diagnostics(bound: Stabilizer) -> None:
    """Every diagnostic reduces by mean, min or max to one number a lane, under a name of its own."""
    b = ragged(2, lanes=(2,))
    found = bound(b).diagnostics
    for name, value in reduce_diagnostics(b, found).items():
        need(name not in LOGGED, f"{name} is a column that every run has; call it otherwise")
        need(found[name].reduce in ("mean", "min", "max"), f"{name} has an unknown reducer")
        need(value.shape == (2,), f"{name} does not reduce to one number a lane")
        need(~value.isnan(), f"{name} is NaN")


def masked(bound: Stabilizer) -> None:
    """What stands under the mask is never read: NaN, infinities and wild indices change no bit."""
    clean = ragged(3, by_token=True)
    want, want_grad = graded_head(bound, clean)
    reduced = reduce_diagnostics(clean, want.diagnostics)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        dirty = {}
        for name, x in clean.held().items():
            mask = clean.mask.unsqueeze(-1) if name in TOP else clean.mask
            if name != "mask":
                dirty[name] = torch.where(mask, x, -1 if name in INTEGER else garbage)
        b = replace(clean, **dirty)
        got, got_grad = graded_head(bound, b)
        what = f"{garbage} under the mask changes"
        need(got.S == want.S, f"{what} S")
        need(got_grad == want_grad, f"{what} the gradient")
        need(got.active == want.active, f"{what} active")
        for name, value in reduce_diagnostics(b, got.diagnostics).items():
            need(value == reduced[name], f"{what} {name}")
        for aggregation in AGGREGATIONS:
            parts = (aggregate(aggregation, x.S, y)[0] for x, y in ((got, b), (want, clean)))
            need(torch.equal(*parts), f"{what} the loss")


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
            need(loss.shape == shape[:-1], "the loss of an empty batch is not one number a lane")
            need(loss == 0, f"the {how} loss of an empty batch is not 0")
            need(count == 0, f"the {how} count of an empty batch is not 0")
            need(grad == 0, f"the {how} gradient of an empty batch is not 0")
        need(~out.active, "a token of an empty batch is active")
        for name, value in reduce_diagnostics(b, out.diagnostics).items():
            need(~value.isnan(), f"{name} of an empty batch is NaN")


def overflow(bound: Stabilizer) -> None:
    """Log-ratios of 50 and 700 give finite S and gradient, and active is still exact."""
    for anchor in (0.0, 1.0, 0.5):
        for dtype in (torch.float32, torch.float64):
            out, grad = graded_head(bound, extreme(anchor, dtype))
            need(torch.isfinite(out.S) & torch.isfinite(out.S.sum()), "S overflows")
            need(torch.isfinite(grad), "the gradient overflows")
        need(out.active == (grad != 0).any(-1), "active is wrong at a large log-ratio")


def precision(bound: Stabilizer) -> None:
    """bf16 is widened before anything is computed, float64 stays, float32 agrees to rounding."""
    low = ragged(5, dtype=torch.bfloat16, by_token=True)
    got, want = bound(low), bound(cast(low, torch.float32))
    need(got.S.dtype == torch.float32, f"S of bf16 input is {got.S.dtype}")
    need(got.S == want.S, "bf16 input is not widened to float32 first")
    need(got.active == want.active, "active of bf16 input is not that of float32")
    wide = ragged(6, by_token=True)
    (want, want_grad), (got, got_grad) = (
        graded_head(bound, wide),
        graded_head(bound, cast(wide, torch.float)),
    )
    need(want.S.dtype == torch.float64, f"S of float64 input is {want.S.dtype}")
    close(got.S.double(), want.S, "float32 and float64 disagree on S", 2e-5 * 100)
    close(got_grad.double(), want_grad, "float32 and float64 disagree on the gradient", 2e-3)


def mixtures(bound: Stabilizer) -> None:
    """Fields of different dtypes, integer rewards among them, give the S and gradient of float64."""
    low, half, single, double = torch.bfloat16, torch.float16, torch.float32, torch.float64
    for seed, (pi, mu, reward) in enumerate((
        (single, single, double), (single, single, torch.int64), (low, single, double), (half, half, low),
        (double, single, single), (single, low, half), (double, double, torch.int64), (low, low, torch.int64),
    )):  # fmt: skip
        b = ragged(20 + seed, by_token=True)
        A = (3 * b.advantage).round() if reward == torch.int64 else b.advantage
        mixed = replace(cast(b, mu), logp=b.logp.to(pi), advantage=A.to(reward))
        wide = replace(cast(mixed, double), advantage=mixed.advantage.double())
        (got, got_grad), (want, want_grad) = graded_head(bound, mixed), graded_head(bound, wide)
        what = f"of log-probs in {pi} and {mu} beside advantages in {reward}"
        cure = "widen all three to one dtype first (log_ratio, on_mask)"
        _need_float(got.S, f"S {what} is {got.S.dtype}: {cure}")
        close(got.S.double(), want.S, f"S {what} is not that of float64: {cure}", 2e-3)
        close(
            got_grad.double(),
            want_grad,
            f"the gradient {what} is not that of float64: {cure}",
            5e-2,
        )
        need(got.active == want.active, f"active {what} is not that of float64: {cure}")


def _need_float(x: Tensor, detail: str) -> None:
    need(x.dtype in (torch.float32, torch.float64), detail)


def certain_tokens(bound: Stabilizer) -> None:
    """Log-probs of exactly 0 (and of -90) give finite S, gradient and diagnostics, and active is exact."""
    for dtype in (torch.float32, torch.float64):
        b = certain(dtype)
        for response in (b.response, b.response % 2):
            b = replace(b, response=response)
            out, grad = graded_head(bound, b)
            cure = "at a log-prob of exactly 0: guard the division or the logarithm"
            need(torch.isfinite(out.S), f"S is not finite {cure}")
            need(torch.isfinite(grad), f"the gradient is not finite {cure}")
            need(
                out.active == (grad != 0).any(-1),
                f"active is not the support of the gradient {cure}",
            )
            for name, value in reduce_diagnostics(b, out.diagnostics).items():
                need(~value.isnan(), f"{name} is NaN {cure}")


LONGEST = 200  # characters of a message that is not ours

PROMISES: dict[str, Callable[[Stabilizer], None]] = {
    f.__name__: f
    for f in (
        shapes, calls.again, calls.untouched, calls.device, precision, gradients.without_graph,
        gradients.active, cuts.lanes, diagnostics, masked, cuts.order, cuts.numbering,
        cuts.micro_batches, cuts.ranks, empty, overflow, certain_tokens, gradients.constants,
        gradients.derivative, gradients.weight, calls.fields_named, mixtures,
    )
}  # fmt: skip


# not part of `check`: it takes half a second, and `fuse` itself refuses a second graph
APART: dict[str, Callable[[Stabilizer], None]] = {"one_graph": calls.one_graph}


def check(bound: Stabilizer, promises: dict[str, Callable[[Stabilizer], None]] = PROMISES) -> None:
    """Raises BrokenPromise in one sentence, naming the promise, at the first that does not hold."""
    for name, promise in promises.items():
        summary = (promise.__doc__ or name).splitlines()[0].split(". ")[0].rstrip(".")
        who = f"{bound.name} breaks the promise {name} ({summary})"
        try:
            promise(bound)
        except BrokenPromise as error:
            raise BrokenPromise(f"{who}: {error}") from error
        except Exception as error:
            text = " ".join(str(error).split())[:LONGEST]
            raise BrokenPromise(f"{who}: {type(error).__name__}: {text}") from error
