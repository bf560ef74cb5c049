"""Nanoseconds and memory per token of every stabilizer, eager and fused, of peers' losses, of a trainer's
step from the logits on with and without a head, and of the exact quantile and its rivals. Peers are run where they are installed (`make benchmark`)."""

from __future__ import annotations

import os
import sys

os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler that measures memory is not to chat

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from bench import Report, arguments, interleave, spread
from torch import Tensor

from simlab.contract.cards import GUESS
from simlab.core.aggregate import mean, token_mean
from simlab.core.logits import token_log_probs
from simlab.core.quantile import abs_quantile, rank
from simlab.core.tokens import TokenBatch
from simlab.stabilizers import STABILIZERS, bind, required
from simlab.stabilizers.fused import fuse

ALPHA, LENGTH, HEAD = 0.9, 1000, 32
HAND = "hand-written eager PPO"
FEW = ("ppo", "sat", "gspo", "centering")


def batch(n: int) -> TokenBatch:
    """n active float32 tokens in answers of 1,000, log-ratios of about 0.07 nats with tails."""
    g = torch.Generator().manual_seed(0)
    logp = -torch.rand(n, generator=g) * 3
    tail = torch.randn(n, generator=g) / torch.rand(n, generator=g).clamp(min=0.05).sqrt()
    response = torch.arange(n) // LENGTH
    top = None
    if n <= 1_000_000:  # mu's likeliest tokens and what a tail of 0.05 leaves them
        top = (torch.rand(n, HEAD, generator=g) * 3).log_softmax(-1) - 0.05
    return TokenBatch(
        logp=logp.requires_grad_(),
        logp_mu=logp.detach() - 0.05 * tail,
        advantage=torch.randn(int(response[-1]) + 1, generator=g)[response],
        mask=torch.ones(n, dtype=torch.bool),
        response=response,
        logp_prox=logp.detach() - 0.02 * torch.randn(n, generator=g),
        entropy_mu=torch.rand(n, generator=g),
        tv=0.2 * torch.rand(n, generator=g),
        topk=None if top is None else (top - 0.05).requires_grad_(),
        topk_mu=top,
        n_responses=int(response[-1]) + 1,
    )


def registry(name: str, how: str) -> Callable[[TokenBatch], Tensor]:
    """A stabilizer's loss: whole-batch numbers, surrogate, token mean, and diagnostics if asked."""
    stabilizer = bind(name, **dict.fromkeys(required(STABILIZERS[name].surrogate), GUESS))
    if how != "eager":
        run = fuse(stabilizer, show=how == "fused with diagnostics")
        return lambda b: -mean(*run(b, **stabilizer.stats([b]))[:2])
    return lambda b: -mean(*token_mean(stabilizer(b).S, b))


def eager_ppo(b: TokenBatch) -> Tensor:
    """PPO as most trainers write it: no diagnostics, no guard against masked infinities."""
    r = (b.logp - b.logp_mu).exp()
    S = torch.min(r * b.advantage, r.clamp(0.8, 1.2) * b.advantage)
    return -(S * b.mask).sum() / b.mask.sum()


def peers() -> dict[str, Callable[[TokenBatch], Tensor]]:
    """Losses of verl, polgrad and martingale on the same tokens, as rows of 1,000; none if absent."""
    if not all(find_spec(package) for package in ("verl", "polgrad", "martingale")):
        return {}
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests/conformance"))
    import polgrad
    from peers import martingale_ppo, polgrad_loss, verl

    calls = {
        "verl vanilla": verl("vanilla"),
        "verl gspo": verl("gspo"),
        "verl dppo_tv": verl("dppo_tv"),
        "verl cispo": verl("cispo"),
        "polgrad ppo": polgrad_loss("ppo", polgrad.ALGORITHMS["ppo"].loss),
        "martingale ppo": martingale_ppo(0.2),
    }

    def rows(b: TokenBatch) -> SimpleNamespace:
        fields = {"lp": b.logp, "mu": b.logp_mu, "A": b.advantage, "mask": b.mask}
        return SimpleNamespace(**{k: x.view(-1, LENGTH) for k, x in fields.items()})

    return {name: lambda b, call=call: call(rows(b)) for name, call in calls.items()}


def gradient(loss: Callable[[TokenBatch], Tensor], b: TokenBatch) -> int:
    """Forward and backward; the number of tokens."""
    b.logp.grad = None
    if b.topk is not None:
        b.topk.grad = None
    loss(b).backward()
    return b.mask.numel()


def floor(b: TokenBatch) -> int:
    """Memory traffic alone: read log-probs of both sides and advantages, write a gradient."""
    torch.addcmul(b.advantage, b.logp.detach(), b.logp_mu)
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


def losses(report: Report, n: int, rounds: int, names: tuple[str, ...]) -> None:
    """Stabilizers eager and fused, peers, and the floor, relative to the hand-written PPO."""
    torch.compiler.reset()
    b = batch(n)
    arms = {HAND: eager_ppo} | peers()
    grads = {}
    for name in names:
        for how in ("eager", "fused", "fused with diagnostics"):
            if how == "fused with diagnostics" and name not in FEW:
                continue
            arms[f"{name}, {how}"] = registry(name, how)
            gradient(arms[f"{name}, {how}"], b)
            grads[how] = b.logp.grad.clone()
            error = (grads[how] - grads["eager"]).abs().max() / grads["eager"].abs().max()
            assert error <= 1e-6, (name, how)
    run = {name: lambda f=f: gradient(f, b) for name, f in arms.items()}
    s = interleave({"memory-traffic floor": lambda: floor(b)} | run, rounds)
    memory = {name: f"{peak(f, b):.1f}" for name, f in arms.items()}
    low = s["memory-traffic floor"]
    rows = [
        [x, f"{1e9 * np.median(s[x]):.1f}", spread(s[x] / s[HAND]), f"{np.median(s[x] / low):.1f}",
         memory.get(x, "1.0")]
        for x in sorted(s, key=lambda name: np.median(s[name]))
    ]  # fmt: skip
    columns = [
        "loss",
        "ns a token",
        "times hand-written (range)",
        "times floor",
        "peak, fp32 numbers",
    ]
    report.table(f"Forward and backward of {n:,} tokens, float32", columns, rows)


def steps(report: Report, tokens: int, V: int, rounds: int) -> None:
    """A trainer's step from the logits on: log-probs in blocks, the loss, and the gradient of the logits."""
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(tokens, V, generator=g).mul_(3).requires_grad_()
    token = torch.randint(V, (tokens,), generator=g)
    likeliest = logits.detach().topk(HEAD, -1).indices
    b = replace(batch(tokens), topk=None, topk_mu=None)
    with torch.no_grad():
        scores = token_log_probs(logits, token, head=likeliest)
        b = replace(b, logp_mu=scores.logp - 0.02, topk_mu=scores.head - 0.02)

    def run(name: str, head: Tensor | None, fused: bool) -> Callable[[], int]:
        stabilizer = bind(name)
        terms = fuse(stabilizer, show=False) if fused else None

        def once() -> int:
            found = token_log_probs(logits, token, head=head)
            full = replace(b, logp=found.logp, topk=found.head)
            total = terms(full)[:2] if terms else token_mean(stabilizer(full).S, full)
            torch.autograd.grad(-mean(*total), logits)
            return tokens

        return once

    arms = {
        f"{name}, {'fused' if fused else 'eager'}": run(name, head, fused)
        for name, head in (("ppo", None), ("centering", likeliest))
        for fused in (False, True)
    }
    s = interleave(arms, rounds)
    rows = [
        [name, f"{1e6 * np.median(x):.1f}", spread(x / s["ppo, eager"])] for name, x in s.items()
    ]
    columns = ["loss", "microseconds a token", "times PPO (range)"]
    report.table(
        f"A step of {tokens:,} tokens from {V:,} logits each, a head of {HEAD} for centering",
        columns,
        rows,
    )


def methods(mask: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Three ways to the 0.9 quantile of |x|."""
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
    every = tuple(sorted(STABILIZERS, key=lambda name: name != "ppo"))
    if asked.quick:
        losses(report, 10_000, 3, FEW)
        steps(report, 256, 32_768, 3)
        quantiles(report, 100_000, 17_000_000, 3_000, 1)
    else:
        losses(report, 10_000, 51, FEW)
        losses(report, 1_000_000, 21, every)
        losses(report, 16_000_000, 5, FEW[:3])
        steps(report, 1024, 151_936, 11)
        quantiles(report, 1_000_000, 33_500_000, 100_000, 3)
    report.write(asked.out)
