"""Methods that break a promise each: name -> (the promise that refuses it, what it says, the file)."""

HEAD = '''"""Soft: S = {formula}, a made-up rule. Source: this test."""

from __future__ import annotations

import random

import torch

from simlab.core.head import graded_head, head
from simlab.core.per_response import response_means, response_sums, to_tokens
from simlab.core.quantile import abs_quantile
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, graded, log_ratio, on_mask, ratio

'''
# S = sg[w] A log pi with w = r / (1 + |d|)
SOFT = """
def surrogate(b: TokenBatch, *, power: float = 1.0) -> Surrogate:
    d, A = log_ratio(b), on_mask(b, b.advantage)
    x = d.detach().clamp(max=30)
    w = x.exp() / (1 + x.abs()) ** power * A
    return Surrogate(w * on_mask(b, b.logp), w != 0, {})
"""
# S = r A in closed form
CLOSED = """
def surrogate(b: TokenBatch) -> Surrogate:
    d, A = log_ratio(b), on_mask(b, b.advantage)
    with torch.no_grad():
        S = ratio(d) * A
        w = torch.where(d > 70, 0.0, S)
    return Surrogate(graded(d, S, w), w != 0, {})
"""
# S = r A, but nothing where |d| is above a number of the whole batch
GATED = """
def whole_batch(batches, *, reduce=None):
    batches = list(batches)
    add = reduce or (lambda x: x)
    total = add(sum(log_ratio(b).detach().abs().double().sum(-1) for b in batches))
    count = add(sum(b.mask.sum(-1) for b in batches))
    return {"limit": 2 * total / count.clamp(min=1)}


def surrogate(b: TokenBatch, *, limit: torch.Tensor) -> Surrogate:
    d, A = log_ratio(b), on_mask(b, b.advantage)
    limit = torch.as_tensor(limit, device=d.device).to(d.dtype).unsqueeze(-1)
    w = torch.where(d.detach().abs() <= limit, A, 0.0)
    S = ratio(d) * w
    return Surrogate(S, (w != 0) & (d < 70), {})
"""
# a gradient on tokens that were not sampled: the head's, and only the head's where d < 0
CENTRED = """
def surrogate(b: TokenBatch) -> Surrogate:
    x, A = on_mask(b, b.logp), on_mask(b, b.advantage)
    top, top_mu, _ = head(b, __name__.rpartition(".")[2])
    with torch.no_grad():
        w = torch.where(log_ratio(b) < 0, 0.0, A)
        c = -A.unsqueeze(-1) * top_mu.exp()
        S = w * x + (c * top.clamp(min=-1e4)).sum(-1)
    return Surrogate(graded_head(x, top, S, w, c), (w != 0) | (c != 0).any(-1), {})
"""
HEADED = "sg[w] A log pi - A sum_v mu_v log pi_v"


def soft(*changes, formula="w A log pi"):
    """SOFT with the text of each pair replaced."""
    return _changed(SOFT, changes, formula)


def closed(*changes):
    """CLOSED with the text of each pair replaced."""
    return _changed(CLOSED, changes, "r A")


def gated(*changes):
    """GATED with the text of each pair replaced."""
    return _changed(GATED, changes, "r A on tokens within the limit")


def centred(*changes, formula=HEADED):
    """CENTRED with the text of each pair replaced."""
    return _changed(CENTRED, changes, formula)


def _changed(text, changes, formula):
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return HEAD.format(formula=formula) + text


RIGHT = {"soft": soft(), "closed": closed(), "gated": gated(), "centred": centred()}
A_LINE = "    w = x.exp()"
BROKEN = {
    # ------------------------------------------------ what it answers
    "half": ("shapes", "S has shape", soft(("Surrogate(w * on_mask(b, b.logp)", "Surrogate((w * on_mask(b, b.logp))[..., :-1]"))),
    "narrow": ("precision", "S of float64 input is torch.float32", soft(
        ("Surrogate(w * on_mask(b, b.logp)", "Surrogate((w * on_mask(b, b.logp)).float()"))),
    "in_place": ("mixtures", "widen all three", closed(
        ("log_ratio(b), on_mask(b, b.advantage)", "own(b), torch.where(b.mask, b.advantage, 0)"),
        ("def surrogate", "def own(b):\n    pi = b.logp.to(torch.promote_types(b.logp.dtype, torch.float32))\n"
            "    return torch.where(b.mask, pi - b.logp_mu.detach(), 0.0)\n\n\ndef surrogate"),
        ("        S = ratio(d) * A\n", "        S, r = ratio(d) * A, ratio(d)\n"),
        ("(d > 70, 0.0, S)", "((d > 70) | (r.mul_(A) != S), 0.0, S)"))),
    "guessed": ("active", "active is not the support", soft(("w != 0", "A > 0"))),
    "mixing": ("lanes", "depends on the other lanes", soft(("x.abs())", "x.abs().mean())"))),
    "column": ("diagnostics", "J is a column", soft(("w != 0, {}", 'w != 0, {"J": Diagnostic(d, "mean")}'))),
    "multiplied": ("masked", "nan under the mask changes S", soft(("on_mask(b, b.advantage)", "b.advantage * b.mask"))),
    "first": ("order", "depends on the order", soft((A_LINE, "    x = x - x[..., :1]\n" + A_LINE))),
    "nothing": ("empty", "of an empty batch is active", soft(
        (A_LINE, "    A = A / b.mask.any(-1, keepdim=True)\n" + A_LINE))),
    "unheld": ("overflow", "overflows", soft((".clamp(max=30)", ""))),
    "certain": ("certain_tokens", "not finite at a log-prob of exactly 0", soft(
        (A_LINE, "    A = A / on_mask(b, b.logp_mu).exp().log().masked_fill(~b.mask, 1.0)\n" + A_LINE))),
    # ------------------------------------------------ gradients
    "through": ("constants", "a gradient reaches logp_mu", soft(
        ("d.detach()", "(on_mask(b, b.logp.detach()) - on_mask(b, b.logp_mu))"))),
    "weight_off": ("derivative", "finite differences", closed(("torch.where(d > 70, 0.0, S)", "torch.where(d > 70, 0.0, 0.9 * S)"))),
    "weight_one_side": ("derivative", "finite differences", closed(("torch.where(d > 70, 0.0, S)", "torch.where(d > 70, 0.0, torch.where(d < -1, 1.5 * S, S))"))),
    "attached": ("weight", "gradient of its own", soft(
        ("x = d.detach()", "x = d"), formula="sg[r / (1 + |d|)] A log pi")),
    "live": ("without_graph", "limit of whole_batch carries a gradient", gated((".detach().abs().double()", ".abs().double()"))),
    "two_ways": ("without_graph", "another number while logp carries a gradient", soft(
        (A_LINE, "    x = x if b.logp.requires_grad else x / 2\n" + A_LINE))),
    # ------------------------------------------------ gradients on the head
    "unsaid": ("constants", "a gradient reaches topk: take topk.detach(), or write the term of log pi_v", centred(formula="w A log pi")),
    "head_held": ("constants", "no gradient reaches topk", centred(("S, w, c)", "S, w, torch.zeros_like(c))"), (" | (c != 0).any(-1)", ""))),
    "head_off": ("derivative", "finite differences", centred(("S, w, c)", "S, w, 0.9 * c)"), formula=HEADED.replace("sg[w]", "w"))),
    "head_alive": ("weight", "gradient of its own", centred(
        ("S, w, c)", "S, w, c) + 0.5 * (A.unsqueeze(-1) * top.masked_fill(top == -torch.inf, -40.0).exp()).sum(-1)"))),
    "head_unseen": ("active", "active is not the support", centred((" | (c != 0).any(-1)", ""))),
    # ------------------------------------------------ how the batch is cut
    "quantile": ("micro_batches", "in whole_batch", soft(
        (A_LINE, "    q = torch.where(b.mask, x.abs(), 0.0)\n    q = q.quantile(0.9, -1, keepdim=True) if q.shape[-1] else 0.0\n    A = torch.where(x.abs() > q, 0.0, A)\n" + A_LINE))),
    "quantile_of_99": ("micro_batches", "in whole_batch", soft(
        (A_LINE, "    q = abs_quantile([(x, b.mask)], 0.99).unsqueeze(-1)\n    A = torch.where(x.abs() > q, 0.5 * A, A)\n" + A_LINE))),
    "divided": ("micro_batches", "in whole_batch", soft((A_LINE, "    A = A / b.mask.sum(-1, keepdim=True).clamp(min=1)\n" + A_LINE))),
    "mean_of_means": ("micro_batches", "micro-batches that whole_batch is given", gated(
        ("    add = ", "    n = len(batches)\n    add = "),
        ("sum(log_ratio(b).detach().abs().double().sum(-1) for b in batches)",
         "sum(log_ratio(b).detach().abs().double().sum(-1) / b.mask.sum(-1).clamp(min=1) for b in batches)"),
        ("count.clamp(min=1)", "n"))),
    "one_rank": ("ranks", "several ranks", gated(("add = reduce or (lambda x: x)", "add = lambda x: x"))),
    "mean_of_ranks": ("ranks", "several ranks", gated(
        ("2 * total / count.clamp(min=1)", "add(mean) / add(torch.ones_like(mean))"),
        ("total = add(", "total = ("), ("count = add(", "count = ("),
        ('    return {', '    mean = 2 * total / count.clamp(min=1)\n    return {'))),
    "hanging": ("ranks", "a cluster would hang", gated(
        ("add = reduce or (lambda x: x)", "add = reduce if reduce and sum(int(b.mask.sum()) for b in batches) else (lambda x: x)"))),
    "by_number": ("numbering", "how responses are numbered", soft((A_LINE, "    A = A / (2 + torch.where(b.mask, b.response, 0))\n" + A_LINE))),
    "by_count": ("numbering", "n_responses", soft((A_LINE, "    A = A / b.n_responses\n" + A_LINE))),
    # ------------------------------------------------ being called
    "remembers": ("again", "keep nothing between calls", soft(
        ("\ndef surrogate", "SEEN = []\n\n\ndef surrogate"),
        (A_LINE, "    SEEN.append(x.abs().sum())\n    A = A / (1 + sum(SEEN) / len(SEEN))\n" + A_LINE))),
    "fifth_call": ("again", "keep nothing between calls", soft(
        ("\ndef surrogate", "SEEN = []\n\n\ndef surrogate"),
        (A_LINE, "    SEEN.append(0)\n    A = A if len(SEEN) % 7 else 2 * A\n" + A_LINE))),
    "rarely": ("again", "instead of drawing", soft(
        (A_LINE, "    A = torch.where(torch.rand(b.mask.shape, device=d.device) < 1e-9, 0.0, A)\n" + A_LINE))),
    "own_draws": ("again", "differs from call to call", soft(
        ("\ndef surrogate", "DICE = random.Random()\n\n\ndef surrogate"),
        (A_LINE, "    A = A * (1.5 if DICE.random() < 0.5 else 1)\n" + A_LINE))),
    "writes": ("untouched", "writes into b.age", soft((A_LINE, "    A = A / (1 + b.need('age', 'soft').clamp_(0, 3))\n" + A_LINE))),
    "tidies": ("untouched", "writes into b.logp_mu", soft(("    d, A", "    b.logp_mu.masked_fill_(~b.mask, 0.0)\n    d, A"))),
    "rounds": ("untouched", "writes into limit", gated(("    w = torch", "    limit.round_()\n    w = torch"))),
    "on_cpu": ("device", "device=b.logp.device", soft((A_LINE, "    A = torch.minimum(A, torch.full(b.mask.shape, 2.0))\n" + A_LINE))),
    "stats_on_cpu": ("device", "device=b.logp.device", gated((
        '"limit": 2 * total / count.clamp(min=1)', '"limit": torch.ones(total.shape)'))),
    "mute": ("fields_named", "names itself and the field", soft((A_LINE, "    A = A / (1 + torch.where(b.mask, b.age, 0))\n" + A_LINE))),
    "breaks": ("one_graph", "the graph breaks", soft((A_LINE, "    A = A / 2 if x.abs().sum().item() < 0 else A\n" + A_LINE))),
}  # fmt: skip
