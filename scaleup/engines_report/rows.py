"""What the page about the real engines is made of: every measurement as rows of one number each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from scaleup.engines_report import measure, resuming, routing
from scaleup.engines_report.launch import Ranks
from scaleup.models import tiny, weights
from scaleup.rollout.server import serve

SEEDS = {"qwen3_moe": 8, "qwen3": 5, "llama": 5}  # of weights, in bf16
FLOAT_SEEDS = 2
GIVEN, ROUTERS, MOVED = (
    "routers and micro-batches as given",
    "routers and micro-batches",
    "tokens that free routing would move, at least",
)
CONTROL = "one step counter"
LEVELS = (0.5, 0.9, 0.99, 0.999)
GRID = [10 ** (i / 10) for i in range(-50, 6)]  # nats, of the survival function


class Row(NamedTuple):
    """One number."""

    part: str
    case: str
    seed: int  # of the weights
    name: str
    value: float


def agreement(rank: Ranks, root: Path) -> Iterator[Row]:
    """|d| between SGLang's and Megatron's log-probs of what SGLang sampled; one engine serves all seeds."""
    from simlab.core.quantile import abs_quantile

    prompts = torch.randint(512, (16, 8), generator=torch.Generator().manual_seed(1)).tolist()
    for kind, seeds in SEEDS.items():
        folders = [tiny.write(root / f"{kind}{i}", kind, seed=i) for i in range(seeds + 1)]
        for dtype in ("float32", "bfloat16"):
            with closing(serve(folders[0], dtype=dtype, random_seed=0)) as engine:
                for seed in range(1, 1 + (FLOAT_SEEDS if dtype == "float32" else seeds)):
                    engine.push(weights.read(folders[seed]), seed)
                    samples = engine.generate(prompts, n=4, max_new_tokens=64)
                    theirs = torch.cat([s.logp_mu for s in samples])
                    for mode in ("none", "r3") if kind == "qwen3_moe" else ("none",):
                        ours, other, fed = rank(
                            routing.score, folders[seed], samples, getattr(torch, dtype), mode
                        )[0]
                        d, everything = (ours - theirs).abs(), torch.ones(len(ours), dtype=bool)
                        row = partial(Row, "agreement", f"{kind} {dtype} {mode}", seed)
                        yield row("tokens", len(d))
                        yield row("mean", float(d.mean()))
                        for level in LEVELS:
                            yield row(f"q{level}", float(abs_quantile([(d, everything)], level)))
                        yield row("max", float(d.max()))
                        if kind == "qwen3_moe":
                            yield row("other experts", float(other.float().mean()))
                            yield row("other experts, prompts too", float(fed.float().mean()))
                        if dtype == "bfloat16":
                            for x in GRID:
                                yield row(f"above {x:.2e}", float((d > x).float().mean()))


def trainings(root: Path) -> list[Row]:
    """Everything that needs trainers alone, on one and two ranks."""
    folder = tiny.write(root / "trained", "qwen3_moe", seed=1)
    parts = layouts, simulator, replays, checkpoints
    with Ranks(1, 900, daemon=False) as one, Ranks(2, 900, daemon=False) as two:
        return list(chain.from_iterable(part(one, two, folder) for part in parts))


def layouts(one: Ranks, two: Ranks, folder: Path) -> Iterator[Row]:
    """Three Adam steps of SAT in every layout, against one rank; and the quantile of micro-batches."""
    alone = one(measure.run, folder, {})[0]
    for case, layout in {"1": None, **measure.LAYOUTS}.items():
        steps = alone if layout is None else two(measure.run, folder, layout)[0]
        for name in ("loss", "norm", "q"):
            yield Row("layouts", case, 1, name, steps[0][name])
        yield Row("layouts", case, 1, "difference", measure.gap(alone, steps))
    for case, ranks in (("1", one), ("DP2", two)):
        by_rank = ranks(measure.local, folder, {})
        for name, value in by_rank[0][0].items():
            yield Row("local quantile", case, 1, name, value)
        for i, q in enumerate(q for _, qs in by_rank for q in qs):
            yield Row("local quantile", case, 1, f"q of micro-batch {i}", q)


def simulator(one: Ranks, two: Ranks, folder: Path) -> Iterator[Row]:
    """The simulator's loss call against Megatron's closure, method by method."""
    from simlab.stabilizers import NAMES as METHODS

    for case, kl in (("token_mean", 0.0), ("seq_mean_token_mean", 0.01)):
        for method, gaps in one(measure.simulated, folder, METHODS, case, kl)[0].items():
            for name, value in zip(
                ("loss gap", "norm gap", "same tokens", "loss"), gaps, strict=True
            ):
                yield Row("simulator", case, 1, f"{method} {name}", float(value))


def replays(one: Ranks, two: Ranks, folder: Path) -> Iterator[Row]:
    """Sets given against sets used, the wrong action in a pipeline, and the router's gradient."""
    for case, ranks, layout in (("1", one, {}), ("TP2 SP EP2", two, {"tp": 2, "ep": 2})):
        for mode in ("r2", "r3"):
            by_rank = ranks(routing.routed, folder, layout, mode)
            same, moved = (list(chain.from_iterable(x)) for x in zip(*by_rank, strict=True))
            row = partial(Row, "replay", f"{mode} {case}", 1)
            yield row(ROUTERS, len(same))
            yield row(GIVEN, sum(same))
            yield row(MOVED, min(moved))
    settings = {"rows": measure.routed_responses, "replay": "r3", "steps": 1}
    settings["build"] = measure.RECOMPUTE
    right, wrong = (
        two(measure.run, folder, {"pp": 2}, broken=broken, **settings)[0][0]
        for broken in (False, True)
    )
    for name in ("loss", "norm"):
        yield Row("replay", "PP2, recompute", 1, name, right[name])
        yield Row("replay", "PP2, recompute, action left at forward", 1, name, wrong[name])
    gradient, difference, _ = one(routing.slope, folder)[0]
    yield Row("replay", "router", 1, "gradient", gradient)
    yield Row("replay", "router", 1, "finite difference", difference)


def checkpoints(one: Ranks, two: Ranks, folder: Path) -> Iterator[Row]:
    """Steps after a resume against those of the run that went on, in the same layout and in others."""
    saved = {}
    for name, layout in resuming.FROM.items():
        saved[name] = two(resuming.save_and_go_on, folder, folder.parent / name, layout)[0]
    for name, n, layout in resuming.RESUMED:
        resumed = (one if n == 1 else two)(resuming.resume, folder, folder.parent / name, layout)
        same = [k for k, x in measure.LAYOUTS.items() if x == layout]
        case = f"{name} to {same[0] if n == 2 else 1}"
        yield Row("checkpoint", case, 1, "difference", measure.gap(saved[name], resumed[0][0]))
    wrong = one(resuming.resume, folder, folder.parent / "DP2", {}, True)[0][0]
    yield Row("checkpoint", CONTROL, 1, "difference", measure.gap(saved["DP2"], wrong))
