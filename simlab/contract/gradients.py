"""Promises about the gradient: who receives it, and that it is the derivative of S."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from simlab.contract.batches import graded_head, ragged
from simlab.contract.require import close, need
from simlab.core.per_response import response_sums
from simlab.core.tokens import TokenBatch, on_mask
from simlab.stabilizers import Stabilizer

SIZES = (*(1,) * 24, 2, 3, 5, 8, 13)  # mostly one token a response: little can cancel
REPLAYED = "renormalised"  # a composition's log pi is then not logp, and S no product with it
STEP = 1e-7  # nats
OTHER = "log pi_v"  # what a formula calls the log-prob of a token of the head that was not sampled
CONVERSIONS = {
    torch.Tensor.detach,
    torch.detach,
    torch.Tensor.data.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__float__,
}


def active(bound: Stabilizer) -> None:
    """active names exactly the tokens whose log-prob, or head, receives a gradient from the sum of S."""
    for seed in range(4):
        out, grad = graded_head(bound, ragged(seed, by_token=seed % 2 == 1))
        need(out.active == (grad != 0).any(-1), "active is not the support of the gradient")


def constants(bound: Stabilizer) -> None:
    """No field but logp, and topk where the formula has log pi_v, receives a gradient."""
    b = ragged(7)
    stats = bound.stats([b])
    leaves = {
        name: x.clone().requires_grad_() for name, x in b.held().items() if x.is_floating_point()
    }
    out = bound.surrogate(replace(b, **leaves), **stats)
    grads = torch.autograd.grad(out.S.sum(), list(leaves.values()), allow_unused=True)
    for name, grad in zip(leaves, grads, strict=True):
        reached = grad is not None and bool((grad != 0).any())
        if name == "logp":
            need(reached, "no gradient reaches logp")
        elif name == "topk" and OTHER in bound.formula:
            need(reached, f"the formula has {OTHER}, and no gradient reaches topk")
        elif name != "advantage":
            cure = f"take {name}.detach()"
            if name == "topk":
                cure += f", or write the term of {OTHER} into the formula of the first line"
            need(not reached, f"a gradient reaches {name}: {cure}")


class _Replay(TorchFunctionMode):
    """Records what every .detach() (and, `inside_no_grad`, every operation without a graph) answers;
    `again` gives these answers: constants stay what they were."""

    def __init__(self, inside_no_grad: bool):
        super().__init__()
        self.inside_no_grad, self.answers, self.position = inside_no_grad, [], None

    def again(self, function, *given):
        """function(*given), given the recorded answers from the first on."""
        self.position = 0
        return function(*given)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        held = func in CONVERSIONS or (
            self.inside_no_grad and not torch.is_grad_enabled() and func is not _SWITCH
        )
        answer = func(*args, **(kwargs or {}))
        if not held:
            return answer
        if self.position is None:
            self.answers.append(answer.clone() if isinstance(answer, Tensor) else answer)
            return answer
        self.position += 1
        kept = self.answers[self.position - 1] if self.position <= len(self.answers) else answer
        return kept.clone() if isinstance(kept, Tensor) else kept


_SWITCH = torch._C._set_grad_enabled


def follows(bound: Stabilizer, b: TokenBatch, stats: dict, turn: Tensor, hold: str | None) -> bool:
    """Whether the gradient is dS/dt along (logp, topk) + t turn in every response, by finite differences.

    `hold`: None differentiates S as it stands; "detach" keeps what .detach() answered, "no_grad" also
    what was computed without a graph. At a kink either side will do, or their mean.
    """

    def at(distance: float) -> Tensor:
        logp = (b.logp + distance * turn[..., 0]).requires_grad_()
        topk = (b.need("topk", "a probe") + distance * turn[..., 1:]).requires_grad_()
        return bound.surrogate(replace(b, logp=logp, topk=topk), **stats).S

    if hold is None:
        middle, *ends = (at(x) for x in (0.0, STEP, -STEP))
    else:
        with _Replay(hold == "no_grad") as replay:
            middle = at(0.0)
            ends = [replay.again(at, x) for x in (STEP, -STEP)]
    claimed = response_sums(b, (graded_head(bound, b, **stats)[1] * turn).sum(-1))
    sides = [
        response_sums(b, (end - middle).detach()) / distance
        for end, distance in zip(ends, (STEP, -STEP), strict=True)
    ]
    near = [
        torch.isclose(x, claimed, rtol=1e-4, atol=1e-4) for x in (*sides, (sides[0] + sides[1]) / 2)
    ]
    return bool((near[0] | near[1] | near[2]).all())


def directions(seed: int, b: TokenBatch) -> Tensor:
    """A step of -1 to 1 for every token and each column of its head `[N, 1 + K]`."""
    rng, columns = torch.Generator().manual_seed(seed), b.need("topk", "a probe").shape[-1]
    return 2 * torch.rand(*b.logp.shape, 1 + columns, generator=rng, dtype=b.logp.dtype) - 1


def linear(b: TokenBatch, grad: Tensor) -> Tensor:
    """The log-probs of tokens and of their heads times the gradient `[..., N, 1 + K]`, summed `[..., N]`."""
    every = torch.cat([b.logp.unsqueeze(-1), b.need("topk", "a probe")], -1)
    return on_mask(b, torch.where(grad != 0, grad * every, 0.0).sum(-1))


def derivative(bound: Stabilizer) -> None:
    """The gradient is the derivative of S, with what .detach() or no_grad made constant held constant."""
    for seed in range(2):
        b = ragged(seed, sizes=SIZES, masked=0.0, by_token=seed == 1)
        stats, turn = bound.stats([b]), directions(seed, b)
        need(
            any(follows(bound, b, stats, turn, hold) for hold in ("detach", "no_grad")),
            "the gradient is not the derivative of S by finite differences: correct the weight handed "
            "to graded, and take .detach() of every factor that is meant to be a constant",
        )


def weight(bound: Stabilizer) -> None:
    """Where the formula reads S = sg[...] log pi, the factors of log pi carry no gradient of their own."""
    words = bound.formula
    usual = not any(isinstance(x, str | bool) for x in bound.arguments.values())
    if not ("sg[" in words and "log pi" in words and usual) or REPLAYED in words:
        return
    for seed in range(2):
        b = ragged(seed, by_token=seed == 1)
        out, grad = graded_head(bound, b)
        close(
            out.S.detach(),
            linear(b, grad),
            f"the formula reads {words}, and S is not its gradient times log pi: the weight keeps a "
            "gradient of its own, take .detach() of it",
        )


def without_graph(bound: Stabilizer) -> None:
    """stats and S are the same numbers with a live graph and without one, and stats carry no gradient."""
    b = ragged(9, by_token=True)
    live = replace(
        b,
        logp=b.logp.clone().requires_grad_(),
        topk=b.need("topk", "a probe").clone().requires_grad_(),
    )
    want, got = bound.stats([b]), bound.stats([live])
    need(want.keys() == got.keys(), "whole_batch returns other names while logp carries a gradient")
    for name, x in got.items():
        if isinstance(x, Tensor):
            need(
                not x.requires_grad, f"{name} of whole_batch carries a gradient: use logp.detach()"
            )
        need(torch.equal(*(torch.as_tensor(y[name]) for y in (want, got))),
             f"{name} of whole_batch is another number while logp carries a gradient")  # fmt: skip
    out, silent = bound.surrogate(live, **want), bound.surrogate(b, **want)
    need(out.S.requires_grad, "S carries no gradient")
    need(out.S.detach() == silent.S.detach(), "S is another number while logp carries a gradient")
    need(out.active == silent.active, "active differs while logp carries a gradient")
    need(not out.active.requires_grad, "active carries a gradient")
