"""Measurements on real trainers, for tests/scaleup and `scaleup.engines_report`: one copy of each.

All run on a rank (`scaleup.launch.Ranks`) and return plain numbers. `folder` is a checkpoint of
`scaleup.tiny`, `layout` the fields of `scaleup.model.Layout`, `build` those of TransformerConfig.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from scaleup import weights

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
    from scaleup import model
    from scaleup.train import Settings, Trainer
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
    from scaleup.responses import Response, share

    draw = torch.Generator().manual_seed(3)
    rows = []
    for i in range(n):
        tokens = torch.randint(512, (7 + i,), generator=draw)
        mask = torch.ones(4 + i, dtype=torch.bool)
        mask[1] = i % 3 > 0
        gap = noise * torch.randn(4 + i, generator=draw)
        advantage = round(float(torch.randn((), generator=draw)), 3)
        rows.append(Response(tokens, 3, gap, advantage, mask, fields={"logp_ref": gap - 5.0}))
    micro = trainer.collate([rows])
    trainer.before(micro)
    logp = trainer._from_last_stage(micro[0].logp)
    parts = logp.split([len(r.logp_mu) for r in rows])
    rows = [
        replace(r, logp_mu=(r.logp_mu + p).round(decimals=3))
        for r, p in zip(rows, parts, strict=True)
    ]
    trainer.stats = None
    return share(rows, 2)[trainer.dp_rank]


def routed_responses(trainer, n=8):
    """Responses of one length (a wrong micro-batch's experts would fit) with random sets of experts."""
    from scaleup.responses import Response, share

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
    found = []
    for _ in range(steps):
        x = trainer.step(micro)
        numbers = {"loss": x.loss, "norm": x.grad_norm, "active": x.active, "tokens": x.tokens}
        shown = {k: v for k, v in x.diagnostics.items() if k != "screened"}
        found.append(numbers | shown | {k: float(v) for k, v in x.stats.items()})
    return found


def run(folder, layout, steps=STEPS, rows=some_responses, broken=False, **settings) -> list[dict]:
    """Steps of a new trainer. `broken` leaves the action of a routing replay at forward."""
    from scaleup import replay

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
    from scaleup import model
    from simlab.aggregate import AGGREGATIONS, mean
    from simlab.kl import KL
    from simlab.stabilizers import bind, needs
    from simlab.tokens import TokenBatch

    trainer = start(folder, {}, lr=0.0, aggregation=aggregation, kl_coef=kl_coef)
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
            }
            rows[i] = replace(r, fields=r.fields | more)
    micro = trainer.collate(shared)

    # no DDP, one response at a time
    plain = model.build(weights.read_config(folder), model.Layout())
    weights.load(plain, weights.read(folder))
    everything = [r for rows in shared for r in rows]
    parts = []
    for r in everything:
        logits = plain(r.tokens[None], torch.arange(len(r.tokens))[None], None)[0]
        logp = logits[:-1].double().log_softmax(-1).gather(-1, r.tokens[1:, None])[:, 0]
        parts.append(logp[r.prompt - 1 :].float())
    lengths = torch.tensor([len(p) for p in parts])
    b = TokenBatch(
        logp=torch.cat(parts),
        logp_mu=torch.cat([r.logp_mu for r in everything]),
        advantage=torch.tensor([r.advantage for r in everything]).repeat_interleave(lengths),
        mask=torch.cat([r.mask for r in everything]),
        response=torch.arange(len(parts)).repeat_interleave(lengths),
        **{k: torch.cat([r.fields[k] for r in everything]) for k in everything[0].fields},
    )
    found = {}
    for name in names:
        stabilizer = bind(name, **{"spo_scaled": {"alpha": 0.5}}.get(name, {}))
        if set(needs(stabilizer)) & {"topk", "topk_mu"}:
            continue
        trainer.stabilizer, trainer.stats = stabilizer, None
        step = trainer.step(micro)
        S, active, _ = stabilizer.surrogate(b, **stabilizer.stats([b]))
        S = S - kl_coef * KL["k2"](b.logp, b.logp_ref)
        loss = -mean(*AGGREGATIONS[aggregation](S, b))
        inputs = [p for p in plain.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        norm = torch.cat([g.flatten() for g in grads if g is not None]).double().norm()
        found[name] = (
            abs(step.loss - loss.item()),
            abs(step.grad_norm - norm.item()) / max(norm.item(), 1e-3),
            torch.equal(torch.cat(step.actives), active.expand(b.mask.shape) & b.mask),
            loss.item(),
        )
    return found


# ---------------------------------------------------------------- routing replay
def routed(folder, layout, mode) -> tuple[list[bool], list[float]]:
    """On perturbed weights, by router and micro-batch: whether the sets used under replay are those
    given, and the share of tokens for which free routing would use others."""
    trainer = start(folder, layout, build=REPLAY, lr=0.0, replay=mode)
    micro = trainer.collate(routed_responses(trainer))
    if mode == "r2":
        trainer.before(micro)
    model = weights.unwrap(trainer.model)
    used = _watch(model)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=draw)
    trainer.step(micro) if mode == "r3" else trainer._schedule(micro, trainer._look, True)
    given = [route.long() for m in micro for route in m.routes]
    replayed = used[-len(given) :]
    trainer.settings = replace(trainer.settings, replay="none")
    trainer.step(micro)
    same, moved = [], []
    for route, x, y in zip(given, replayed, used[-len(given) :], strict=True):
        wanted = torch.zeros_like(x).scatter(1, route, True)
        same.append(bool((x == wanted).all()))
        moved.append((y != wanted).any(1).float().mean().item())
    return same, moved


def _watch(model) -> list[Tensor]:
    """Sets `[tokens, experts]` that routers use from here on, in the order in which they are called."""
    used = []
    for layer in model.decoder.layers:
        if router := getattr(layer.mlp, "router", None):
            router.register_forward_hook(lambda _, __, out: used.append(out[1].clone()))
    return used


def slope(folder) -> tuple[float, float, list[float]]:
    """Derivative of the loss along the routers' gradient: from the gradient, and by differences."""
    trainer = start(folder, {}, build=REPLAY, lr=0.0, replay="r3", name="pg")
    micro = trainer.collate(routed_responses(trainer))
    trainer.step(micro)
    model = weights.unwrap(trainer.model)
    routers = [layer.mlp.router.weight for layer in model.decoder.layers]
    grads = [w.main_grad.clone() for w in routers]
    size = torch.stack([g.norm() for g in grads]).norm()
    h, losses = 2e-2, []
    for move in (h, -2 * h):  # to one side, then to the other
        with torch.no_grad():
            for w, g in zip(routers, grads, strict=True):
                w += move * g / size
        losses.append(trainer.step(micro).loss)
    return size.item(), (losses[0] - losses[1]) / (2 * h), [g.norm().item() for g in grads]


def score(folder, samples, dtype=torch.float32, replay="none") -> tuple[Tensor, Tensor, Tensor]:
    """The trainer's log-probs `[N]` of all sampled tokens in a forward-only pass; at which of them its
    routers used other sets than the engine; the same for every token that was fed."""
    from scaleup.responses import Response

    moe = samples[0].experts is not None
    build = {"dtype": dtype} | (REPLAY if moe else {})
    trainer = start(folder, {}, name="none", replay=replay, build=build)
    used = _watch(weights.unwrap(trainer.model))
    rows = [
        Response(
            torch.tensor(s.prompt + s.output), len(s.prompt), s.logp_mu, 0.0, experts=s.experts
        )
        for s in samples
    ]
    (micro,) = micros = trainer.collate([rows])
    trainer.before(micros)
    other = torch.zeros(micro.target.shape[1], dtype=torch.bool)
    if moe:
        given = torch.cat([s.experts for s in samples]).long()
        other = ~torch.stack(used, 1).gather(-1, given).all(-1).all(-1)  # k of k
    return micro.logp, other[micro.at], other


# ---------------------------------------------------------------- checkpoints
BEFORE, AFTER = 2, 2  # steps up to the checkpoint, and past it
FROM = {"DP2": {}, "EP2": {"ep": 2}}
RESUMED = [
    ("DP2", 2, {}),
    ("DP2", 1, {}),
    ("DP2", 2, {"pp": 2}),
    ("DP2", 2, {"ep": 2}),
    ("EP2", 1, {}),
    ("EP2", 2, {"ep": 2}),
    ("EP2", 2, {"tp": 2, "ep": 2}),
]


def resumable(folder, layout):
    """A trainer whose checkpoint holds everything that one can hold, and its micro-batches."""
    trainer = start(folder, layout, lr=1e-3, quantile="ema", decay=0.5, weight_decay=0.1)
    return trainer, trainer.collate(routed_responses(trainer))


def save_and_go_on(folder, path: Path, layout) -> list[dict]:
    """The steps past the last of two checkpoints."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from scaleup import checkpoint

    trainer, micro = resumable(folder, layout)
    checkpoint.save(path, trainer)  # before any step: a state of zeros
    take(trainer, micro, BEFORE)
    checkpoint.save(path, trainer)
    filesystem_async._results_queue = None  # Megatron's helper would outlive a killed rank
    gc.collect()
    return take(trainer, micro, AFTER)


def resume(folder, path: Path, layout, one_counter=False) -> tuple[list[dict], str, int]:
    """The same steps from the last checkpoint, its name, the step reached.
    `one_counter` leaves all parameters one step counter of Adam, as Megatron does."""
    from scaleup import checkpoint

    trainer, micro = resumable(folder, layout)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()  # nothing is left of the first weights
    last = checkpoint.latest(path)
    checkpoint.load(last, trainer)
    if one_counter:
        for optimizer in checkpoint._optimizers(trainer):
            states = list(optimizer.optimizer.state.values())
            for held in states:
                held["step"] = states[0]["step"]
    return take(trainer, micro, AFTER), last.name, trainer.iteration
