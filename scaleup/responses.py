"""What a step trains on: sampled responses, shared over ranks and packed into micro-batches."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scaleup.model import Packed, pack, parallel_state
from simlab.tokens import TokenBatch


@dataclass(frozen=True)
class Response:
    """A prompt, what was sampled after it, and what is known about each sampled token."""

    tokens: Tensor  # [prompt + sampled] int64
    prompt: int  # tokens of the prompt, at least 1
    logp_mu: Tensor  # [sampled] nats
    advantage: float | Tensor  # one number, or [sampled]
    mask: Tensor | None = None  # [sampled] bool, all by default
    experts: Tensor | None = None  # [prompt + sampled - 1, layers, k], for replay r3
    fields: dict[str, Tensor] = field(default_factory=dict)  # more of TokenBatch, each [sampled]


@dataclass(eq=False)
class MicroBatch:
    """Responses side by side in one row of T tokens; N of them were sampled."""

    packed: Packed  # all tokens but the last of each response
    target: Tensor  # [1, T] the token that follows
    at: Tensor  # [N] int64, place in the row of the logits of each sampled token
    b: TokenBatch  # of the sampled tokens; logp is 0 until the forward pass
    experts: Tensor | None  # [T, layers, k], on the host, until routes are made of it
    routes: list[Tensor] | None = None  # what this rank's routers replay, on the host
    logp: Tensor | None = None  # [N] nats, of the first forward-only pass; on the last stage
    screened: int = 0  # non-finite numbers that were taken out of the mask


def share(
    responses: Sequence[Response], micro_batches: int = 1, ranks: int | None = None
) -> list[list[list[Response]]]:
    """The micro-batches of every data-parallel rank, of about equal numbers of tokens.

    Every rank gets the same number of micro-batches, as its collectives need; some may be empty.
    """
    ranks = ranks or parallel_state.get_data_parallel_world_size()
    bins = [[] for _ in range(ranks * micro_batches)]
    least = [(0, 0, j) for j in range(len(bins))]  # a heap of (tokens, responses, bin)
    for i in sorted(range(len(responses)), key=lambda i: -len(responses[i].tokens)):
        load, n, j = least[0]
        bins[j].append(i)
        heapq.heapreplace(least, (load + len(responses[i].tokens), n + 1, j))
    return [[[responses[i] for i in sorted(x)] for x in bins[rank::ranks]] for rank in range(ranks)]


def share_by_tokens(responses: Sequence[Response], tokens: int, ranks: int) -> list:
    """`share` with the fewest micro-batches of at most so many tokens; a longer response is alone."""
    tokens = max(tokens, max((len(r.tokens) for r in responses), default=0))
    n = max(math.ceil(sum(len(r.tokens) for r in responses) / (ranks * tokens)), 1)
    while True:
        found = share(responses, n, ranks)
        if max(sum(len(r.tokens) for r in m) for mine in found for m in mine) <= tokens:
            return found
        n += 1


def collate(
    responses: Sequence[Response],
    multiple: int = 1,
    device=None,
    routed: tuple[int, int] | None = None,
) -> MicroBatch:
    """One micro-batch; its row is padded to a multiple (TP). An empty one holds a single pad token.

    `routed` (layers, k) asks for the experts of every response. The last token of a response
    predicts nothing that was sampled and is not fed. Non-finite numbers leave the mask. Raises
    ValueError for a response whose parts do not fit.
    """
    for r in responses:
        n = len(r.tokens) - r.prompt
        if (
            r.prompt < 1
            or n < 0
            or (r.mask is not None and len(r.mask) != n)
            or len(r.logp_mu) != n
        ):
            raise ValueError(
                f"response of {len(r.tokens)} tokens, {r.prompt} of the prompt: needs a prompt and "
                f"a log-prob for each sampled token, got {len(r.logp_mu)}"
            )
        if routed:
            shape, got = (
                (len(r.tokens) - 1, *routed),
                None if r.experts is None else r.experts.shape,
            )
            if got != shape and n:  # an engine has none for an answer without tokens
                got = "none" if got is None else tuple(got)
                raise ValueError(f"replay r3 needs the experts {shape} of each response, got {got}")
    rows = [r.tokens[:-1] for r in responses if len(r.tokens) > 1]
    packed = pack(rows or [[0]], multiple, device)
    target = torch.cat([r.tokens[1:] for r in responses] + [torch.zeros(0, dtype=torch.int64)])
    lengths = [len(r.tokens) - r.prompt for r in responses]
    N, T = sum(lengths), packed.tokens.shape[1]
    at, start = [torch.zeros(0, dtype=torch.int64)], 0
    for r in responses:
        at.append(torch.arange(start + r.prompt - 1, start + len(r.tokens) - 1))
        start += len(r.tokens) - 1

    def joined(values: list, dtype: torch.dtype) -> Tensor:
        parts = [
            torch.as_tensor(v).to(dtype).expand(n) for v, n in zip(values, lengths, strict=True)
        ]
        return torch.cat([*parts, torch.zeros(0, dtype=dtype)]).to(device)

    names = {name for r in responses for name in r.fields}
    for name in names:
        if lacking := [r for r in responses if name not in r.fields]:
            raise ValueError(f"{len(lacking)} responses of a micro-batch lack the field {name}")
    kind = {"age": torch.int64, "stratum": torch.int64}
    names |= set() if responses else {"age"}  # an empty micro-batch among others that have ages
    b = TokenBatch(
        logp=torch.zeros(N, device=device),
        logp_mu=joined([r.logp_mu for r in responses], torch.float32),
        advantage=joined([r.advantage for r in responses], torch.float32),
        mask=joined([True if r.mask is None else r.mask for r in responses], torch.bool),
        response=joined(list(range(len(responses))), torch.int64),
        n_responses=max(len(responses), 1),
        **{
            name: joined([r.fields[name] for r in responses], kind.get(name, torch.float32))
            for name in names
        },
    )
    b, counts = b.screen()
    experts = None
    if routed:
        layers, k = routed

        def any_of(n: int) -> Tensor:
            """Some experts for n tokens that no sampled token follows."""
            return torch.arange(k).expand(n, layers, k)

        of = [any_of(len(r.tokens) - 1) if r.experts is None else r.experts for r in responses]
        experts = torch.cat([*(x.cpu().long() for x in of), any_of(T - len(target))])
    target = torch.cat([target, target.new_zeros(T - len(target))])[None].to(device)
    screened = int(sum(counts.values()))
    return MicroBatch(packed, target, torch.cat(at).to(device), b, experts, screened=screened)
