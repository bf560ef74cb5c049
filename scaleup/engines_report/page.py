"""The page about the real engines, in Markdown, and its figure; made of the rows alone."""

from __future__ import annotations

import os
from functools import partial

import torch

from scaleup.engines_report import measure
from scaleup.engines_report.rows import (
    CONTROL,
    FLOAT_SEEDS,
    GIVEN,
    GRID,
    LEVELS,
    MOVED,
    ROUTERS,
    SEEDS,
    Row,
)

NAMES = {"qwen3_moe": "Qwen3-MoE", "qwen3": "Qwen3, dense", "llama": "Llama"}
LARGE = "Qwen3-30B-A3B"


class Numbers:
    """The rows, by part, case and name."""

    def __init__(self, rows: list[Row]):
        self.rows = rows

    def all(self, part: str, case: str, name: str) -> list[float]:
        """A value for each seed."""
        return [r.value for r in self.rows if (r.part, r.case, r.name) == (part, case, name)]

    def one(self, part: str, case: str, name: str) -> float:
        """The value of the first seed."""
        return self.all(part, case, name)[0]

    def gap(self, case: str, name: str, scale: float = 1.0) -> str:
        """Mean over seeds and its interval, of a number of `agreement`."""
        return spread([scale * x for x in self.all("agreement", case, name)])


def spread(values: list[float]) -> str:
    """Mean and 95 % Student-t interval."""
    from simlab.study.intervals import mean_interval

    return "{:.3g} ({:.3g} to {:.3g})".format(*mean_interval(values))


def table(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *body))


def on_agreement(n: Numbers) -> list[str]:
    """Float32, bf16, replay."""
    free, replayed = "qwen3_moe bfloat16 none", "qwen3_moe bfloat16 r3"
    tokens = f"{n.one('agreement', free, 'tokens'):,.0f} sampled tokens a seed"
    exact = [
        [NAMES[kind], *(f"{max(n.all('agreement', f'{kind} float32 {m}', 'max') or [0]):.1e}"
                        for m in (("none", "r3") if kind == "qwen3_moe" else ("none",)))]
        for kind in SEEDS
    ]  # fmt: skip
    lines = [("mean", "mean", 1), *((f"quantile {x}", f"q{x}", 1) for x in LEVELS)]
    lines += [("largest", "max", 1), ("% of tokens whose experts differ", "other experts", 100)]
    fed = max(n.all("agreement", replayed, "other experts, prompts too"))
    dense = ", ".join(
        f"{NAMES[kind]}: {n.gap(f'{kind} bfloat16 none', 'mean')} and "
        f"{n.gap(f'{kind} bfloat16 none', 'max')}"
        for kind in ("qwen3", "llama")
    )
    return [
        "## Agreement in float32",
        table(["model", "largest gap, nats", "under R3"], [[*x, "-"][:3] for x in exact]),
        f"Largest |d| over {FLOAT_SEEDS} seeds of weights, {tokens}.",
        "## The gap in bf16, and routing replay",
        table(
            ["gap of Qwen3-MoE, nats", "free routing", "R3"],
            [[word, *(n.gap(case, *of) for case in (free, replayed))] for word, *of in lines],
        ),
        f"Mean over {SEEDS['qwen3_moe']} seeds of weights with its 95 % Student-t interval; {tokens}, the "
        "weights pushed one after the other into one running engine. R3 replays SGLang's experts in the "
        f"trainer: of the tokens it was fed, prompts too, {100 * fed:.0f} % were routed otherwise than "
        f"recorded. For contrast, mean and largest |d| of dense models over {SEEDS['llama']} seeds: {dense}.",
        "![Share of tokens with a larger gap](figures/gap_tail.png)",
        "Share of tokens with a larger |d|. Lines: means over seeds; bands: the smallest and the largest seed.",
    ]


def on_layouts(n: Numbers) -> list[str]:
    """The same step in every layout."""
    body, local = [], []
    for case in ("1", *measure.LAYOUTS):
        step = [f"{n.one('layouts', case, name):.7f}" for name in ("loss", "norm", "q")]
        body.append([case, *step, f"{n.one('layouts', case, 'difference'):.1e}"])
    for case in ("1", "DP2"):
        step = [f"{n.one('local quantile', case, name):.7f}" for name in ("loss", "norm")]
        q = [r.value for r in n.rows if r[:2] == ("local quantile", case) and r.name[:2] == "q "]
        local.append([case, *step, ", ".join(f"{x:.4f}" for x in q)])
    return [
        "## Layouts",
        table(["layout", "loss", "gradient norm", "q", "largest difference to 1"], body),
        "The first of three Adam steps of SAT. The difference is the largest over all three steps and over "
        "every number that a step reports (loss, norm, q, active tokens, diagnostics), relative above 1.",
        table(["local quantile, layout", "loss", "gradient norm", "q of the micro-batches"], local),
        'With `quantile = "local"` each micro-batch takes its own q. The loss of the same step is another '
        "one, and another one again on two ranks.",
    ]


def on_simulator(n: Numbers) -> list[str]:
    """Method by method."""
    gaps = {
        word: sorted((-r.value, r.name.split()[0]) for r in n.rows
                     if r.part == "simulator" and r.name.endswith(word))
        for word in ("loss gap", "norm gap", "same tokens")
    }  # fmt: skip
    loss, same = gaps["loss gap"], gaps["same tokens"]
    other = next(x for x in loss if x[1] != loss[0][1])
    return [
        "## The simulator's loss call and Megatron's closure",
        f"{len({name for _, name in loss})} methods, each with token_mean and with seq_mean_token_mean and a "
        f"KL term. Largest difference of the loss: {-loss[0][0]:.1e} ({loss[0][1]}), {-other[0]:.1e} among the "
        f"others. Largest relative difference of the gradient norm: {-gaps['norm gap'][0][0]:.1e}. The same "
        f"active tokens in {-sum(x for x, _ in same):.0f} of {len(same)} cases.",
    ]


def on_trainers(n: Numbers) -> list[str]:
    """Routing replay, checkpoints, the plan."""
    wide = partial(n.one, "replay")
    body = [
        [f"{mode.upper()}, layout {case}",
         "{:.0f} of {:.0f}".format(*(wide(f"{mode} {case}", x) for x in (GIVEN, ROUTERS))),
         f"{100 * wide(f'{mode} {case}', MOVED):.0f} %"]
        for mode in ("r2", "r3") for case in ("1", "TP2 SP EP2")
    ]  # fmt: skip
    right, wrong = "PP2, recompute", "PP2, recompute, action left at forward"
    loss = abs(wide(right, "loss") - wide(wrong, "loss"))
    saves = [r for r in n.rows if r.part == "checkpoint" and r.case != CONTROL]
    large = [f"{n.one('plan', LARGE, x):,.0f} {x}" for x in ("parameters", "tensors")]
    return [
        "## Routing replay",
        table(["replay on perturbed weights", GIVEN, MOVED], body),
        f"Negative control, PP2 with recomputation and the routers not switched to replay in the recomputation: the loss shows nothing "
        f"(difference {loss:.1e}), the gradient norm is {wide(wrong, 'norm'):.4f} instead of "
        f"{wide(right, 'norm'):.4f}, and there is no error. The slope of the loss along the routers' gradient "
        f"under R3 is {wide('router', 'gradient'):.5f} by the gradient and "
        f"{wide('router', 'finite difference'):.5f} by finite differences.",
        "## Checkpoints",
        table(["saved in, resumed in", "largest difference"],
              [[r.case, f"{r.value:.1e}"] for r in saves]),
        "Two steps after the resume against those of the run that went on, over every number of a step. "
        "Negative control, one step counter of Adam for all parameters, as Megatron's loader leaves it: "
        f"{n.one('checkpoint', CONTROL, 'difference'):.1e}.",
        f"## {LARGE}",
        f"{' in '.join(large)}; names and shapes in transformers are those of `scaleup.models.weights`. "
        "`python -m scaleup.engines_report.dry_run` walks the layouts. No weights of this size were loaded.",
    ]  # fmt: skip


def page(rows: list[Row], provenance: dict[str, str]) -> str:
    """README.md."""
    n, moe = Numbers(rows), "qwen3_moe bfloat16 "
    largest = max(r.value for r in rows if r.name == "max" and "float32" in r.case)
    means = (n.all("agreement", moe + mode, "mean") for mode in ("none", "r3"))
    share = spread([b / a for a, b in zip(*means, strict=True)])
    blocks = [
        "# The real engines under the simulator's losses, on a CPU",
        "```sh\npython -W ignore -m scaleup.engines_report\n```",
        "Written by this command in the environment of `make scaleup`, on a machine with "
        f"{os.cpu_count()} CPU cores and no GPU: " + ", ".join(map(" ".join, provenance.items())) + ". "
        "[numbers.csv](numbers.csv) has every number of this page. The models are tiny (two layers of width "
        "64, a vocabulary of 512, eight experts of which two are used) and random: that two programs agree "
        "carries over to a large model, the size of a gap does not. d = log pi - log mu in nats, pi by "
        "Megatron, mu by SGLang, of the same weights.",
        "What a reader may take away:",
        "- **In float32 the two engines are the same policy.** SGLang's log-probs of its own samples differ "
        f"from Megatron's by at most {largest:.1e} nats.\n"
        "- **In bf16 the tail of the gap is routing.** With SGLang's experts replayed in the trainer (R3), mean "
        f"|d| is {share} of what it is with free routing, and the largest |d| falls from "
        f"{n.gap(moe + 'none', 'max')} to {n.gap(moe + 'r3', 'max')}. What is left is of the size of a dense model's.\n"
        "- **The loss does not depend on the layout** where SAT's quantile is that of the whole batch. With a "
        "quantile of each micro-batch it does.\n"
        "- **The loss that trains is the loss that is simulated**, for every method of the registry.",
        *on_agreement(n), *on_layouts(n), *on_simulator(n), *on_trainers(n),
        "## What a cluster user must still check",
        "Nothing here ran on a GPU. Not run: GPU kernels of either engine, the numerics of flash attention, "
        "Megatron's layer of Transformer Engine (its names are mapped, its numbers are unknown), NCCL, pushes "
        "with `exact=False` into layouts whose weights a kernel shuffles, FP8, trainers of more than two "
        "ranks, and the weights of a real 30B model. On a new machine run `make scaleup` first, then measure "
        "|d| at lag 0 with and without R3.",
    ]  # fmt: skip
    return "\n\n".join(blocks) + "\n"


def figure(rows: list[Row]):
    """Survival functions of |d| in bf16."""
    import seaborn as sns
    from matplotlib.figure import Figure

    fig = Figure(figsize=(5.6, 3.6))
    ax = fig.subplots()
    lines = {"qwen3_moe none": "Qwen3-MoE, free routing", "qwen3_moe r3": "Qwen3-MoE, R3",
             "qwen3 none": "Qwen3, dense", "llama none": "Llama"}  # fmt: skip
    for (key, label), colour in zip(lines.items(), sns.color_palette("colorblind"), strict=False):
        case = key.replace(" ", " bfloat16 ")
        shares = torch.tensor(
            [[r.value for r in rows if r.case == case and r.name == f"above {x:.2e}"] for x in GRID]
        )
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
