"""What `scaleup run` says when it ends: the curve of rewards in a line, what went wrong on the way, what is next."""

from __future__ import annotations

import polars as pl

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # bars of a curve


def curve(x: list[float]) -> str:
    """Means of at most WIDTH parts of x as bars between its least and its largest mean; "" for nothing."""
    parts = [x[i * len(x) // WIDTH : (i + 1) * len(x) // WIDTH] for i in range(WIDTH)]
    means = [sum(part) / len(part) for part in parts if part] if len(x) > WIDTH else x
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(BARS[round((y - low) / (high - low or 1) * (len(BARS) - 1))] for y in means)


def closing(rows: pl.DataFrame, recipe: str) -> str:
    """Sentences on a run whose logged steps are `rows`, for the terminal."""
    reward = rows["reward"].to_list()
    said = f"reward {reward[0]:.3f} {curve(reward)} {reward[-1]:.3f} in {len(rows)} logged steps"
    seconds = rows["seconds"].max() if "seconds" in rows.columns else None
    said += f", {seconds:,.0f} s" if seconds else ""
    restarts = rows["engine_restarts"].max() if "engine_restarts" in rows.columns else 0
    if restarts:
        said += f"\nengines were restarted {restarts} times"
    return f"{said}\nnext: scaleup compare {recipe} (every method, lag and seed, and a report)"
