"""What may be wrong with a run whose columns can be compared; every alarm has a null and a threshold.

A function answers with one Check. What is a matter of chance must leave its null by `errors` standard
errors, over responses; what is a matter of size must pass a threshold of Limits.
"""

from __future__ import annotations

import numpy as np

from simlab.audit.checks import Check
from simlab.audit.facts import Facts, Limits, cannot, quiet
from simlab.audit.scores import odd_one, repeats
from simlab.audit.weights import (
    drift,
    mixed_versions,
    old_tokens,
    response_bias,
    sawtooth,
    stale_engine,
)


def alarms(f: Facts, limits: Limits) -> list[Check]:
    """Every check, fired or not, in the order of what explains most."""
    every = (stale_engine, repeats, odd_one, drift, sawtooth, multiplicative, tail, sample_size, first_token, old_tokens,
             mixed_versions, response_bias, unbounded, noise_cuts, flat_groups)  # fmt: skip
    return [check(f, limits) for check in every]


# ---------------------------------------------------------------- size
def multiplicative(f: Facts, limits: Limits) -> Check:
    """NeMo-RL's alarm, on the engine's part where it is known."""
    name, asked = "mult_prob_error", "the mean of e^|d| is small"
    value, mean, of = f.numbers["mult_prob_error"], f.numbers["d_bar"], "the two columns"
    if f.engine is not None and np.isfinite(f.engine).all():
        size, of = np.abs(f.engine), "trainer and engine at equal weights"
        value, mean = float(np.exp(np.minimum(size, 70)).mean()), float(size.mean())
    null = "1 + d_bar"
    if value <= limits.mult_prob_error:
        return quiet(name, asked, value, limits.mult_prob_error, null)
    text = f"the mean of e^|d| is {value:.4f} between {of} (mean |d| {mean:.4f} nats)"
    cure = "Use one precision for logits and head on both sides, and the same batch shape and kernels where they matter; then run one step at learning rate 0 to see what is left."
    return Check(name, "alarm", text, value, limits.mult_prob_error, null, "all tokens", cure)


def tail(f: Facts, limits: Limits) -> Check:
    """Tokens with a gap of more than a nat."""
    name, asked, value = "far", "few tokens have a gap above 1 nat", f.numbers["far"]
    if value <= limits.far:
        return quiet(name, asked, value, limits.far, "0 for noise of this size")
    high, low = int(f.d.argmax()), int(f.d.argmin())
    worst = int(f.tokens[high if f.d[high] >= -f.d[low] else low])
    text = f"{value:.1%} of the tokens have |d| above 1 nat, {f.numbers['d_max']:.3g} at most"
    cure = "Open the worst of them in report.html: one response means a fault of that row; all over means drift or a broken kernel."
    return Check(
        name, "alarm", text, value, limits.far, "0 for noise of this size", f.t.place(worst), cure
    )


def sample_size(f: Facts, limits: Limits) -> Check:
    """The share of the tokens that importance weights leave."""
    name, asked, value = "ess", "importance weights leave most of the sample", f.numbers["ess"]
    if value >= limits.ess:
        return quiet(name, asked, value, limits.ess, "1 on-policy")
    text = f"the effective sample size is {value:.3g} of the tokens: few tokens carry the gradient"
    cure = "Cap or mask the ratio (see the table of methods), or shorten the lag."
    return Check(name, "alarm", text, value, limits.ess, "1 on-policy", "all tokens", cure)


def first_token(f: Facts, limits: Limits) -> Check:
    """The first token of a response against the others."""
    name, asked = "first_token", "the first token of a response is like the others"
    rows = f.by.get("position", [])
    if len(rows) < 2 or rows[0]["from"] != 0:
        return cannot(name, "the responses have one token, or their first is masked")
    first, rest = rows[0], rows[1:]
    n = sum(x["tokens"] for x in rest)
    mean = sum(x["tokens"] * x["d_bar"] for x in rest) / n
    error = np.hypot(first["d_se"], max(x["d_se"] for x in rest))
    ratio = first["d_bar"] / mean if mean else float("inf") if first["d_bar"] else 1.0
    significant = first["d_bar"] - mean > min(limits.errors, 2 + first["tokens"] / 4) * error
    if ratio < limits.first or not significant:
        return quiet(name, asked, float(ratio), limits.first, "1")
    text = f"mean |d| is {first['d_bar']:.3g} on the first token and {mean:.3g} on the others: {first['share']:.1%} of all gaps"
    cure = "Compare prefill and decode: the first token comes from the prefill kernel, or has the prompt's wrong position, template or cache."
    return Check(name, "alarm", text, float(ratio), limits.first, "1", "position 0", cure)


# ---------------------------------------------------------------- methods and data
def flat_share(p: float, G: float) -> float:
    """Probability that G independent answers of success rate p all get one reward."""
    return p**G + (1 - p) ** G


def _by_chance(f: Facts) -> str:
    """What independent answers of this success rate would give, where rewards are 0 and 1."""
    reward, group = f.t.extra.get("reward"), f.t.extra["group"]
    if reward is None or not np.isin(reward, (0, 1)).all():
        return ""
    G = len(group) / len(np.unique(group))
    p = float(reward.mean())
    return f" (p^G + (1 - p)^G is {flat_share(p, G):.1%} at success rate {p:.3g} and {G:.3g} answers a prompt)"


def unbounded(f: Facts, limits: Limits) -> Check:
    """PPO does not bound the weight of a token with A < 0 whose ratio is large."""
    name, asked = "unbounded_weight", "no token has a large gradient weight under PPO"
    ppo = next((x for x in f.methods if x["method"] == "ppo"), None)
    if ppo is None or "largest_weight" not in ppo:
        return cannot(name, "PPO is not among the methods")
    value = ppo["largest_weight"]
    if value <= limits.weight:
        return quiet(name, asked, value, limits.weight, "max |A|")
    A = f.t.extra.get("advantage")
    worst = f.d if A is None else np.where(A[f.tokens] < 0, f.d, -np.inf)
    text = f"a token has a gradient weight of {value:.3g} under PPO, which does not clip A < 0 above 1 + eps"
    cure = "Use dual clip, a cap (tis, cispo), or a two-sided mask (icepop, kpop)."
    return Check(
        name,
        "alarm",
        text,
        value,
        limits.weight,
        "max |A|",
        f.t.place(int(f.tokens[worst.argmax()])),
        cure,
    )


def noise_cuts(f: Facts, limits: Limits) -> Check:
    """Methods whose radii are below the noise of the engine."""
    name = "noise_cuts"
    known = [x for x in f.methods if x.get("cut_by_noise") is not None]
    if not known:
        return cannot(name, "which method cuts noise needs trainer_logprobs_before")
    cuts = sorted(
        (x for x in known if x["cut_by_noise"] > limits.noise_cut), key=lambda x: -x["cut_by_noise"]
    )
    if not cuts:
        return quiet(name, "no method cuts tokens for noise alone", 0.0, limits.noise_cut, "0")
    listed = ", ".join(f"{x['method']} {x['cut_by_noise']:.0%}" for x in cuts[:6])
    more = f" and {len(cuts) - 6} more" if len(cuts) > 6 else ""
    text = f"the engine's noise alone, at equal weights, makes these cut: {listed}{more}"
    cure = "Their radii are below the noise floor: widen them (see thresholds), re-score old log-probs, or correct the engine's part by its own ratio."
    return Check(name, "note", text, cuts[0]["cut_by_noise"], limits.noise_cut, "0", "", cure)


def flat_groups(f: Facts, limits: Limits) -> Check:
    """Groups without any advantage."""
    name, A, group = "flat_groups", f.t.extra.get("advantage"), f.t.extra.get("group")
    if A is None or group is None:
        return cannot(name, "groups that teach nothing need columns advantages and group")
    g = group[f.t.responses[f.tokens]]
    known = np.isfinite(g) & np.isfinite(A[f.tokens])
    _, number = np.unique(g[known], return_inverse=True)
    taught = np.bincount(number.reshape(-1), A[f.tokens][known] != 0) > 0
    if not len(taught):
        return cannot(name, "no response has a group and an advantage")
    value = float(1 - taught.mean())
    tokens = float((~taught[number.reshape(-1)]).mean())
    text = f"{int((~taught).sum()):,} of {len(taught):,} groups have no advantage at all, with {tokens:.0%} of the tokens"
    text += _by_chance(f)
    if value <= limits.flat_groups:
        status = "note" if value else "quiet"
        return Check(
            name, status, text, value, limits.flat_groups, "p^G + (1 - p)^G for success rate p"
        )
    return Check(
        name,
        "alarm",
        text,
        value,
        limits.flat_groups,
        "p^G + (1 - p)^G for success rate p",
        "",
        "Sample more answers a prompt, or prompts of middle difficulty.",
    )
