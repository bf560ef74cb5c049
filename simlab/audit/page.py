"""report.html of an audit: findings, figures, methods, and a viewer of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from simlab.audit.audit import MOST, Audit
from simlab.audit.batch import batch_of, of_responses
from simlab.audit.blocks import active, blocks, per_response
from simlab.audit.measure import NUMBERS
from simlab.audit.methods import SHOWN, signed, weights
from simlab.audit.screen import DIFFERENCE, DIFFERENCE_HEADS, checked, difference_rows, percent
from simlab.stabilizers import bind
from simlab.study.page import embed, write_page
from simlab.study.style import OKABE_ITO, panels

MOST_RESPONSES, MOST_TOKENS = 2000, 200_000  # in the viewer
DRAWN = 1 << 22  # tokens in the histogram
HEADS = {
    "method": "method",
    "cut": "cut",
    "capped": "capped",
    "raised": "raised",
    "out_of_band": "out of band",
    "cut_outward": "of outward",
    "cut_pull_back": "of pull-back",
    "weight_kept": "weight kept",
    "top_1_percent": "weight of the top 1 %",
    "cut_by_noise": "noise alone cuts",
}


def write_report(audit: Audit, folder: Path) -> None:
    """report.html and its figure. Raises OSError."""
    r = audit.result
    counts = r["counts"]
    values: dict[str, Any] = {
        "log": r["log"],
        "simlab": r["simlab"],
        "counts": f"{counts['files']:,} files, {counts['responses']:,} responses, {counts['sampled']:,} sampled tokens, {counts['measured']:,} measured.",
        "columns": " - ".join(r["columns"].get(x, "?") for x in ("trainer", "rollout")),
        "findings": audit.findings,
        "serious": any(x.status != "note" for x in audit.findings) or not counts["measured"],
        "checked": checked(audit),
        "assumed": r.get("assumed", []),
    }
    if "mismatch" in r:
        values["picture"] = _picture(audit, folder / "figures")
        values["numbers"] = [_number(name, value) for name, value in r["mismatch"].items()]
        values["heads"] = list(HEADS.values())
        values["methods"] = [_method(row) for row in r["methods"]]
        values["lacking"] = [x["not_computable"] for x in r["methods"] if "not_computable" in x]
        values["thresholds"] = [_threshold(row) for row in r.get("thresholds", [])]
    if "compare" in r:
        values["difference"] = r["compare"] | {"table": difference_rows(r["compare"])}
        values["difference_heads"], values["difference_note"] = DIFFERENCE_HEADS, DIFFERENCE
    data, values["viewer_note"] = viewer(audit)
    values["data"] = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    write_page(folder / "report.html", Path(__file__).with_name("report.html"), **values)


def _number(name: str, value: float) -> dict[str, str]:
    column = NUMBERS[name]
    plain = {
        key: getattr(column, key).replace("\\|", "|") for key in ("unit", "meaning", "elsewhere")
    }
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
    return {"name": name, "value": shown} | {k: v.replace("`", "") for k, v in plain.items()}


def _method(row: dict) -> list[str]:
    if "not_computable" in row:
        return [f"{row['method']} (not computable)", *["-"] * (len(HEADS) - 1)]
    name = row["method"] + ("" if row["acts"] else " (never acts here)")
    return [name, *(percent(row.get(key)) for key in list(HEADS)[1:])]


def _threshold(row: dict) -> list[str]:
    if row["value"] is None:
        return [row["method"], row["argument"], percent(row["share"]), "none does", "-"]
    return [
        row["method"],
        row["argument"],
        percent(row["share"]),
        f"{row['value']:.4g}",
        percent(row["cut"]),
    ]


def _picture(audit: Audit, folder: Path) -> dict[str, str]:
    by = {
        k: v
        for k, v in audit.result["by"].items()
        if k in ("position", "age", "step", "entropy", "log_prob")
    }
    t = audit.tokens
    tokens = of_responses(t, active(audit.keep), DRAWN)
    size = np.abs(t.trainer[tokens].astype(float) - t.rollout[tokens])
    folder.mkdir(parents=True, exist_ok=True)

    def draw():
        fig, axes = panels(1, 1 + len(by), 2.9, 2.7)
        own = axes[0][0]
        largest = max(float(size.max()), 1e-6)
        own.hist(
            np.maximum(size, 1e-6), bins=np.geomspace(1e-6, largest * 1.01, 50), color=OKABE_ITO[0]
        )
        own.set_xscale("log")
        own.set_xlabel("|d|, nats")
        own.set_ylabel("tokens")
        for ax, (name, rows) in zip(axes[0][1:], by.items(), strict=True):
            known = [x for x in rows if x["from"] is not None]
            x = [(row["from"] + row["to"]) / 2 for row in known]
            y, error = ([row[key] for row in known] for key in ("d_bar", "d_se"))
            ax.errorbar(x, y, error, color=OKABE_ITO[1], marker="o", markersize=3)
            if name == "position":
                ax.set_xscale("symlog", linthresh=1)
            ax.set_ylim(bottom=0)
            ax.set_xlabel(name.replace("_", "-").replace("log-prob", "log mu, nats"))
            ax.set_ylabel("mean |d|, nats")
        return fig

    return embed(draw, folder, "gaps", "Gaps", "")


# ---------------------------------------------------------------- the viewer
def viewer(audit: Audit) -> tuple[dict, str]:
    """Tokens of the responses with the largest mean |d|, as plain lists, and a sentence on which those are."""
    t, keep = audit.tokens, audit.keep
    used, total = per_response(t, active(keep))
    mean = total / np.maximum(used, 1)
    order = np.argsort(-mean, kind="stable")
    sizes = np.diff(t.starts)[order]
    chosen = order[: max(int((np.cumsum(sizes) <= MOST_TOKENS).sum()), 1)][:MOST_RESPONSES]
    cut = _cut(audit, chosen)
    responses = [
        _response(audit, int(r), cut, float(mean[r]))
        for r in chosen
        if t.starts[r] < t.starts[r + 1]
    ]
    note = f"The {len(responses):,} of {len(t.row):,} responses with the largest mean |d|, the largest first."
    return {"methods": list(SHOWN), "responses": responses}, note


def _cut(audit: Audit, chosen: np.ndarray) -> np.ndarray:
    """Which methods of SHOWN cut a token `[N]`, one bit each; with unknown advantages under A = +1 or A = -1.

    Of a long log it is known in the chosen responses; they and evenly spaced ones are then the batch.
    """
    t, tokens = audit.tokens, active(audit.keep)
    bits = np.zeros(len(t.mask), dtype=np.int16)
    if len(tokens) > MOST:
        shown = np.zeros(len(t.row), dtype=bool)
        shown[chosen] = True
        own = np.concatenate([x[shown[t.responses[x]]] for x in blocks(t, tokens)])
        tokens = np.union1d(own, of_responses(t, tokens, MOST))
    if not len(tokens):
        return bits
    b = batch_of(t, tokens)
    known = "advantage" in t.extra and bool(np.isfinite(t.extra["advantage"][tokens]).all())
    for i, name in enumerate(SHOWN):
        for part in signed(b, known):
            bits[tokens] |= weights(bind(name), part, False).cut.astype(np.int16) << i
    return bits


def _response(audit: Audit, r: int, cut: np.ndarray, d_bar: float) -> dict:
    t = audit.tokens
    here = slice(int(t.starts[r]), int(t.starts[r + 1]))

    def numbers(x: np.ndarray | None) -> list | None:
        if x is None:
            return None
        return [round(float(v), 5) if np.isfinite(v) else None for v in x[here]]

    age = None if t.version is None or t.trained is None else t.trained - t.version
    token = t.extra.get("token")
    out = {
        "place": t.place(here.start).rpartition(", token")[0] or t.place(here.start),
        "d_bar": round(d_bar, 5),
        "pi": numbers(np.nan_to_num(t.trainer)),
        "mu": numbers(np.nan_to_num(t.rollout)),
        "use": audit.keep[here].astype(int).tolist(),
        "cut": cut[here].tolist(),
        "A": numbers(t.extra.get("advantage")),
        "H": numbers(t.extra.get("entropy")),
        "age": numbers(age),
        "id": None if token is None else [int(x) if np.isfinite(x) else None for x in token[here]],
        "text": None if "text" not in t.extra else [str(x) for x in t.extra["text"][here]],
    }
    for role in ("step", "reward"):
        x = t.extra.get(role)
        out[role] = None if x is None or not np.isfinite(x[r]) else float(x[r])
    return {key: value for key, value in out.items() if value is not None}
