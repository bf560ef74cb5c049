"""What gated tokens carry, measured on PPO's own trajectories: PPO's loss, and the shares as logged numbers.

    simlab compare --experiment e3 --method-file examples/gate_shares.py --methods ppo gate_shares --out RUN
    python examples/gate_shares.py RUN     # the table of shares, with intervals over seeds

Every gate takes the tenth of the optimizer batch with the largest score, so their shares can be compared: SAT's
|d|, the mass |pi - mu|, the exact total variation of the state, the age (ties by lot), a lot alone, and the
smallest |d|. A token of a gate is outward where A d > 0, that is, where PPO's clip would act.

Three numbers of each token are shared out: |r - 1| / 2, whose mean estimates the total variation of mu and pi;
the exact total variation of its state, whose sum along a response is S of the bounds, and 4 xi S the penalty of
their average form; and |(r - 1) A|, the size of its part in the first-order improvement.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from simlab.core.quantile import Reduce, abs_quantile
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers import ppo, sat_open

ALPHA = 0.9
GATES = ("tail", "mass", "tv", "age", "random", "inverted")
CARRIED = ("sampled_tv", "exact_tv", "gain")


def scores(b: TokenBatch) -> dict[str, Tensor]:
    """By gate, `[..., N]`, at least 0; what stands off the mask is not read."""
    tail, mass = (sat_open.score(b, gate) for gate in GATES[:2])
    tv = on_mask(b, b.need("tv", "gate_shares"))
    lot = on_mask(b, b.need("uniform", "gate_shares"))
    age = on_mask(b, b.need("age", "gate_shares"))
    return dict(zip(GATES, (tail, mass, tv, age + lot, lot, (-tail).exp()), strict=True))


def whole_batch(
    batches: Iterable[TokenBatch], *, reduce: Reduce | None = None
) -> dict[str, Tensor]:
    """{"q": the score above which each gate is open, `[..., 6]`}."""
    shards = [(scores(b), b.mask) for b in batches]
    cuts = [abs_quantile([(u[gate], mask) for u, mask in shards], ALPHA, reduce) for gate in GATES]
    return {"q": torch.stack(cuts, -1)}


def surrogate(b: TokenBatch, *, q: Tensor) -> Surrogate:
    """PPO's surrogate; the shares are means over tokens, to be divided by `share_all_*`."""
    S, active, diagnostics = ppo.surrogate(b)
    d, A = log_ratio(b).detach(), on_mask(b, b.advantage)
    off = torch.expm1(d)
    tv = on_mask(b, b.need("tv", "gate_shares"))
    carried = dict(zip(CARRIED, (off.abs() / 2, tv, (off * A).abs()), strict=True))
    gates = {
        gate: b.mask & (u > q[..., i].to(u).unsqueeze(-1))
        for i, (gate, u) in enumerate(scores(b).items())
    }
    for name, x in carried.items():
        diagnostics[f"share_all_{name}"] = Diagnostic(x, "mean")
        for gate, gated in gates.items():
            diagnostics[f"share_{gate}_{name}"] = Diagnostic(torch.where(gated, x, 0), "mean")
            outward = torch.where(gated & (A * d > 0), x, 0)
            diagnostics[f"share_{gate}_outward_{name}"] = Diagnostic(outward, "mean")
    for gate, gated in gates.items():
        diagnostics[f"share_{gate}_tokens"] = Diagnostic(gated.to(S.dtype), "mean")
        both = (gated & gates["tail"]).to(S.dtype)
        diagnostics[f"share_{gate}_and_tail"] = Diagnostic(both, "mean")
    return Surrogate(S, active, diagnostics)


def table(folder: str) -> str:
    """Markdown: what share of each number a gate carries, by lag; medians over seeds with 95 % intervals."""
    import polars as pl

    from simlab.study.intervals import median_interval

    rows = pl.read_parquet(f"{folder}/results.parquet").filter(pl.col("method") == "gate_shares")
    names = [*(f"{x}{name}" for name in CARRIED for x in ("", "outward_")), "tokens", "and_tail"]
    lines = ["| lag | gate | " + " | ".join(names) + " |", "| --- " * (2 + len(names)) + "|"]
    for (lag,), part in rows.group_by("lag", maintain_order=True):
        seeds = part.group_by("seed").agg(pl.col("^share_.*$").mean())
        for gate in GATES:
            cells = []
            for name in names:
                whole = f"share_all_{name.removeprefix('outward_')}"
                whole = whole if whole in seeds.columns else f"share_{gate}_tokens"
                share = seeds[f"share_{gate}_{name}"] / (1 if name == "tokens" else seeds[whole])
                middle, low, high = (100 * x for x in median_interval(share.to_numpy()))
                cells.append(f"{middle:.1f} ({low:.1f} - {high:.1f})")
            lines.append(f"| {lag} | {gate} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(sys.argv[1]))
