"""Alarms about weights: an engine that lacks them, drift over steps, lag, and what a response shares."""

from __future__ import annotations

import numpy as np

from simlab.audit.checks import Check
from simlab.audit.facts import LEAST, Facts, Limits, cannot, quiet, shared


# ---------------------------------------------------------------- weights
def stale_engine(f: Facts, limits: Limits) -> Check:
    """Gaps at equal weights must not know the advantages: sum of (d - mean d) A over responses is 0."""
    name, asked = "stale_engine", "at equal weights the trainer does not prefer what was rewarded"
    A = f.t.extra.get("advantage")
    if A is None:
        return cannot(
            name, "this log has no advantages, which would show an engine with old weights"
        )
    if f.engine is None:
        return cannot(
            name,
            "no token is known to be of the trainer's weights (age 0, or trainer_logprobs_before)",
        )
    A, known = A[f.tokens], np.isfinite(f.engine) & np.isfinite(A[f.tokens])
    d = np.where(known, f.engine, 0)
    d = np.where(known, d - (d.sum() / max(known.sum(), 1)), 0)
    response = f.t.responses[f.tokens]
    x = np.bincount(response, np.where(known, A, 0) * d)
    some = np.bincount(response, known & (A != 0)) > 0
    if some.sum() < LEAST:
        return cannot(
            name, f"{int(some.sum())} responses of age 0 have an advantage, {LEAST} are needed"
        )
    spread = float(np.sqrt((x**2).sum()))
    z = float(x.sum()) / spread if spread else 0.0
    null = "0 standard errors: noise of an engine does not know rewards"
    if z <= limits.learned:
        return quiet(name, asked, z, limits.learned, null)
    text = f"tokens that count as age 0 are likelier under the trainer where they were rewarded (sum of (d - mean d) A is {z:.1f} standard errors above 0 over {int(some.sum())} responses): the engine has older weights than the log says"
    cure = "Compare a checksum of the engine's weights with the trainer's after a push, and flush the prefix cache; take versions when a request starts."
    return Check(name, "alarm", text, z, limits.learned, null, "tokens of age 0", cure)


def _steps(f: Facts) -> list[dict]:
    return [x for x in f.by.get("step", []) if x["from"] is not None]


def drift(f: Facts, limits: Limits) -> Check:
    """The slope of d_bar over steps, weighted by the errors of its means."""
    name, asked, rows = "drift", "d_bar has no trend over the steps", _steps(f)
    if len(rows) < 3:
        return cannot(name, "a trend needs three steps, and a column step")
    x = np.array([row["from"] for row in rows])
    y = np.array([row["d_bar"] for row in rows])
    floor = 1e-9 + 1e-6 * y.mean()
    error = np.maximum([row["d_se"] for row in rows], floor)
    w = error**-2.0
    centre = (w * x).sum() / w.sum()
    var = (w * (x - centre) ** 2).sum()
    slope = float((w * (x - centre) * y).sum() / var)
    rest = y - (w * y).sum() / w.sum() - slope * (x - centre)
    excess = max(float((w * rest**2).sum()) / max(len(x) - 2, 1), 1.0)
    z = slope * float(np.sqrt(var / excess))
    change = slope * (x[-1] - x[0]) / max(float(y[0]), floor)
    null = "slope 0"
    steady = abs(change) < limits.drift or (abs(z) < limits.errors and len(rows) > 3)
    if steady or (len(rows) == 3 and not (np.all(np.diff(y) > 0) or np.all(np.diff(y) < 0))):
        return quiet(name, asked, change, limits.drift, null)
    text = f"mean |d| goes from {y[0]:.3g} to {y[-1]:.3g} over {len(rows)} steps (slope {z:+.1f} standard errors)"
    cure = "Split it by age and into policy and engine parts: if the engine's part grows, look at weight pushes, caches and precision; if the policy's grows, lag or learning rate do."
    return Check(
        name, "alarm", text, float(change), limits.drift, null, f"steps {x[0]:g} to {x[-1]:g}", cure
    )


def sawtooth(f: Facts, limits: Limits) -> Check:
    """d_bar doubles over at least two steps and falls back at once."""
    name, asked, rows = "sawtooth", "d_bar does not rise and fall back", _steps(f)
    if len(rows) < 4:
        return cannot(name, "a rise and a fall need four steps, and a column step")
    y, error = np.array([x["d_bar"] for x in rows]), np.array([x["d_se"] for x in rows])
    for i in range(2, len(y) - 1):
        rise = y[i] >= 2 * y[i - 2] and y[i] > y[i - 1] > y[i - 2]
        fall = y[i] - y[i + 1] > limits.errors * np.hypot(error[i], error[i + 1])
        if rise and fall and y[i + 1] <= y[i] / 2:
            text = f"mean |d| rises from {y[i - 2]:.3g} to {y[i]:.3g} and falls back to {y[i + 1]:.3g}: something was reset there"
            cure = "Look for a restart of the engine at that step, and for a cache that pushes do not flush (prefix cache, CUDA graphs)."
            place = f"step {rows[i + 1]['from']:g}"
            return Check(
                name, "alarm", text, float(y[i] / y[i + 1]), 2.0, "no fall by half", place, cure
            )
    return quiet(name, asked, None, 2.0, "no fall by half")


# ---------------------------------------------------------------- lag
def old_tokens(f: Facts, limits: Limits) -> Check:
    """Does the gap grow with age: is it lag or the engine."""
    name, rows = "age", [x for x in f.by.get("age", []) if x["from"] is not None]
    if "d_policy" in f.numbers:
        policy, engine = f.numbers["d_policy"], f.numbers["d_engine"]
        text = f"mean |d| {f.numbers['d_bar']:.4f} has a policy part of {policy:.4f} and an engine part of {engine:.4f} nats"
        which = (
            "lag or learning rate"
            if policy > engine
            else "the engine: precision, kernels, batch shape"
        )
        return Check(
            name,
            "note",
            text,
            policy,
            None,
            "policy part 0 without lag",
            "",
            f"The larger part is that of {which}.",
        )
    if f.engine is None or not rows:
        return cannot(
            name,
            "lag and engine cannot be told apart: log trainer_logprobs_before (the trainer's scores at the rollout's weights), or versions; a run at learning rate 0 shows the engine alone",
        )
    young, old = rows[0], rows[-1]
    if len(rows) < 2:
        return quiet(name, "all tokens are of one age", young["from"], None, "no lag")
    text = f"mean |d| is {young['d_bar']:.4f} at age {young['from']:g} (the engine alone if 0) and {old['d_bar']:.4f} at age {old['to']:g}"
    return Check(
        name,
        "note",
        text,
        old["d_bar"] - young["d_bar"],
        None,
        "0 without lag",
        f"age {old['to']:g}",
        "What age adds is policy lag; what is there at age 0 is the engine.",
    )


def mixed_versions(f: Facts, limits: Limits) -> Check:
    """Responses that several versions sampled."""
    name, version = "mixed_versions", f.t.version
    if version is None or not np.isfinite(version[f.tokens]).any():
        return cannot(name, "this log has no versions of the weights")
    v, response = version[f.tokens], f.t.responses[f.tokens]
    same = response[1:] == response[:-1]
    changes = np.unique(response[1:][same & (v[1:] != v[:-1])])
    R = len(np.unique(response))
    if not len(changes):
        return quiet(name, "every response has one version", 0.0, None, "0")
    text = f"{len(changes):,} of {R:,} responses were sampled by several versions of the weights, {np.nanmin(v):g} to {np.nanmax(v):g} in all"
    return Check(
        name,
        "note",
        text,
        len(changes) / R,
        None,
        "0",
        f.t.place(int(f.tokens[response.searchsorted(changes[0])])),
        "Use per-token versions; a sequence ratio mixes several policies there.",
    )


def response_bias(f: Facts, limits: Limits) -> Check:
    """Noise that averages out over a response, or a gap that a whole response shares."""
    name, asked, null = "response_bias", "gaps of one response are independent", "1 -+ sqrt(2 / R)"
    R, value = shared(f.t, f.tokens, f.d)
    if value is None or R < LEAST:
        return cannot(name, f"{R} responses, {LEAST} are needed, and gaps that differ")
    threshold = 1 + limits.errors * float(np.sqrt(2 / R))
    if value <= threshold:
        return quiet(name, asked, value, threshold, null)
    text = f"the mean gap of a response varies {value:.3g} times as much as independent tokens would: the gaps of a response share something"
    cure = "Sequence rules (GSPO, seqclip, trm) see this and not the single gaps: compare their radii with it. Look at length, temperature and template of the worst responses."
    return Check(name, "note", text, value, threshold, null, "", cure)
