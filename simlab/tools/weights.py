"""The weight w(d) of a rule beside PPO's: what multiplies grad log pi of a token at log-ratio d, over |A|.

Measured, as everything of a card: S is differentiated on a grid of d, every token a response of its own, so
that levels of a sequence are levels of a token. Numbers of the whole batch are those of `reference`, whose
|d| has mean 0.04 nats and a heavy tail. Where a method reads pi_old, it is mu; entropies, ages and the rest
are constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from math import ceil
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from simlab.contract.batches import graded, ragged
from simlab.contract.cards import GUESS
from simlab.core.arguments import required
from simlab.core.tokens import TokenBatch
from simlab.stabilizers import NAMES, Stabilizer, bind, parts
from simlab.study.files import write
from simlab.study.page import UNDATED
from simlab.study.style import style

SPAN = 1.0  # nats to either side
POINTS = 401
TOP = 3.0  # of the axis
GOOD, BAD, PPO = "#0072B2", "#D55E00", "0.6"


def batch(d: Tensor, A: float) -> TokenBatch:
    """Tokens at the log-ratios d, a response each, with advantage A and everything else alike."""
    n = len(d)
    b = ragged(sizes=(1,) * n, masked=0.0)
    put = {
        x: torch.full((n,), 0.5, dtype=torch.float64)
        for x in ("entropy_mu", "entropy_prox", "gini_mu", "uniform")
    }
    mu = torch.full((n,), -1.5, dtype=torch.float64)
    put |= {
        "logp_mu": mu,
        "logp_prox": mu,
        "logp_ref": mu,
        "logp": mu + d,
        "tv": (d.exp() - 1).abs() / 8,
    }
    put |= {
        "age": torch.full((n,), 8),
        "stratum": torch.zeros(n).long(),
        "position": torch.zeros(n).long(),
    }
    put |= {
        "group": torch.arange(n) // 2,
        "reward": torch.full((n,), float(A > 0), dtype=torch.float64),
    }
    put |= {"response": torch.arange(n), "advantage": torch.full((n,), A, dtype=torch.float64)}
    rest = torch.log((1 - (mu + d).exp()).clamp(min=1e-9))
    own = torch.log(1 - mu.exp())
    put |= {
        "topk": torch.stack([rest - 0.7, rest - 1.2], -1),
        "topk_mu": torch.stack([own - 0.7, own - 1.2], -1),
    }
    return replace(b, **put)


def reference() -> TokenBatch:
    """A batch of 400 tokens, half of either sign, that numbers of the whole batch are taken from."""
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(2, 400, generator=rng, dtype=torch.float64)
    d = (0.02 * z[0] / z[1].abs().clamp(min=0.1)).clamp(-0.5, 0.5)
    b = batch(d, 1.0)
    return replace(b, advantage=torch.where(torch.arange(400) % 2 == 0, 1.0, -1.0).double())


def weight(stabilizer: Stabilizer, d: Tensor, A: float) -> Tensor:
    """w(d) at each d for advantages of this sign; PPO's inside its radii is r."""
    stats = stabilizer.stats([reference()])
    w = []
    for x in d:  # alone: what a rule does to a token may depend on the others of its batch
        b = batch(x.repeat(2), A)
        w.append(graded(stabilizer, b, **stats)[1][0] / A)
    return torch.stack(w)


def curves(stabilizer: Stabilizer, points: int = POINTS) -> tuple[Tensor, Tensor, Tensor]:
    """(d, w at A > 0, w at A < 0)."""
    d = torch.linspace(-SPAN, SPAN, points, dtype=torch.float64)
    return d, weight(stabilizer, d, 1.0), weight(stabilizer, d, -1.0)


def picture(stabilizer: Stabilizer) -> Figure:
    """One rule: its weight on good and on bad tokens, each beside PPO's."""
    fig = Figure(figsize=(7.5, 2.9))
    axes = fig.subplots(1, 2, sharey=True)
    d, *mine = curves(stabilizer)
    _, *ppo = curves(bind("ppo"))
    sides = ("A > 0", GOOD), ("A < 0", BAD)
    for ax, w, p, (title, colour) in zip(axes, mine, ppo, sides, strict=True):
        ax.plot(d, p, color=PPO, lw=3, label="ppo")
        ax.plot(d, w, color=colour, lw=1.5, label=stabilizer.name)
        ax.set(
            title=title, xlabel="d = log pi - log mu (nats)", ylim=(min(-0.1, float(w.min())), TOP)
        )
        ax.legend(frameon=False, loc="upper left", fontsize=8)
    axes[0].set_ylabel("w(d), times |A| grad log pi")
    return fig


def map_of(names: Sequence[str] = NAMES) -> Figure:
    """All methods: a small panel each, blue where A > 0, orange where A < 0, PPO grey."""
    columns = 7
    rows = ceil(len(names) / columns)
    fig = Figure(figsize=(1.75 * columns, 1.35 * rows))
    axes = fig.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    d, *ppo = curves(bind("ppo"), 81)
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    for ax, name in zip(axes.flat, names, strict=False):
        missing = [x for function in parts(name).values() for x in required(function)]
        _, *mine = curves(bind(name, **dict.fromkeys(missing, GUESS)), 81)
        for w, p, colour, dash in zip(mine, ppo, (GOOD, BAD), ("-", "--"), strict=True):
            ax.plot(d, p, color=PPO, lw=2.2, ls=dash)
            ax.plot(d, w, color=colour, lw=1.2, ls=dash)
        ax.set_title(name, fontsize=7, pad=2)
        ax.set(ylim=(-0.6, TOP), yticks=(0, 1, 2, 3), xticks=(-1, 0, 1))
        ax.tick_params(labelsize=6)
    fig.supxlabel("d = log pi - log mu (nats)", fontsize=8)
    fig.supylabel("w(d), times |A| grad log pi", fontsize=8)
    return fig


def save(path: Path, stabilizer: Stabilizer | None) -> None:
    """The picture of one rule, or of all methods, as PNG, SVG or PDF. Raises ValueError for another suffix."""
    kind = path.suffix[1:]
    if kind not in UNDATED:
        raise ValueError(f"{path}: must end in {', '.join('.' + x for x in UNDATED)}")
    file = BytesIO()
    with style():
        fig = map_of() if stabilizer is None else picture(stabilizer)
        about = (
            {} if kind == "pdf" else {"Description": ", ".join(NAMES)}
        )  # which methods there were
        fig.savefig(file, format=kind, dpi=110, metadata=UNDATED[kind] | about)
    write(path, partial(Path.write_bytes, data=file.getvalue()))
