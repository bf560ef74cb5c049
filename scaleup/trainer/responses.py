"""What a step trains on: sampled responses, shared over ranks and packed into micro-batches.

A `Response` is what the trainer sees of a text that an engine sampled after a prompt; the engine's own
record of it, before a reward, is the `Sample` of scaleup/rollout/sample.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scaleup.models.megatron import parallel_state
from scaleup.models.packing import Packed, pack
from simlab.core.tokens import KINDS, TokenBatch


@dataclass(frozen=True)
class Response:
    """A prompt, what was sampled after it, and what is known about each sampled token."""

    tokens: Tensor  # [prompt + sampled] int64
    prompt: int  # tokens of the prompt, at least 1
    logp_mu: Tensor  # [sampled] nats
    advantage: float | Tensor  # one number, or [sampled]
    mask: Tensor | None = None  # [sampled] bool, all by default
    experts: Tensor | None = None  # [prompt + sampled - 1, layers, k], for replay r3
    # more of TokenBatch, each one number, [sampled] or [sampled, K]
    fields: dict[str, Tensor | float] = field(default_factory=dict)
    # [sampled, K] int64, the tokens of `topk_mu`, -1 where that is the sampled one
    head: Tensor | None = None


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
    head: Tensor | None = None  # [N, K] int64, tokens whose log-probs become `b.topk`
    entropy: Tensor | None = None  # [N] nats, of the same pass, where the stabilizer reads it
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
        shares = share(responses, n, ranks)
        if max(sum(len(r.tokens) for r in m) for mine in shares for m in mine) <= tokens:
            return shares
        n += 1


def collate(
    responses: Sequence[Response],
    multiple: int = 1,
    device=None,
    routed: tuple[int, int] | None = None,
    head: int = 0,
) -> MicroBatch:
    """One micro-batch; its row is padded to a multiple (TP). An empty one holds a single pad token.

    `routed` (layers, k) asks for the experts of every response, `head` for that many tokens of its head. The last token of a response
    predicts nothing that was sampled and is not fed. Non-finite numbers leave the mask. Raises
    ValueError for a response whose parts do not fit.
    """
    for r in responses:
        _check(r, routed, head)
    packed = pack(
        [r.tokens[:-1] for r in responses if len(r.tokens) > 1] or [[0]], multiple, device
    )
    T = packed.tokens.shape[1]
    target, places = _targets(responses, T)
    b, counts = _token_batch(responses, device, head).screen()
    experts = _experts(responses, T, *routed) if routed else None
    screened = int(sum(counts.values()))
    tops = None
    if head:
        none = torch.zeros(0, head, dtype=torch.int64)
        tops = torch.cat([none, *(r.head for r in responses if r.head is not None)]).to(device)
    return MicroBatch(
        packed, target.to(device), places.to(device), b, experts, head=tops, screened=screened
    )


def _check(r: Response, routed: tuple[int, int] | None, head: int) -> None:
    """Raises ValueError for a response whose parts do not fit each other, or without wanted experts or head."""
    n = len(r.tokens) - r.prompt
    fits = r.prompt >= 1 and n >= 0 and len(r.logp_mu) == n
    if not fits or (r.mask is not None and len(r.mask) != n):
        raise ValueError(
            f"response of {len(r.tokens)} tokens, {r.prompt} of the prompt: needs a prompt and "
            f"a log-prob for each sampled token, got {len(r.logp_mu)}"
        )
    if routed and n:  # an engine has none for a response without tokens
        wanted = (len(r.tokens) - 1, *routed)
        got = "none" if r.experts is None else tuple(r.experts.shape)
        if got != wanted:
            raise ValueError(f"replay r3 needs the experts {wanted} of each response, got {got}")
    if head:
        parts = (r.head, r.fields.get("topk_mu"))
        if any(x is None or x.shape != (n, head) for x in parts):
            got = ["none" if x is None else tuple(x.shape) for x in parts]
            raise ValueError(
                f"head and topk_mu of a response of {n} tokens must be {(n, head)}, got "
                f"{got[0]} and {got[1]}"
            )


def _targets(responses: Sequence[Response], T: int) -> tuple[Tensor, Tensor]:
    """The token that follows each of the row `[1, T]`, 0 in the padding; places of sampled ones `[N]`."""
    target, places = torch.zeros(T, dtype=torch.int64), [torch.zeros(0, dtype=torch.int64)]
    start = 0
    for r in responses:
        end = start + len(r.tokens) - 1
        target[start:end] = r.tokens[1:]
        places.append(torch.arange(start + r.prompt - 1, end))
        start = end
    return target[None], torch.cat(places)


def _token_batch(responses: Sequence[Response], device, head: int) -> TokenBatch:
    """What the loss sees of the sampled tokens `[N]`; logp is 0 until the forward pass."""
    lengths = [len(r.tokens) - r.prompt for r in responses]

    def joined(values: list, dtype: torch.dtype) -> Tensor:
        parts = [
            torch.as_tensor(v).to(dtype).expand(n) for v, n in zip(values, lengths, strict=True)
        ]
        return torch.cat([*parts, torch.zeros(0, dtype=dtype)]).to(device)

    names = {name for r in responses for name in r.fields}
    for name in names:
        if lacking := [r for r in responses if name not in r.fields]:
            raise ValueError(f"{len(lacking)} responses of a micro-batch lack the field {name}")
    if head:
        names.discard("topk_mu")
    names |= set() if responses else {"age"}  # an empty micro-batch among others that have ages
    tops = {}
    if head:
        rows = [torch.as_tensor(r.fields["topk_mu"]).float() for r in responses]
        tops["topk_mu"] = torch.cat([torch.zeros(0, head), *rows]).to(device)
    return TokenBatch(
        logp=torch.zeros(sum(lengths), device=device),
        logp_mu=joined([r.logp_mu for r in responses], torch.float32),
        advantage=joined([r.advantage for r in responses], torch.float32),
        mask=joined([True if r.mask is None else r.mask for r in responses], torch.bool),
        response=joined(list(range(len(responses))), torch.int64),
        n_responses=max(len(responses), 1),
        **{
            name: joined([r.fields[name] for r in responses], KINDS.get(name, torch.float32))
            for name in names
        },
        **tops,
    )


def _experts(responses: Sequence[Response], T: int, layers: int, k: int) -> Tensor:
    """Experts `[T, layers, k]` of the row; dummy ones for tokens that are not trained on."""

    def dummies(n: int) -> Tensor:
        return torch.arange(k).expand(n, layers, k)

    fed = [len(r.tokens) - 1 for r in responses]
    given = [
        dummies(n) if r.experts is None else r.experts for r, n in zip(responses, fed, strict=True)
    ]
    return torch.cat([*(x.cpu().long() for x in given), dummies(T - sum(fed))])
