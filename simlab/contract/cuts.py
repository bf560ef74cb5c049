"""Promises about how a batch is cut, numbered and spread: none of it changes an answer."""

from __future__ import annotations

from dataclasses import replace

import torch

from simlab.contract.batches import aggregate, by_response, graded_head, on_ranks, ragged
from simlab.contract.require import close, need
from simlab.core.aggregate import AGGREGATIONS, mean, reduce_diagnostics
from simlab.core.quantile import summed
from simlab.core.tokens import TokenBatch, log_ratio
from simlab.stabilizers import Stabilizer

LARGE = (1, 40, 2, 1, 17, 90, 3, 25)  # tokens of each response: enough for a quantile of 0.99
EACH = [[i] for i in range(len(LARGE))]
CUTS = ([[5], [0, 3], [1, 2, 4, 6, 7], []], EACH, [[0, 1, 2, 3, 4, 5, 7], [6]])


def lanes(bound: Stabilizer) -> None:
    """Lanes do not see each other: [2, 3, N] gives the answers of its six lanes."""
    b = ragged(1, lanes=(2, 3), by_token=True)
    out, grad = graded_head(bound, b)
    shown = reduce_diagnostics(b, out.diagnostics)
    for i, j in ((0, 0), (0, 2), (1, 1)):
        lane = replace(b, **{name: x[i, j] for name, x in b.held().items()})
        alone, alone_grad = graded_head(bound, lane)
        close(out.S[i, j].detach(), alone.S.detach(), "S of a lane depends on the other lanes")
        close(grad[i, j], alone_grad, "the gradient of a lane depends on the other lanes")
        need(out.active[i, j] == alone.active, "active of a lane depends on the other lanes")
        for name, value in reduce_diagnostics(lane, alone.diagnostics).items():
            close(shown[name][i, j], value, f"{name} of a lane depends on the other lanes")


def order(bound: Stabilizer) -> None:
    """The order of tokens does not matter: a permutation permutes S, the gradient and active."""
    for seed in range(3):
        b = ragged(seed, by_token=True)
        turn = torch.randperm(b.mask.shape[-1], generator=torch.Generator().manual_seed(seed))
        (want, want_grad), (got, got_grad) = graded_head(bound, b), graded_head(bound, b.take(turn))
        close(got.S.detach(), want.S.detach()[turn], "S depends on the order of tokens")
        close(got_grad, want_grad[turn], "the gradient depends on the order of tokens")
        need(got.active == want.active[turn], "active depends on the order of tokens")


def numbering(bound: Stabilizer) -> None:
    """The numbers of the responses are names: others, with gaps between them, change nothing."""
    for seed, by_token in ((10, False), (11, True)):
        b = ragged(seed, sizes=LARGE, by_token=by_token)
        names = torch.tensor([11, 2, 8, 5, 17, 0, 14, 3])[b.response]
        other = replace(b, response=names, n_responses=20)
        (want, want_grad), (got, got_grad) = graded_head(bound, b), graded_head(bound, other)
        what = "depends on how responses are numbered or on n_responses"
        close(got.S.detach(), want.S.detach(), f"S {what}")
        close(got_grad, want_grad, f"the gradient {what}")
        need(got.active == want.active, f"active {what}")
        _same(bound.stats([other]), bound.stats([b]), what)


def micro_batches(bound: Stabilizer) -> None:
    """Nothing depends on how the batch is cut into micro-batches of whole responses."""
    for seed, cut in enumerate(CUTS):
        _cut(bound, _scaled(seed), cut)
    _losses(bound, ragged(4, sizes=LARGE), CUTS[0])


def _scaled(seed: int) -> TokenBatch:
    """Log-ratios as they come, four times as large and a tenth: some rules act on one of them only."""
    b = ragged(seed, sizes=LARGE, by_token=seed % 2 == 1)
    d = (1.0, 4.0, 0.2)[seed] * log_ratio(b)
    return replace(b, logp=torch.where(b.mask, (b.logp_mu + d).clamp(max=-0.01), b.logp))


def _cut(bound: Stabilizer, b: TokenBatch, cut: list[list[int]]) -> None:
    """S, gradient, active and diagnostics token by token, the same whole-batch numbers given."""
    place = by_response(replace(b, uniform=torch.arange(b.mask.shape[-1])), cut)
    index = torch.cat([micro.need("uniform", "a cut") for micro in place])
    micros = by_response(b, cut)
    stats, (want, want_grad) = bound.stats(micros), graded_head(bound, b)
    _same(stats, bound.stats([b]), "depends on the micro-batches that whole_batch is given")
    parts = [graded_head(bound, micro, **stats) for micro in micros]
    cure = "depends on the micro-batch it is in: compute what it takes in whole_batch"
    close(torch.cat([out.S.detach() for out, _ in parts]), want.S.detach()[index], f"S {cure}")
    close(torch.cat([grad for _, grad in parts]), want_grad[index], f"the gradient {cure}")
    need(torch.cat([out.active for out, _ in parts]) == want.active[index], f"active {cure}")
    reduced = [
        reduce_diagnostics(m, out.diagnostics) for m, (out, _) in zip(micros, parts, strict=True)
    ]
    tokens = torch.stack([m.mask.sum() for m in micros])
    for name, value in reduce_diagnostics(b, want.diagnostics).items():
        each, reduction = torch.stack([x[name] for x in reduced]), want.diagnostics[name].reduce
        if reduction == "mean":
            joined = (each * tokens).sum() / tokens.sum()
        else:
            joined = getattr(each[tokens > 0], reduction)()
        close(joined, value, f"{name} {cure}", 1e-5)  # shares are formed in float32


def _losses(bound: Stabilizer, b: TokenBatch, cut: list[list[int]]) -> None:
    """Loss and gradient under every aggregation, added up over the micro-batches."""
    leaf = b.logp.clone().requires_grad_()
    whole = replace(b, logp=leaf)
    micros = by_response(whole, cut)
    out, stats = bound(whole), bound.stats(micros)
    parts = [bound.surrogate(micro, **stats) for micro in micros]
    for how in AGGREGATIONS:
        loss = mean(*aggregate(how, out.S, bound.counted(whole)))
        (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        terms = [
            aggregate(how, x.S, bound.counted(micro))
            for x, micro in zip(parts, micros, strict=True)
        ]
        split = mean(summed(t[0] for t in terms), summed(t[1] for t in terms))
        (split_grad,) = torch.autograd.grad(split, leaf, retain_graph=True)
        need(loss != 0, "the loss is 0")
        close(split.detach(), loss.detach(), f"the {how} loss depends on the micro-batch")
        close(split_grad, grad, f"the {how} gradient depends on the micro-batch")


def ranks(bound: Stabilizer) -> None:
    """Whole-batch numbers over ranks, one of them empty, are those of one rank that has everything."""
    if not bound.whole_batch:
        return
    b = ragged(1, sizes=LARGE, by_token=True)
    micros = by_response(b, CUTS[0])
    shards, want = (micros[:2], micros[2:], micros[3:]), bound.stats([b])
    what = "is another number when the batch lies on several ranks: add sums and counts through "
    for got in on_ranks(3, lambda rank, reduce: bound.stats(shards[rank], reduce)):
        _same(got, want, f"{what}`reduce`, then divide")


def _same(got: dict, want: dict, what: str) -> None:
    need(got.keys() == want.keys(), f"which numbers whole_batch returns {what}")
    for name, x in got.items():
        x, y = (torch.as_tensor(v, dtype=torch.float64) for v in (x, want[name]))
        need(x.shape == y.shape, f"the shape of {name} {what}")
        close(x, y, f"{name} {what}")
