"""Figures for a slide, drawn from theory/ alone; each docstring is its reading guide."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from simlab.simulator.summary import VACUOUS
from simlab.study.style import REFERENCE, TINY
from simlab.verify.claims.c10_sat_is_a_radius import equivalent_radius
from theory.claims import c03_average_form, c04_max_form, c05_sharper_forms, c08_sampled_action
from theory.instances import half_example, homogeneous, rare_token_example
from theory.search import attack

HORIZONS, STEPS = range(2, 8), 300


def tightness(steps: int = STEPS) -> Figure:
    """How close the worst instance found comes to each penalty, by horizon T (two tokens; a seeded
    search and the extreme examples of claims 3 and 4). 1 is attained. The max form and the tail bound are
    approached at every horizon, by policies that hardly differ; the average form reaches one half at every
    horizon and never passes it (claim 3). Dotted: an ordinary example, for which the
    max form loosens with T."""
    curves = {
        "max form (33)": (c04_max_form, "Delta <= 2 xi T(T-1) D_max^2"),
        "average form (34)": (c03_average_form, "Delta <= 4 xi S"),
        "tail bound": (c05_sharper_forms, "|Delta| <= tail bound"),
    }
    fig, ax = _axes("horizon T", "largest remainder / penalty found")
    for label, (claim, side) in curves.items():
        best = [attack(at_horizon(claim, T), steps).largest[side] for T in HORIZONS]
        hollow = {"ms": 10, "mfc": "none"} if claim is c04_max_form else {}  # the curves coincide
        ax.plot(list(HORIZONS), best, "o-", label=label, **hollow)
    flat = [homogeneous(np.array([0.5, 0.5]), np.array([0.55, 0.45]), T) for T in HORIZONS]
    ratios = [c04_max_form.sides(x)[0].ratio for x in flat]
    ax.plot(list(HORIZONS), ratios, "s:", color="0.5", label="max form, mu uniform, TV 0.05")
    ax.set_ylim(0, 1.05)
    ax.legend(frameon=False, loc="lower left")
    return fig


def at_horizon(claim: ModuleType, T: int) -> SimpleNamespace:
    """The claim on two tokens and one horizon only, with the extreme examples of that horizon."""
    shape = {"V": 2, "T": T, "reward": "adversarial"}
    return SimpleNamespace(
        NUMBER=claim.NUMBER,
        TITLE=claim.TITLE,
        SHAPES=[shape],
        size=claim.size,
        decode=claim.decode,
        sides=claim.sides,
        tight=lambda: [(x(T), "", 0.0) for x in (rare_token_example, half_example)],
    )


def envelope() -> Figure:
    """Largest total variation that a ratio envelope [1 - el, 1 + eh] over all actions allows. Lines:
    the sharp el eh / (el + eh), attained by a two-point law; dashed: the paper's max(el, eh) / 2. They
    meet where el = eh."""
    fig, ax = _axes("eps_high", "largest TV")
    eh = np.linspace(0.01, 0.6, 200)
    for el, colour in ((0.05, "tab:blue"), (0.2, "tab:orange"), (0.4, "tab:green")):
        ax.plot(eh, el * eh / (el + eh), color=colour, label=f"eps_low = {el}")
        ax.plot(eh, np.maximum(el, eh) / 2, "--", color=colour, lw=0.9)
    ax.legend(frameon=False)
    return fig


def sat_radius() -> Figure:
    """The upper PPO radius that cuts the same outward tokens as SAT at a quantile q of |d| (nats), for
    three base radii. Below q = eps or so SAT is a much smaller trust region than its base; above
    q = log(1 + eps) its upper radius is PPO's."""
    fig, ax = _axes("q, the 0.9 quantile of |d| (nats)", "equivalent PPO radius eps'")
    q = np.geomspace(1e-4, 1, 200)
    for eps in (0.1, 0.2, 0.28):
        ax.plot(q, [equivalent_radius(x, eps) for x in q], label=f"eps = {eps}")
    ax.set(xscale="log", yscale="log")
    ax.legend(frameon=False)
    return fig


def hidden_tv() -> Figure:
    """The total variation that a sampled ratio inside [1 - eps, 1 + eps] can hide, by the probability
    mu(a) of the sampled action. Lines: the bound 1 - mu(a)(1 - eps). Dots: the largest found by a seeded
    search over three tokens. A harmless ratio on an unlikely token promises nothing."""
    fig, ax = _axes("mu(a) of the sampled action", "TV hidden behind its ratio")
    m = np.linspace(0.001, 0.999, 200)
    rng = np.random.default_rng(0)
    for eps, colour in ((0.05, "tab:blue"), (0.2, "tab:orange")):
        ax.plot(m, 1 - m * (1 - eps), color=colour, label=f"eps = {eps}")
        best = {}
        for _ in range(4000):
            x = c08_sampled_action.decode({"V": 3, "eps": eps}, 3 * rng.standard_normal(6))
            box, side = int(20 * x["mu"][0]), c08_sampled_action.sides(x)[0]
            if side.lhs > best.get(box, (0, 0))[1]:
                best[box] = float(x["mu"][0]), side.lhs
        ax.plot(*zip(*best.values(), strict=True), ".", color=colour, ms=4)
    ax.set_ylim(0, 1.02)
    ax.legend(frameon=False)
    return fig


def trajectories(rows: pl.DataFrame) -> Figure:
    """Bound against truth along the training runs of one method (PPO where the run has it): median over
    seeds and logged steps of the size of the exact remainder and of the two penalties, by lag (logarithmic), with the share of steps on which
    each penalty exceeds the range of J and so says nothing."""
    label = "ppo" if "ppo" in rows["arm"].unique() else rows["arm"][0]
    frame = rows.filter((pl.col("arm") == label) & pl.col("J").is_finite())
    lags = frame["lag"].unique(maintain_order=True).to_list()
    fig, ax = _axes("lag", "reward units")
    names = {
        "penalty_max": "max form (33)",
        "penalty_mean": "average form (34)",
        "remainder": "|remainder|",
    }
    for column, name in names.items():
        by_lag = [frame.filter(pl.col("lag") == lag)[column].abs() for lag in lags]
        shares = (
            ""
            if column == "remainder"
            else f", vacuous {', '.join(f'{100 * (x > VACUOUS).mean():.0f}' for x in by_lag)} %"
        )
        ax.plot(
            range(len(lags)), [max(x.median(), TINY) for x in by_lag], "o-", label=name + shares
        )
    ax.axhline(VACUOUS, color=REFERENCE, ls="--", lw=0.8)
    ax.set(yscale="log", xticks=range(len(lags)), xticklabels=lags)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.2))
    return fig


FIGURES = {
    "tightness": (tightness, "Tightness against the horizon"),
    "envelope": (envelope, "What a ratio envelope allows"),
    "sat_radius": (sat_radius, "SAT as a PPO radius"),
    "hidden_tv": (hidden_tv, "What a sampled ratio hides"),
}


def _axes(x: str, y: str):
    fig = Figure(figsize=(5.6, 3.6))
    ax = fig.subplots()
    ax.set(xlabel=x, ylabel=y)
    return fig, ax
