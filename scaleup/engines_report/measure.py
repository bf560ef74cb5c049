"""Measurements on real trainers, for tests/scaleup and `scaleup.engines_report`: one copy of each.

All run on a rank (`launch.Ranks`) and return plain numbers. `folder` is a checkpoint of
`scaleup.models.tiny`, `layout` the fields of `megatron.Layout`, `build` those of TransformerConfig.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from scaleup.models import weights

LAYOUTS = {
    "DP2": {},
    "EP2": {"ep": 2},
    "TP2 SP": {"tp": 2},
    "TP2 SP EP2": {"tp": 2, "ep": 2},
    "PP2": {"pp": 2},
}
REPLAY = {"moe_enable_routing_replay": True}
RECOMPUTE = REPLAY | {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
STEPS = 3


# ---------------------------------------------------------------- a trainer and its data
def start(folder, layout: dict, *, name="sat", build=None, **settings):
    """The Trainer of a checkpoint on this rank."""
    from scaleup.models import megatron as model
    from scaleup.trainer.settings import Settings
    from scaleup.trainer.trainer import Trainer
    from simlab.stabilizers import bind

    layout = model.Layout(**layout)
    model.start(layout)
    built = model.build(weights.read_config(folder), layout, **(build or {}))
    weights.load(built, weights.read(folder))
    return Trainer(built, bind(name), Settings(**{"lr": 1e-4} | settings))


def some_responses(trainer, n=9, noise=0.3):
    """Responses of 4 to 12 tokens; mu is the first trainer's pi and noise, so both ends of a clip bind.

    The log-probs of pi come from a forward pass of whatever layout, rounded so that all agree.
    """
    from scaleup.trainer.reduce import from_last_stage
    from scaleup.trainer.responses import Response, share

    draw = torch.Generator().manual_seed(3)
    rows = []
    for i in range(n):
        tokens = torch.randint(512, (7 + i,), generator=draw)
        mask = torch.ones(4 + i, dtype=torch.bool)
        mask[1] = i % 3 > 0
        gap = noise * torch.randn(4 + i, generator=draw)
        advantage = round(float(torch.randn((), generator=draw)), 3)
        fields, head = {"logp_ref": gap - 5.0}, None
        if k := trainer.settings.head:
            head = torch.randint(512, (4 + i, k), generator=draw)
            head[::2, 0] = -1  # there the sampled token is the likeliest
            top = -2 - torch.rand(4 + i, k, generator=draw)
            fields["topk_mu"] = torch.where(head < 0, -torch.inf, top)
        rows.append(Response(tokens, 3, gap, advantage, mask, fields=fields, head=head))
    micro = trainer.collate([rows])
    trainer.before(micro)
    logp = from_last_stage(micro[0].logp)
    parts = logp.split([len(r.logp_mu) for r in rows])
    rows = [
        replace(r, logp_mu=(r.logp_mu + p).round(decimals=3))
        for r, p in zip(rows, parts, strict=True)
    ]
    trainer.stats = None
    return share(rows, 2)[trainer.dp_rank]


def routed_responses(trainer, n=8):
    """Responses of one length (a wrong micro-batch's experts would fit) with random sets of experts."""
    from scaleup.trainer.responses import Response, share

    draw = torch.Generator().manual_seed(3)
    rows = []
    for i in range(n):
        tokens = torch.randint(512, (11,), generator=draw)
        logp_mu = -6.5 + torch.randn(8, generator=draw)
        experts = torch.rand(10, 2, 8, generator=draw).argsort(-1)[..., :2].int()
        rows.append(Response(tokens, 3, logp_mu, (-1.0) ** (i // 3), experts=experts))
    return share(rows, 2)[trainer.dp_rank]


def take(trainer, micro, steps=STEPS) -> list[dict]:
    """What every step returned, as plain numbers."""
    taken = []
    for _ in range(steps):
        x = trainer.step(micro)
        numbers = {"loss": x.loss, "norm": x.grad_norm, "active": x.active, "tokens": x.tokens}
        shown = {k: v for k, v in x.diagnostics.items() if k != "screened" and not math.isnan(v)}
        taken.append(numbers | shown | {k: float(v) for k, v in x.stats.items()})
    return taken


def run(folder, layout, steps=STEPS, rows=some_responses, broken=False, **settings) -> list[dict]:
    """Steps of a new trainer. `broken` leaves the action of a routing replay at forward."""
    from scaleup.trainer import routing_replay as replay

    trainer = start(folder, layout, **settings)
    micro = trainer.collate(rows(trainer))
    if settings.get("quantile") == "pre_step":
        trainer.before(micro)
    right = replay.recompute
    if broken:
        replay.recompute = lambda model: None
    try:
        return take(trainer, micro, steps)
    finally:
        replay.recompute = right


def gap(a: list[dict], b: list[dict]) -> float:
    """Largest difference of two runs over all numbers of all steps, relative above 1."""
    assert [x.keys() for x in a] == [x.keys() for x in b]
    return max(abs(x[k] - y[k]) / max(1, abs(x[k])) for x, y in zip(a, b, strict=True) for k in x)


def local(folder, layout) -> tuple[dict, list[float]]:
    """The first step under `quantile="local"`, and q of each micro-batch of this rank."""
    trainer = start(folder, layout, quantile="local")
    x = trainer.step(trainer.collate(some_responses(trainer)))
    q = [float(trainer.stabilizer.stats([b])["q"]) for b in x.batches]
    return {"loss": x.loss, "norm": x.grad_norm}, q


# ---------------------------------------------------------------- the simulator's call
def simulated(folder, names, aggregation, kl_coef) -> dict[str, tuple]:
    """Megatron's step against the simulator's loss call on plain log-probs: by method, the gaps of the
    loss and of the gradient norm (relative), whether the active tokens are the same, the loss."""
    from scaleup.models import megatron as model
    from simlab.core.aggregate import AGGREGATIONS, mean
    from simlab.core.kl import KL
    from simlab.core.tokens import TokenBatch
    from simlab.stabilizers import bind

    trainer = start(folder, {}, lr=0.0, aggregation=aggregation, kl_coef=kl_coef, head=3)
    shared = some_responses(trainer)
    draw = torch.Generator().manual_seed(5)
    for rows in shared:
        for i, r in enumerate(rows):
            n = len(r.logp_mu)
            more = {
                "logp_prox": r.logp_mu + 0.1 * torch.randn(n, generator=draw),
                "entropy_mu": 3 * torch.rand(n, generator=draw),
                "gini_mu": torch.rand(n, generator=draw),
                "uniform": torch.rand(n, generator=draw),
                "age": torch.randint(8, (n,), generator=draw),
                "stratum": torch.arange(n) // 4,
                "tv": torch.rand(n, generator=draw) / 2,
                "reward": float(i % 3),
                "group": i // 2,
                "position": torch.arange(n),
            }
            rows[i] = replace(r, fields=r.fields | more)
    micro = trainer.collate(shared)

    # no DDP, one response at a time
    plain = model.build(weights.read_config(folder), model.Layout())
    weights.load(plain, weights.read(folder))
    everything = [r for rows in shared for r in rows]
    parts, tops = [], []
    for r in everything:
        logits = plain(r.tokens[None], torch.arange(len(r.tokens))[None], None)[0]
        table = logits[r.prompt - 1 : -1].double().log_softmax(-1)
        parts.append(table.gather(-1, r.tokens[r.prompt :, None])[:, 0].float())
        top = table.gather(-1, r.head.clamp(min=0)).float()
        tops.append(torch.where(r.head < 0, -torch.inf, top))
    lengths = torch.tensor([len(p) for p in parts])
    b = TokenBatch(
        logp=torch.cat(parts),
        logp_mu=torch.cat([r.logp_mu for r in everything]),
        advantage=torch.tensor([r.advantage for r in everything]).repeat_interleave(lengths),
        mask=torch.cat([r.mask for r in everything]),
        response=torch.arange(len(parts)).repeat_interleave(lengths),
        topk=torch.cat(tops),
        **{
            k: torch.cat(
                [
                    (x := torch.as_tensor(r.fields[k])).expand(len(p), *x.shape[1:])
                    for r, p in zip(everything, parts, strict=True)
                ]
            )
            for k in everything[0].fields
        },
    )
    gaps = {}
    for name in names:
        stabilizer = bind(name, **{"spo_scaled": {"alpha": 0.5}}.get(name, {}))
        trainer.stabilizer, trainer.stats = stabilizer, None
        step = trainer.step(micro)
        S, active, _ = stabilizer.surrogate(b, **stabilizer.stats([b]))
        S = S - kl_coef * KL["k2"](b.logp, b.logp_ref)
        loss = -mean(*AGGREGATIONS[aggregation](S, b))
        inputs = [p for p in plain.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        norm = torch.cat([g.flatten() for g in grads if g is not None]).double().norm()
        gaps[name] = (
            abs(step.loss - loss.item()),
            abs(step.grad_norm - norm.item()) / max(norm.item(), 1e-3),
            torch.equal(torch.cat(step.actives), active.expand(b.mask.shape) & b.mask),
            loss.item(),
        )
    return gaps
