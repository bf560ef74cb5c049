"""Nanoseconds and memory per token of every stabilizer, and of the exact quantile and its rivals."""

from __future__ import annotations

import os

os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler that measures memory is not to chat

from collections.abc import Callable

import numpy as np
import torch
from bench import Report, arguments, interleave, spread
from torch import Tensor

from simlab.aggregate import mean, token_mean
from simlab.batch_stats import abs_quantile, rank
from simlab.stabilizers import STABILIZERS, bind
from simlab.tokens import TokenBatch

ALPHA, LENGTH = 0.9, 1000


def batch(n: int) -> TokenBatch:
    """n active float32 tokens in answers of 1,000, log-ratios of about .07 nats with tails."""
    g = torch.Generator().manual_seed(0)
    logp = -torch.rand(n, generator=g) * 3
    tail = torch.randn(n, generator=g) / torch.rand(n, generator=g).clamp(min=0.05).sqrt()
    response = torch.arange(n) // LENGTH
    return TokenBatch(
        logp=logp.requires_grad_(),
        logp_mu=logp.detach() - 0.05 * tail,
        advantage=torch.randn(int(response[-1]) + 1, generator=g)[response],
        mask=torch.ones(n, dtype=torch.bool),
        response=response,
        logp_prox=logp.detach() - 0.02 * torch.randn(n, generator=g),
        entropy_mu=torch.rand(n, generator=g),
        version=torch.zeros(n, dtype=torch.int64),
        n_responses=int(response[-1]) + 1,
    )


def registry(name: str) -> Callable[[TokenBatch], Tensor]:
    """A stabilizer's loss: whole-batch numbers, surrogate, diagnostics, token mean."""
    stabilizer = bind(name)
    return lambda b: -mean(*token_mean(stabilizer(b).S, b))


def eager_ppo(b: TokenBatch) -> Tensor:
    """PPO as most trainers write it: no diagnostics, no guard against masked infinities."""
    r = (b.logp - b.logp_mu).exp()
    S = torch.min(r * b.advantage, r.clamp(0.8, 1.2) * b.advantage)
    return -(S * b.mask).sum() / b.mask.sum()


def gradient(loss: Callable[[TokenBatch], Tensor], b: TokenBatch) -> int:
    """Forward and backward; the number of tokens."""
    b.logp.grad = None
    loss(b).backward()
    return b.mask.numel()


def peak(loss: Callable[[TokenBatch], Tensor], b: TokenBatch) -> float:
    """Largest memory on top of the batch, in float32 numbers a token (the gradient is one of them)."""
    cpu = torch.profiler.ProfilerActivity.CPU
    b.logp.grad = None
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as prof:
        loss(b).backward()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return held.max() / 4 / b.mask.numel()


def losses(report: Report, n: int, rounds: int) -> None:
    """Every stabilizer and the outside reference, relative to the registry's PPO."""
    b = batch(n)
    arms = {"ppo": registry("ppo"), "hand-written eager PPO": eager_ppo}
    arms |= {name: registry(name) for name in STABILIZERS if name != "ppo"}
    grads = {}
    for name in ("ppo", "hand-written eager PPO"):
        gradient(arms[name], b)
        grads[name] = b.logp.grad.clone()
    torch.testing.assert_close(*grads.values(), rtol=1e-4, atol=1e-10)
    s = interleave({name: lambda f=f: gradient(f, b) for name, f in arms.items()}, rounds)
    memory = {name: peak(f, b) for name, f in arms.items()}
    order = sorted(arms, key=lambda name: np.median(s[name]))
    rows = [
        [x, f"{1e9 * np.median(s[x]):.1f}", spread(s[x] / s["ppo"]), f"{memory[x]:.1f}"]
        for x in order
    ]
    columns = ["loss", "ns a token", "times ppo (range)", "peak memory, fp32 numbers a token"]
    report.table(f"Forward and backward of {n:,} tokens, flat, float32", columns, rows)


def methods(mask: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Three ways to the .9 quantile of |x|."""
    return {
        "abs_quantile": lambda x: abs_quantile([(x, mask[: len(x)])], ALPHA),
        "torch.kthvalue": lambda x: x.abs().kthvalue(rank(ALPHA, len(x))).values,
        "torch.quantile": lambda x: x.abs().quantile(ALPHA),
    }


def quantiles(report: Report, small: int, large: int, quadratic: int, rounds: int) -> None:
    """Random and descending input; "exact" = equals the sorted order statistic."""
    x = 0.05 * torch.randn(large, generator=torch.Generator().manual_seed(1))
    ways, rows = methods(torch.ones(large, dtype=torch.bool)), []
    for n, order in ((small, "random"), (small, "descending"), (large, "random")):
        part = x[:n] if order == "random" else x[:n].abs().sort(descending=True).values
        truth = np.sort(part.abs().numpy())[rank(ALPHA, n) - 1]
        inputs, exact, arms = dict.fromkeys(ways, part), {}, {}
        wanted = dict.fromkeys(ways, truth)
        if order == "descending":  # kthvalue is quadratic here
            short = part[:quadratic].contiguous()
            inputs["torch.kthvalue"] = short
            at = rank(ALPHA, len(short)) - 1
            wanted["torch.kthvalue"] = np.sort(short.numpy())[at]
        for name, way in ways.items():
            try:
                exact[name] = "yes" if way(inputs[name]).item() == wanted[name].item() else "no"
            except RuntimeError as error:
                exact[name] = f"RuntimeError: {str(error).splitlines()[0]}"
                continue
            arms[name] = lambda way=way, y=inputs[name]: (way(y), len(y))[1]
        assert exact["abs_quantile"] == "yes"
        s = interleave(arms, rounds)
        for name, y in inputs.items():
            time = [f"{1e9 * np.median(s[name]):.2f}"] if name in s else ["-"]
            times = [spread(s[name] / s["abs_quantile"])] if name in s else ["-"]
            rows.append([name, order, f"{len(y):,}", *time, *times, exact[name]])
    columns = ["method", "input", "numbers", "ns a number", "times abs_quantile (range)", "exact"]
    report.table(f"The {ALPHA} quantile of |x|, float32", columns, rows)


if __name__ == "__main__":
    asked = arguments(__doc__)
    report = Report("Losses and the exact quantile")
    losses(report, *((100_000, 3) if asked.quick else (1_000_000, 25)))
    sizes = (100_000, 17_000_000, 3_000, 1) if asked.quick else (1_000_000, 33_500_000, 100_000, 3)
    quantiles(report, *sizes)
    report.write(asked.out)
