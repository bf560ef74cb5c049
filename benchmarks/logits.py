"""Time, memory and error of token_log_probs against log_softmax and gather of the whole batch."""

from __future__ import annotations

import os

os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler that measures memory is not to chat

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from bench import Report, arguments, interleave, spread
from torch import Tensor

from simlab.core.logits import FIRST, token_log_probs
from simlab.core.tokens import widen

Arms = dict[str, tuple[Callable, Callable]]  # what is computed -> the reference, ours


def draw(rows: int, V: int) -> tuple[Tensor, Tensor]:
    """float32 logits of spread 3 and, for each row, a token drawn from its distribution."""
    torch.manual_seed(0)
    logits = torch.randn(rows, V).mul_(3)
    token = [torch.multinomial(x.softmax(-1), 1).squeeze(-1) for x in logits.split(64)]
    return logits.requires_grad_(), torch.cat(token)


def log_softmax(logits: Tensor, token: Tensor) -> Tensor:
    """The usual log-prob: log_softmax of the batch, then gather."""
    return torch.log_softmax(widen(logits), -1).gather(-1, token.unsqueeze(-1)).squeeze(-1)


def with_entropy(logits: Tensor, token: Tensor) -> Tensor:
    """The usual log-prob plus entropy."""
    log_p = torch.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1) + entropy


def ours(logits: Tensor, token: Tensor) -> Tensor:
    """The log-prob of simlab."""
    return token_log_probs(logits, token).logp


def ours_with_entropy(logits: Tensor, token: Tensor) -> Tensor:
    """The same with entropy."""
    out = token_log_probs(logits, token, entropy=True)
    return out.logp + out.entropy


ENTROPY = with_entropy, ours_with_entropy


def forward(score: Callable, logits: Tensor, token: Tensor) -> Callable[[], int]:
    """An arm without gradient; it returns the number of logits."""

    @torch.no_grad()
    def run() -> int:
        score(logits, token)
        return logits.numel()

    return run


def both(score: Callable, logits: Tensor, token: Tensor) -> Callable[[], int]:
    """An arm with the backward from one gradient for each row."""
    upstream = torch.ones(len(token))

    def run() -> int:
        torch.autograd.grad(score(logits, token), logits, upstream)
        return logits.numel()

    return run


def peak(arm: Callable[[], int]) -> float:
    """Largest memory on top of the logits, in bytes (the gradient is part of it)."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as prof:
        arm()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    return np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max()


def compare(report: Report, title: str, arms: Arms, rounds: int) -> None:
    """One row for each pair: time and memory of both, and their ratios."""
    pair = {f"{what} {i}": arm for what, two in arms.items() for i, arm in enumerate(two)}
    s, rows = interleave(pair, rounds), []
    for what, two in arms.items():
        reference, own = s[f"{what} 0"], s[f"{what} 1"]
        memory = [peak(arm) for arm in two]
        rows.append(
            [
                what,
                *(f"{1e9 * np.median(x):.2f}" for x in (reference, own)),
                spread(own / reference),
                *(f"{x / 1e6:,.1f}" for x in memory),
                f"{memory[1] / memory[0]:.2g}",
            ]
        )
    columns = ["what", "reference, ns a logit", "ours, ns", "ratio (range)"]
    report.table(title, [*columns, "reference, extra MB", "ours, MB", "MB ratio"], rows)


def log_probs(logits: Tensor, token: Tensor) -> Arms:
    """The log-prob alone."""
    return {
        "forward": tuple(forward(f, logits, token) for f in (log_softmax, ours)),
        "forward and backward": tuple(both(f, logits, token) for f in (log_softmax, ours)),
    }


def variants(logits: Tensor, token: Tensor) -> Arms:
    """Everything else that the function does; the last finds no shift at once."""
    half, far = logits.detach().bfloat16().requires_grad_(), logits.detach().clone()
    far[:, FIRST:] += 40
    first = far[:, :FIRST].argmin(-1)
    return {
        "log-prob, bfloat16, forward": tuple(forward(f, half, token) for f in (log_softmax, ours)),
        "log-prob, bfloat16, both": tuple(both(f, half, token) for f in (log_softmax, ours)),
        "and entropy, forward": tuple(forward(f, logits, token) for f in ENTROPY),
        "and entropy, both": tuple(both(f, logits, token) for f in ENTROPY),
        "a second pass on every row, forward": tuple(
            forward(f, far, first) for f in (log_softmax, ours)
        ),
    }


def keep_memory() -> bool:
    """Make malloc keep what is freed (glibc only), so that no arm pays for fresh pages again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    no_mmap, no_trim = (-4, 0), (-1, -1)
    return bool(mallopt and mallopt(*no_mmap) and mallopt(*no_trim))


def errors(report: Report, rows: int, V: int) -> None:
    """float32 against the reference in float64: values, and gradients of the sum over rows."""
    logits, token = draw(rows, V)
    found = {}
    for name, score, x in (
        ("float64", log_softmax, logits.detach().double().requires_grad_()),
        ("log_softmax and gather", log_softmax, logits),
        ("token_log_probs", ours, logits),
    ):
        logp = score(x, token)
        found[name] = (logp.detach(), *torch.autograd.grad(logp.sum(), x))
    truth = found.pop("float64")
    table = [
        [name, *(f"{(x - y).abs().max():.2g}" for x, y in zip(values, truth, strict=True))]
        for name, values in found.items()
    ]
    columns = ["float32", "log-prob, nats", "gradient"]
    report.table(f"Largest error against float64, {rows} x {V:,}", columns, table)


if __name__ == "__main__":
    asked = arguments(__doc__)
    report = Report("Log-probs from logits")
    rows, few, V, rounds = (64, 32, 20_000, 3) if asked.quick else (4096, 512, 151_936, 3)
    errors(report, few // 4, V)
    batch = draw(few, V)
    compare(report, f"{few:,} x {V:,}, malloc as it is", variants(*batch), rounds)
    batch = draw(rows, V)
    compare(report, f"{rows:,} x {V:,} float32, malloc as it is", log_probs(*batch), rounds)
    if keep_memory():
        arms = log_probs(*batch)
        compare(report, f"{rows:,} x {V:,} float32, freed memory kept", arms, rounds)
        report.note(
            "Freed memory kept: malloc neither maps nor returns pages (mallopt M_MMAP_MAX 0, "
            "M_TRIM_THRESHOLD off), and a first round that is not measured touches them all."
        )
    report.write(asked.out)
