"""One optimizer step under SAT in a trainer of your own, on one rank or on several.

    python examples/plug_in.py
    torchrun --nproc-per-node 2 examples/plug_in.py

Both print the same q and the same norm of the gradient. A base install is enough.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simlab import TokenBatch, bind, global_counts, token_log_probs, token_mean

RESPONSES, TOKENS, WIDTH, VOCAB = 16, 12, 32, 64


def response(i: int) -> dict[str, Tensor]:
    """Response i as an engine hands it over; its weights were older, and so its log-probs differ."""
    draws = torch.Generator().manual_seed(i)
    states, drift = (torch.randn(TOKENS, WIDTH, generator=draws) for _ in range(2))
    older = nn.functional.log_softmax(policy()(states + 0.1 * drift), -1)
    target = torch.multinomial(older.exp(), 1, generator=draws)
    return {
        "states": states,
        "target": target.squeeze(-1),
        "logp_mu": older.gather(-1, target).squeeze(-1).detach(),
        "advantage": torch.randn(1, generator=draws).expand(TOKENS),
        "mask": torch.arange(TOKENS) < TOKENS - i % 3,
    }


def policy() -> nn.Linear:
    """The model in training; every rank has a copy."""
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCAB)


def batch(model: nn.Module, micro: list[dict[str, Tensor]]) -> TokenBatch:
    """The tokens of a micro-batch, with log-probs under the model."""
    x = {name: torch.cat([r[name] for r in micro]) for name in micro[0]}
    logp = token_log_probs(model(x["states"]), x["target"]).logp
    index = torch.arange(len(micro)).repeat_interleave(TOKENS)
    return TokenBatch(logp, x["logp_mu"], x["advantage"], x["mask"], index)


def step(model: nn.Module, micro_batches: list, all_reduce) -> Tensor:
    """Adds this rank's gradient of the global loss; returns q, the same number on every rank."""
    sat = bind("sat", alpha=0.9)  # wrong names and values fail here
    with torch.no_grad():  # a pass ahead of the step: q is a number of the whole optimizer batch
        ahead = [batch(model, micro) for micro in micro_batches]
    stats = sat.stats(ahead, reduce=all_reduce)  # exact over micro-batches and ranks
    count = global_counts(ahead, reduce=all_reduce)["tokens"]
    for micro in micro_batches:
        b = batch(model, micro)  # TokenBatch(logp, logp_mu, advantage, mask, response), nats
        out = sat.surrogate(b, **stats)  # out.S, out.active, out.diagnostics
        total, _ = token_mean(out.S, b)
        (-total / count).backward()  # the sum over micro-batches and ranks is the gradient
    return stats["q"]


def main() -> None:
    """Prints q and the norm of the gradient, from the first rank."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if ranks > 1:
        dist.init_process_group("gloo")
    model = policy()
    own = [response(i) for i in range(rank, RESPONSES, ranks)]
    micro_batches = [own[i : i + 2] for i in range(0, len(own), 2)]
    q = step(model, micro_batches, dist.all_reduce if ranks > 1 else None)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    if ranks > 1:
        dist.all_reduce(gradient)
        dist.destroy_process_group()
    if rank == 0:
        print(f"q {q.item():.9g} gradient {gradient.norm().item():.9g}")


if __name__ == "__main__":
    main()
