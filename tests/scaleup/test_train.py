"""A training step in Megatron-Core: whose loss it calls, the same in every layout and in the simulator."""

from dataclasses import replace

import pytest
import torch

from scaleup import tiny
from scaleup.launch import Ranks

LAYOUTS = {
    "DP2": {},
    "EP2": {"ep": 2},
    "TP2 SP": {"tp": 2},
    "TP2 SP EP2": {"tp": 2, "ep": 2},
    "PP2": {"pp": 2},
}
STEPS = 3


@pytest.fixture(scope="module")
def one():
    """One process with Megatron in it."""
    with Ranks(1, timeout=300) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    """Two processes that share a model."""
    with Ranks(2, timeout=300) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny mixture of experts."""
    return tiny.write(tmp_path_factory.mktemp("tiny"), "qwen3_moe", seed=1)


def start(folder, layout, name="sat", arguments=(), build=(), **settings):
    """A trainer on this rank."""
    from scaleup import model, weights
    from scaleup.train import Settings, Trainer
    from simlab.stabilizers import bind

    layout = model.Layout(**layout)
    model.start(layout)
    built = model.build(model.read_config(folder), layout, **dict(build))
    weights.load(built, weights.read(folder))
    return Trainer(built, bind(name, **dict(arguments)), Settings(**{"lr": 1e-4} | settings))


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


def run(folder, layout, steps=STEPS, **settings):
    """What every step returned, as plain numbers."""
    trainer = start(folder, layout, **settings)
    micro = trainer.collate(some_responses(trainer))
    if settings.get("quantile") == "pre_step":
        trainer.before(micro)
    rows = []
    for _ in range(steps):
        x = trainer.step(micro)
        numbers = {"loss": x.loss, "norm": x.grad_norm, "active": x.active, "tokens": x.tokens}
        shown = {k: v for k, v in x.diagnostics.items() if k != "screened"}
        rows.append(numbers | shown | {k: float(v) for k, v in x.stats.items()})
    return rows


def gap(a, b):
    """Largest difference of two runs over all numbers of all steps."""
    assert [x.keys() for x in a] == [x.keys() for x in b]
    return max(abs(x[k] - y[k]) / max(1, abs(x[k])) for x, y in zip(a, b, strict=True) for k in x)


@pytest.fixture(scope="module")
def alone(one, folder):
    """Three Adam steps of SAT on one rank, with a KL term."""
    return one(run, folder, {}, 3)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(two, folder, alone, layout):
    """Loss, gradient norm, quantile and every diagnostic of three Adam steps equal those of one rank."""
    first, second = two(run, folder, LAYOUTS[layout])
    assert first == second  # every rank reports the whole batch
    worst = gap(alone, first)
    print(layout, f"{worst:.1e}", [(x["loss"], x["norm"], x["q"]) for x in first])
    assert worst < 1e-5
    assert len({round(x["loss"], 3) for x in alone}) == STEPS  # the steps do something
    assert all(0 < x["active"] < x["tokens"] for x in alone)
    assert all(x["gate_rate"] > 0 for x in alone)


def bf16(folder):
    """Three steps with bf16 weights, float32 main weights and gradients."""
    return run(folder, {}, build=(("dtype", torch.bfloat16),))


def test_bf16(one, two, folder, alone):
    """bf16 starts near float32 (its small steps are then rounded), and is alike on two ranks."""
    (a,), (b, _) = one(bf16, folder), two(bf16, folder)
    print(
        "bf16", *((x["loss"], x["norm"], y["loss"], y["norm"]) for x, y in zip(a, b, strict=True))
    )
    assert a[0]["loss"] == pytest.approx(alone[0]["loss"], abs=1e-2)
    assert a[0]["norm"] == pytest.approx(alone[0]["norm"], rel=2e-2)
    assert a[2]["loss"] < a[1]["loss"] < a[0]["loss"]
    for x, y in zip(a, b, strict=True):
        assert x["loss"] == pytest.approx(y["loss"], abs=2e-3)


def spied(folder):
    """Calls of the registry's function in one step: how many, and whether Megatron's schedule called."""
    import sys

    from simlab.stabilizers import STABILIZERS

    trainer = start(folder, {})
    micro = trainer.collate(some_responses(trainer))
    wanted, calls = STABILIZERS["sat"].surrogate.__code__, []

    def spy(frame, event, _):
        if event == "call" and frame.f_code is wanted:
            above = frame
            names = set()
            while above := above.f_back:
                names.add((above.f_globals["__name__"], above.f_code.co_name))
            calls.append(("megatron.core.pipeline_parallel.schedules", "forward_step") in names)

    sys.setprofile(spy)
    try:
        trainer.step(micro)
    finally:
        sys.setprofile(None)
    return calls, trainer.stabilizer.surrogate.func is STABILIZERS["sat"].surrogate


def test_the_registry_s_function_is_called(one, folder):
    """In Megatron's closure runs the function object of the registry, once for each micro-batch."""
    ((calls, same),) = one(spied, folder)
    assert same
    assert calls == [True, True]


def simulated(folder, names, aggregation, kl_coef):
    """Gaps between Megatron's step and the simulator's loss call on plain log-probs."""
    from scaleup import model, weights
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

    plain = model.build(model.read_config(folder), model.Layout())  # no DDP, one response at a time
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

        stats = stabilizer.stats([b])
        S, active, _ = stabilizer.surrogate(b, **stats)
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


@pytest.mark.parametrize(
    ("aggregation", "kl_coef"), [("token_mean", 0.0), ("seq_mean_token_mean", 0.01)]
)
def test_the_simulator_s_loss(one, folder, aggregation, kl_coef):
    """Every method: the simulator's loss call on plain log-probs gives the loss of Megatron's closure
    to 1e-6, the same active tokens, and the same gradient norm."""
    from simlab.stabilizers import NAMES

    (found,) = one(simulated, folder, NAMES, aggregation, kl_coef)
    print(len(found), max(x[0] for x in found.values()), max(x[1] for x in found.values()))
    assert len(found) >= len(NAMES) - 2
    for name, (loss, norm, active, value) in found.items():
        rounding = 1e-5 if name == "vcpo" else 1e-6  # a product of ratios over the response
        assert loss < rounding * max(1, abs(value)), name
        assert norm < 1e-5, name
        assert active, name
    assert len({round(x[3], 6) for x in found.values()}) > 10  # the methods differ on this batch


def test_a_local_quantile_depends_on_the_cut(one, two, folder, alone):
    """A quantile of each micro-batch gives another loss, and another one again on two ranks."""
    (local,) = one(run_local, folder)
    split, _ = two(run_local, folder)
    exact = alone[0]
    print("loss, norm", *((x["loss"], x["norm"]) for x in (exact, local, split)))
    for a, b in ((local, exact), (split, exact), (local, split)):
        assert abs(a["loss"] - b["loss"]) > 1e-4  # layouts agree to 1e-5


def run_local(folder):
    """First step under `local`."""
    return run(folder, {}, 1, quantile="local")[0]


def run_choices(folder):
    """q of three steps under every choice that is exact."""
    return {
        quantile: run(folder, {}, STEPS, quantile=quantile)
        for quantile in ("each_step", "pre_step", "ema")
    }


def test_choices_of_the_quantile(one, two, folder):
    """pre_step keeps the first q, ema follows at a tenth, and both are exact over two ranks."""
    (found,) = one(run_choices, folder)
    split, _ = two(run_choices, folder)
    q = {name: [x["q"] for x in rows] for name, rows in found.items()}
    assert q["pre_step"] == [q["each_step"][0]] * STEPS
    assert q["ema"][:2] == pytest.approx([q["each_step"][0]] * 2, rel=1e-5)
    assert q["ema"][2] == pytest.approx(0.9 * q["each_step"][0] + 0.1 * q["each_step"][1], rel=1e-4)
    assert abs(q["each_step"][1] - q["each_step"][0]) > 0.02
    for name in q:
        assert gap(found[name], split[name]) < 1e-5


def edge_cases(folder):
    """Steps that must not go wrong, on however many ranks."""
    from scaleup import weights

    out = {}
    trainer = start(folder, {}, grad_clip=0.5, quantile="each_step")
    rows = some_responses(trainer)
    few = trainer.collate([rows[0][:1] if trainer.dp_rank == 0 else [], []])
    x = trainer.step(few)
    out["empty micro-batches"] = x.loss, x.grad_norm, x.tokens

    trainer = start(folder, {})
    nothing = [replace(r, mask=torch.zeros_like(r.mask)) for r in rows[0]]
    before = weights.checksum(weights.export(trainer.model))
    x = trainer.step(trainer.collate([nothing, []]))
    out["nothing to learn"] = x.loss, x.grad_norm, x.tokens
    out["nothing moved"] = weights.checksum(weights.export(trainer.model)) == before

    bad = [replace(r, advantage=torch.full_like(r.logp_mu, 3e38)) for r in rows[0]]
    x = trainer.step(trainer.collate([bad]))
    out["overflow"] = x.updated, weights.checksum(weights.export(trainer.model)) == before

    screened = replace(rows[0][0], logp_mu=rows[0][0].logp_mu * torch.nan)
    x = trainer.step(trainer.collate([[screened, *rows[0][1:]]]))
    out["screened"] = x.diagnostics["screened"], x.updated
    return out


def test_edge_cases(one, two, folder):
    """Empty micro-batches and masks, gradients that overflow, numbers that are not finite."""
    (a,), (b, c) = one(edge_cases, folder), two(edge_cases, folder)
    for x in (a, b, c):
        assert x["empty micro-batches"] == pytest.approx(a["empty micro-batches"], rel=1e-5)
        assert x["nothing to learn"] == (0.0, 0.0, 0)
        assert x["nothing moved"]
        assert x["overflow"] == (False, True)
        assert x["screened"][0] > 0
        assert x["screened"][1]


def clipped(folder):
    """The first step's change of the weights, by limit of the norm: Adam with an eps that dominates."""
    from scaleup import weights

    sizes = {}
    for limit in (1e9, 0.5):
        trainer = start(folder, {}, grad_clip=limit, eps=1e3, lr=1.0)
        first = dict(weights.export(trainer.model))
        x = trainer.step(trainer.collate(some_responses(trainer)))
        change = [(y - first[name]).flatten() for name, y in weights.export(trainer.model)]
        sizes[limit] = x.grad_norm, torch.cat(change).norm().item()
    return sizes


def test_clipping(two, folder):
    """The gradient is scaled down to the limit; the norm that is reported is the one before."""
    sizes, _ = two(clipped, folder)
    (norm, free), (same, held) = sizes[1e9], sizes[0.5]
    assert norm == pytest.approx(same)
    assert norm > 1
    assert held / free == pytest.approx(0.5 / norm, rel=1e-3)


def wrong(folder):
    """One-sentence errors, by what was wrong."""
    from scaleup.responses import Response, collate
    from scaleup.train import Settings

    out = {}

    def attempt(name, call):
        try:
            call()
        except ValueError as error:
            out[name] = str(error)

    trainer = start(folder, {}, quantile="pre_step")
    rows = some_responses(trainer)
    attempt("pre_step", lambda: trainer.step(trainer.collate(rows)))
    attempt("quantile", lambda: Settings(quantile="global"))
    attempt("kl", lambda: Settings(kl="k4"))
    attempt("clip", lambda: Settings(grad_clip=0.0))
    short = Response(torch.arange(5), 2, torch.zeros(2), 1.0)
    attempt("short", lambda: collate([short]))
    attempt("lack", lambda: collate([replace(rows[0][0], fields={}), rows[0][1]]))
    attempt("dense", lambda: start(folder, {}, replay="r3"))
    return out


def test_errors(one, folder):
    """What cannot be done is refused in one sentence that names it."""
    (found,) = one(wrong, folder)
    parts = {
        "pre_step": "before(micro_batches)",
        "quantile": "'global'",
        "kl": "'k4'",
        "clip": "grad_clip",
        "short": "got 2",
        "lack": "logp_ref",
        "dense": "moe_enable_routing_replay",
    }
    assert found.keys() == parts.keys()
    for name, part in parts.items():
        assert part in found[name]
