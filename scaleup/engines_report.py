"""The page about the real engines: what was measured, where, and what nobody has run yet.

    python -W ignore -m scaleup.engines_report    # writes reports/scaleup_engines

Six minutes on two idle cores. Engines and trainers hold tiny random models; the measurements are
those of `scaleup.measure`, which tests/scaleup assert. README.md, numbers.csv and the figure are made
of the same rows, one number each.
"""

from __future__ import annotations

import csv
import os
import platform
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from scaleup import measure, tiny, weights
from scaleup.launch import Ranks
from scaleup.rollout import serve

OUT = Path("reports/scaleup_engines")
SEEDS = {"qwen3_moe": 8, "qwen3": 5, "llama": 5}  # of weights, in bf16; two of them in float32
NAMES = {"qwen3_moe": "Qwen3-MoE", "qwen3": "Qwen3, dense", "llama": "Llama"}
LEVELS = (0.5, 0.9, 0.99, 0.999)
GRID = [10 ** (i / 10) for i in range(-50, 6)]  # nats, of the survival function


class Row(NamedTuple):
    """One number."""

    part: str
    case: str
    seed: int  # of the weights
    name: str
    value: float


# ---------------------------------------------------------------- what is measured
def agreement(rank: Ranks, root: Path) -> Iterator[Row]:
    """|d| between SGLang's and Megatron's log-probs of what SGLang sampled; one engine serves all seeds."""
    from simlab.quantile import abs_quantile

    prompts = torch.randint(512, (16, 8), generator=torch.Generator().manual_seed(1)).tolist()
    for kind, seeds in SEEDS.items():
        folders = [tiny.write(root / f"{kind}{i}", kind, seed=i) for i in range(seeds + 1)]
        for dtype in ("float32", "bfloat16"):
            with closing(serve(folders[0], dtype=dtype, random_seed=0)) as engine:
                for seed in range(1, 1 + (2 if dtype == "float32" else seeds)):
                    engine.push(weights.read(folders[seed]), seed)
                    samples = engine.generate(prompts, n=4, max_new_tokens=64)
                    theirs = torch.cat([s.logp_mu for s in samples])
                    for mode in ("none", "r3") if kind == "qwen3_moe" else ("none",):
                        how = getattr(torch, dtype), mode
                        ours, other, fed = rank(measure.score, folders[seed], samples, *how)[0]
                        d, everything = (ours - theirs).abs(), torch.ones(len(ours), dtype=bool)
                        row = partial(Row, "agreement", f"{kind} {dtype} {mode}", seed)
                        yield row("tokens", len(d))
                        yield row("mean", float(d.mean()))
                        for level in LEVELS:
                            yield row(f"q{level}", float(abs_quantile([(d, everything)], level)))
                        yield row("max", float(d.max()))
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
        found = alone if layout is None else two(measure.run, folder, layout)[0]
        for name in ("loss", "norm", "q"):
            yield Row("layouts", case, 1, name, found[0][name])
        yield Row("layouts", case, 1, "difference", measure.gap(alone, found))
    for case, ranks in (("1", one), ("DP2", two)):
        found = ranks(measure.local, folder, {})
        for name, value in found[0][0].items():
            yield Row("local quantile", case, 1, name, value)
        for i, q in enumerate(q for _, qs in found for q in qs):
            yield Row("local quantile", case, 1, f"q of micro-batch {i}", q)


def simulator(one: Ranks, two: Ranks, folder: Path) -> Iterator[Row]:
    """The simulator's loss call against Megatron's closure, method by method."""
    from simlab.stabilizers import NAMES as METHODS

    for case, kl in (("token_mean", 0.0), ("seq_mean_token_mean", 0.01)):
        for method, found in one(measure.simulated, folder, METHODS, case, kl)[0].items():
            for name, value in zip(
                ("loss gap", "norm gap", "same tokens", "loss"), found, strict=True
            ):
                yield Row("simulator", case, 1, f"{method} {name}", float(value))


def replays(one: Ranks, two: Ranks, folder: Path) -> Iterator[Row]:
    """Sets given against sets used, the wrong action in a pipeline, and the router's gradient."""
    for case, ranks, layout in (("1", one, {}), ("TP2 SP EP2", two, {"tp": 2, "ep": 2})):
        for mode in ("r2", "r3"):
            found = ranks(measure.routed, folder, layout, mode)
            same, moved = (list(chain.from_iterable(x)) for x in zip(*found, strict=True))
            row = partial(Row, "replay", f"{mode} {case}", 1)
            yield row("routers and micro-batches", len(same))
            yield row("of them as given", sum(same))
            yield row("least share that free routing moves", min(moved))
    how = {"rows": measure.routed_responses, "replay": "r3"}
    right, wrong = (
        two(_run, folder, {"pp": 2}, how | {"build": measure.RECOMPUTE, "broken": broken})[0][0]
        for broken in (False, True)
    )
    for name in ("loss", "norm"):
        yield Row("replay", "PP2, recompute", 1, name, right[name])
        yield Row("replay", "PP2, recompute, action left at forward", 1, name, wrong[name])
    gradient, difference, _ = one(measure.slope, folder)[0]
    yield Row("replay", "router", 1, "gradient", gradient)
    yield Row("replay", "router", 1, "finite difference", difference)


def _run(folder, layout, settings):
    return measure.run(folder, layout, 1, **settings)


def checkpoints(one: Ranks, two: Ranks, folder: Path) -> Iterator[Row]:
    """Steps after a resume against those of the run that went on, in the same layout and in others."""
    saved = {}
    for name, layout in measure.FROM.items():
        saved[name] = two(measure.save_and_go_on, folder, folder.parent / name, layout)[0]
    for name, n, layout in measure.RESUMED:
        found = (one if n == 1 else two)(measure.resume, folder, folder.parent / name, layout)
        same = [k for k, x in measure.LAYOUTS.items() if x == layout]
        case = f"{name} to {same[0] if n == 2 else 1}"
        yield Row("checkpoint", case, 1, "difference", measure.gap(saved[name], found[0][0]))
    found = one(measure.resume, folder, folder.parent / "DP2", {}, True)[0][0]
    yield Row("checkpoint", "one step counter", 1, "difference", measure.gap(saved["DP2"], found))


def planned() -> Iterator[Row]:
    """The large model, by names and shapes."""
    from scaleup import plan

    found = plan.dry_run(layouts=())
    yield Row("plan", "Qwen3-30B-A3B", 0, "parameters", found.parameters)
    yield Row("plan", "Qwen3-30B-A3B", 0, "tensors", found.tensors)


# ---------------------------------------------------------------- the page
def page(rows: list[Row], provenance: dict[str, str]) -> str:
    """README.md."""
    from simlab.intervals import mean_interval

    def of(part: str, case: str, name: str) -> list[float]:
        return [r.value for r in rows if (r.part, r.case, r.name) == (part, case, name)]

    def one(part: str, case: str, name: str) -> float:
        return of(part, case, name)[0]

    def table(header: list[str], *body: list[str]) -> str:
        rule = ["---"] + ["---:"] * (len(header) - 1)
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *body))

    def spread(values: list[float], scale: float = 1.0) -> str:
        return "{:.3g} ({:.3g} to {:.3g})".format(*(scale * x for x in mean_interval(values)))

    moe, seeds = "qwen3_moe bfloat16 ", SEEDS["qwen3_moe"]
    modes = ("none", "r3")
    exact = {(k, m): max(of("agreement", f"{k} float32 {m}", "max")) for k in SEEDS for m in modes
             if of("agreement", f"{k} float32 {m}", "max")}  # fmt: skip
    gap_rows = [
        [word, *(spread(of("agreement", moe + m, name), scale) for m in modes)]
        for word, name, scale in (
            ("mean", "mean", 1), *((f"quantile {x}", f"q{x}", 1) for x in LEVELS), ("largest", "max", 1),
            ("% of tokens whose experts differ", "other experts", 100),
        )
    ]  # fmt: skip
    pairs = zip(*(of("agreement", moe + m, "mean") for m in modes), strict=True)
    share = spread([b / a for a, b in pairs])
    cases = ["1", *measure.LAYOUTS]
    layout_rows = [
        [c, *(f"{one('layouts', c, n):.7f}" for n in ("loss", "norm", "q")),
         "" if c == "1" else f"{one('layouts', c, 'difference'):.1e}"] for c in cases
    ]  # fmt: skip
    local_rows = []
    for c in ("1", "DP2"):
        qs = [r.value for r in rows if r[:2] == ("local quantile", c) and r.name.startswith("q ")]
        numbers = (f"{one('local quantile', c, n):.7f}" for n in ("loss", "norm"))
        local_rows.append([c, *numbers, ", ".join(f"{q:.4f}" for q in qs)])
    sim = [r for r in rows if r.part == "simulator"]
    worst = {}
    for name in ("loss gap", "norm gap"):
        top = sorted((r for r in sim if r.name.endswith(name)), key=lambda r: -r.value)
        worst[name] = top[0], next(r for r in top if not r.name.startswith("vcpo"))
    methods = len({r.name for r in sim if r.name.endswith("loss gap")})
    same = [r.value for r in sim if r.name.endswith("same tokens")]
    replay_rows = [
        [f"{m.upper()}, layout {c}", f"{one('replay', f'{m} {c}', 'of them as given'):.0f} of "
         f"{one('replay', f'{m} {c}', 'routers and micro-batches'):.0f}",
         f"{100 * one('replay', f'{m} {c}', 'least share that free routing moves'):.0f} %"]
        for m in ("r2", "r3") for c in ("1", "TP2 SP EP2")
    ]  # fmt: skip
    right = {n: one("replay", "PP2, recompute", n) for n in ("loss", "norm")}
    wrong = {n: one("replay", "PP2, recompute, action left at forward", n) for n in right}
    saves = [r for r in rows if r.part == "checkpoint" and r.case != "one step counter"]
    tokens = int(of("agreement", moe + "none", "tokens")[0])
    numbers = {n: int(one("plan", "Qwen3-30B-A3B", n)) for n in ("parameters", "tensors")}
    fed = max(of("agreement", moe + "r3", "other experts, prompts too"))
    blocks = [
        "# The real engines under the simulator's losses, on a CPU",
        "```sh\npython -W ignore -m scaleup.engines_report\n```",
        "Written by this command in the environment of `make scaleup`. "
        + ", ".join(f"{k} {v}" for k, v in provenance.items())
        + f". A machine with {os.cpu_count()} CPU cores and no GPU. [numbers.csv](numbers.csv) has every "
        "number of this page. The models are tiny (two layers of width 64, 512 tokens, eight experts of "
        "which two are used) and random: that two programs agree carries over to a large model, the size "
        "of a gap does not. Log-probs are in nats, d = log pi - log mu of the same weights.",
        "What a reader may take away:",
        f"- **In float32 the two engines are the same policy.** SGLang's log-probs of its own samples "
        f"differ from Megatron's by at most {max(exact.values()):.1e} nats.\n"
        f"- **In bf16 the tail of the gap is routing.** With SGLang's experts replayed in the trainer (R3) "
        f"mean |d| is {share} of what it is with free routing, and the largest |d| falls from "
        f"{spread(of('agreement', moe + 'none', 'max'))} to {spread(of('agreement', moe + 'r3', 'max'))}.\n"
        "- **The loss does not depend on the layout**, as long as SAT's quantile is that of the whole batch. "
        "A quantile of each micro-batch does.\n"
        "- **The loss that trains is the loss that is simulated**, for all methods of the registry that a "
        "trainer can feed.",
        "## Agreement in float32",
        table(
            ["model", "largest gap, nats", "with SGLang's experts replayed"],
            *([NAMES[k], f"{exact[k, 'none']:.1e}", f"{exact[k, 'r3']:.1e}" if (k, "r3") in exact else "-"]
              for k in SEEDS),
        ),
        f"Largest |d| over two seeds of weights and {tokens:,} sampled tokens each.",
        "## The gap in bf16, and routing replay",
        table(["|d| of Qwen3-MoE, nats", "free routing", "R3"], *gap_rows),
        f"Mean over {seeds} seeds of weights with its 95 % Student-t interval; {tokens:,} tokens a seed, pushed "
        f"one after the other into one running engine. Under R3 the trainer used the recorded sets at every "
        f"token it was fed ({fed:.0f} differ). Dense models for contrast, mean and largest |d|: "
        + ", ".join(
            f"{NAMES[k]} {spread(of('agreement', f'{k} bfloat16 none', 'mean'))} and "
            f"{spread(of('agreement', f'{k} bfloat16 none', 'max'))}"
            for k in ("qwen3", "llama")
        )
        + f" ({SEEDS['qwen3']} seeds).",
        "![Share of tokens with a larger gap](figures/gap_tail.png)",
        "Share of tokens with a larger |d|; lines are means over seeds, bands the smallest and the largest seed.",
        "## Layouts",
        table(["layout", "loss", "gradient norm", "q", "largest difference to 1"], *layout_rows),
        "First of three Adam steps of SAT. The difference is the largest over all three steps and over every "
        "number that a step reports (loss, norm, q, active tokens, diagnostics), relative above 1.",
        table(["local quantile, layout", "loss", "gradient norm", "q of the micro-batches"], *local_rows),
        'With `quantile = "local"` each micro-batch takes its own q: the same step has another loss, and '
        "another one again on two ranks.",
        "## The simulator's loss call and Megatron's closure",
        f"{methods} methods, twice (token_mean; seq_mean_token_mean with a KL term). Largest difference of the "
        f"loss: {worst['loss gap'][0].value:.1e} ({worst['loss gap'][0].name.split()[0]}), "
        f"{worst['loss gap'][1].value:.1e} without vcpo, which multiplies ratios over the response. Largest "
        f"relative difference of the gradient norm: {worst['norm gap'][0].value:.1e}. Active tokens: the same "
        f"in {sum(same):.0f} of {len(same)} cases.",
        "## Routing replay",
        table(["replay on perturbed weights", "routers and micro-batches as given",
               "free routing would move at least"], *replay_rows),
        f"Negative control, PP2 with recomputation and the action left at forward: the loss is the same "
        f"(difference {abs(right['loss'] - wrong['loss']):.1e}) and the gradient norm is "
        f"{wrong['norm']:.4f} instead of {right['norm']:.4f}, without an error. The slope of the loss along "
        f"the routers' gradient under R3 is {one('replay', 'router', 'gradient'):.5f} by the gradient and "
        f"{one('replay', 'router', 'finite difference'):.5f} by finite differences.",
        "## Checkpoints",
        table(["saved in, resumed in", "largest difference"],
              *([r.case.replace(" to ", ", "), f"{r.value:.1e}"] for r in saves)),
        "Two steps after the resume against the run that went on, over every number of a step. With one step "
        "counter of Adam for all parameters, as Megatron's loader leaves it, the difference is "
        f"{one('checkpoint', 'one step counter', 'difference'):.1e}: the negative control.",
        "## Qwen3-30B-A3B",
        f"{numbers['parameters']:,} parameters in {numbers['tensors']:,} tensors, whose names and shapes in "
        "transformers are those of `scaleup.weights`. `python -m scaleup.plan` walks the layouts. No weights "
        "of this size were loaded.",
        "## What a cluster user must still check",
        "Nothing here ran on a GPU. Not run: GPU kernels of either engine, the numerics of flash attention, "
        "Megatron's layer of Transformer Engine (its names are mapped, its numbers are unknown), NCCL, pushes "
        "with `exact=False` into layouts whose weights a kernel shuffles, FP8, more than two ranks of a "
        "trainer here (four in the tests of the weights), and the weights of a real 30B model. On a new "
        "machine run `make scaleup` first, then measure |d| at lag 0 with and without R3.",
    ]  # fmt: skip
    return "\n\n".join(blocks) + "\n"


def figure(rows: list[Row]):
    """Survival functions of |d| in bf16."""
    import seaborn as sns
    from matplotlib.figure import Figure

    import simlab.figures  # noqa: F401  the house's style

    fig = Figure(figsize=(5.6, 3.6))
    ax = fig.subplots()
    lines = {"qwen3_moe none": "Qwen3-MoE, free routing", "qwen3_moe r3": "Qwen3-MoE, R3",
             "qwen3 none": "Qwen3, dense", "llama none": "Llama"}  # fmt: skip
    for (key, label), colour in zip(lines.items(), sns.color_palette("colorblind"), strict=False):
        case = key.replace(" ", " bfloat16 ")
        at = [
            [r.value for r in rows if r.case == case and r.name == f"above {x:.2e}"] for x in GRID
        ]
        shares = torch.tensor(at)
        floor = 0.3 / next(r.value for r in rows if r.case == case and r.name == "tokens")
        ax.plot(
            GRID, shares.mean(1).where(shares.mean(1) > 0, torch.nan), color=colour, label=label
        )
        low, high = shares.amin(1).clamp(min=floor), shares.amax(1).clamp(min=floor)
        ax.fill_between(GRID, low, high, color=colour, alpha=0.15, lw=0)
    ax.set(xscale="log", yscale="log", xlim=(1e-4, 3), ylim=(1e-4, 1.2))
    ax.set(xlabel="|d| between SGLang and Megatron, bf16 (nats)", ylabel="share of tokens above")
    ax.legend(frameon=False, fontsize=8)
    return fig


def main(out: Path = OUT) -> None:
    """Measure and write the folder."""
    from simlab.page import commit, embed, write

    os.environ["SGLANG_TIMEOUT_KEEP_ALIVE"] = "600"  # a connection idles while trainers score
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(1) as pool:
        training = pool.submit(trainings, Path(root) / "training")
        with Ranks(1, 900) as rank:
            rows = list(agreement(rank, Path(root)))
        rows += training.result()
    rows += planned()
    provenance = {"commit": commit(), "simlab": version("simlab"), "torch": torch.__version__,
                  "sglang": version("sglang"), "megatron-core": version("megatron-core"),
                  "Python": platform.python_version()}  # fmt: skip
    (out / "figures").mkdir(parents=True, exist_ok=True)
    embed(figure(rows), out / "figures", "gap_tail", "", "")

    def table(path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*Row._fields, "version", "commit"])
            for row in rows:
                writer.writerow([*row, provenance["simlab"], provenance["commit"]])

    write(out / "numbers.csv", table)
    write(out / "README.md", lambda part: part.write_text(page(rows, provenance)))


if __name__ == "__main__":
    main()
