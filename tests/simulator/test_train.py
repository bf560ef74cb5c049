"""The batched loop against a plain one-seed loop, lanes, lag and the null run."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from simlab.core.advantages import ADVANTAGES
from simlab.core.tokens import Diagnostic, Surrogate
from simlab.simulator import train as loop
from simlab.simulator.config import Config, WorldSpec
from simlab.simulator.experiments import EXPERIMENTS
from simlab.simulator.noise import Noise
from simlab.simulator.rng import SAMPLE, Generators
from simlab.simulator.train import train
from simlab.stabilizers import STABILIZERS, ppo
from simlab.study.settings import RunError, Training
from simlab.study.specs import regime

SMALL = WorldSpec(prompts=3, horizon=5, vocab=4, answers=4)
QUIET = ("gaussian:scale=0.05",)


def cells(**settings):
    base = {
        "world": SMALL,
        "training": Training(steps=12, log_every=4),
        "seeds": 3,
        "lags": ("2",),
        "noise": QUIET,
    }
    base |= {"healthy_lag": settings.get("lags", base["lags"])[0]}  # no run at another lag
    return Config(**(base | settings)).cells()


def by_seed(rows, seed):
    return [row for row in rows if row["seed"] == seed]


@pytest.mark.parametrize("policy", ["tabular", "linear", "moe"])
@pytest.mark.parametrize("method", ["ppo", "sat", "gspo"])
def test_a_lane_does_not_depend_on_its_neighbours(policy, method):
    """Seed 1 alone and seed 1 among three give the same rows (float32 matmul aside)."""
    world = SMALL.model_copy(update={"policy": policy})
    (three,) = cells(methods=(method, "ppo@1"), reference=method, world=world)[:1]
    alone = by_seed(train(three.__class__(**{**vars(three), "seeds": (1,)})), 1)
    for row, other in zip(by_seed(train(three), 1), alone, strict=True):
        for name in ("J", "loss", "tv_sum", "cut", "d_bar", "reward"):
            assert row[name] == pytest.approx(other[name], abs=2e-4), name


@pytest.mark.parametrize("lag", ["3", "fully_async:max_age=3"])
def test_c086_no_batch_is_served_twice(lag):
    """Eight steps at an age of up to 3, warm-up included: eight batches, though old weights sampled them."""
    (cell,) = cells(lags=(lag,), methods=("ppo",), training=Training(steps=7, log_every=1))
    served, ages = [], []

    def log(step, b, answers, *_):
        served.append(answers.slot.flatten().tolist())
        ages.append(int(b.age.max()))

    train(cell, log)
    assert len({tuple(x) for x in served}) == len(served) == 8
    assert ages[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["J", "loss", "seed", "commit"])
def test_a_diagnostic_never_replaces_a_logged_number(monkeypatch, name):
    """Not even one that a method shows only on some batches: the run ends in a sentence."""

    def sneaky(b):
        out = ppo.surrogate(b)
        shown = {name: Diagnostic(b.logp, "mean")} if b.logp.shape == (3, 60) else {}
        return Surrogate(out.S, out.active, out.diagnostics | shown)

    monkeypatch.setitem(STABILIZERS, "sneaky", SimpleNamespace(surrogate=sneaky))
    (cell,) = cells(methods=("sneaky",), reference="sneaky")
    with pytest.raises(RunError, match=f"sneaky: its diagnostic {name} has the name of a column"):
        train(cell)


def test_rerun_is_identical():
    """The same cell twice, to the last bit."""
    (cell,) = cells(methods=("sat",), reference="sat")
    assert train(cell) == train(cell)


@pytest.mark.parametrize(
    "lag",
    ["0", "1", "3", "interval:n=3,in_flight=0", "interval:n=2,in_flight=2"]
    + [f"fully_async:max_age={age},updates={u}" for age, u in [(0, 0), (3, 0), (3, 2), (5, 5)]],
)
def test_measured_age_is_the_declared_one(lag):
    """The age of every token is that of its position; ages reach largest_age and never pass it."""
    how, rules, ages = Training(steps=24, log_every=1), regime(lag), []
    (cell,) = cells(methods=("ppo",), lags=(lag,), training=how)
    rows = train(cell, lambda step, b, *_: ages.append(b.age))
    assert max(int(age.max()) for age in ages) == rules.largest_age
    for step, age in enumerate(ages):
        expected = torch.tensor([step - v for v in rules.versions(step, SMALL.horizon)])
        per_answer = age.view(3, SMALL.prompts * SMALL.answers, SMALL.horizon)
        assert torch.equal(per_answer, expected.expand(per_answer.shape))
        assert rows[3 * step]["age"] == pytest.approx(float(expected.double().mean()))


@pytest.mark.parametrize("lag", ["3", "fully_async:max_age=3,updates=2", "fully_async:max_age=4"])
def test_every_position_is_of_its_version(monkeypatch, lag):
    """Tokens drawn, log mu, log pi of the rollout and both tables, one token at a time."""
    mus, seen, real = {}, [], loop.behaviour
    (cell,) = cells(methods=("ppo",), lags=(lag,), training=Training(steps=9, log_every=1, lr=1.0))

    def behaviour(*given):
        step = given[-1].generators[0].bit_generator.seed_seq.entropy[-1]
        return mus.setdefault(step, real(*given))

    monkeypatch.setattr(loop, "behaviour", behaviour)
    train(cell, lambda *given: seen.append(given))
    uniforms, (P, G, T, V) = Generators(cell.seeds, SAMPLE, 0), (3, 4, 5, 4)
    pis = [logp for _, _, _, logp, _ in seen]
    mixed = 0
    for step, b, answers, _, logp_rollout in seen:
        u = uniforms.uniform(P, G, T)
        versions = regime(lag).versions(step, T)
        mixed += len(set(versions)) > 1
        for t, v in enumerate(versions):
            assert torch.equal(logp_rollout[:, :, t], pis[v][:, :, t])
            for lane, seed in enumerate(cell.seeds):
                mu, pi = (x[v][lane].reshape(-1) for x in (mus, pis))
                for answer in range(P * G):
                    slot = int(answers.slot[lane, answer * T + t])
                    state, token = divmod(slot, V)
                    assert b.logp_mu[lane, answer * T + t] == mu[slot], (step, t, seed)
                    assert b.logp_prox[lane, answer * T + t] == pi[slot]
                    mass = mu.view(-1, V)[state].double().exp()
                    drawn = u[lane, answer // G, answer % G, t] * mass.sum()
                    assert mass[:token].sum() - 1e-9 <= drawn <= mass[: token + 1].sum() + 1e-9
    assert (mixed > 0) == lag.startswith("fully_async")


@pytest.mark.parametrize("method", ["sat", "decoupled:proximal=ewma"])
def test_a_queue_of_length_zero_is_synchronous(method):
    """fully_async:max_age=0 gives the very rows of sync."""
    rows = [
        train(cells(methods=(method,), reference=method, lags=(lag,))[0])
        for lag in ("sync", "fully_async:max_age=0", "fully_async:max_age=2")
    ]
    assert rows[0] == rows[1] != rows[2]


def test_the_version_of_a_token_is_the_weights_that_sampled_it():
    """At lag 0 the policy part of d is exactly 0; at a lag it grows with age; noise stays apart."""
    how = Training(steps=8, log_every=1)
    rows = train(cells(methods=("ppo",), lags=("0",), training=how)[0])
    assert all(row["d_policy"] == 0 for row in rows)
    assert all(row["d_engine"] > 0 for row in rows)
    rows = train(cells(methods=("ppo",), lags=("4",), noise=(), training=how)[0])
    assert all(row["d_engine"] < 1e-6 for row in rows)
    for row in rows:
        assert (row["d_policy"] > 0) == (row["age"] > 0)


def test_null_run_does_not_move():
    """lr = 0: J is constant per seed, and what is cut is cut by noise alone."""
    how = Training(lr=0.0, steps=20, log_every=5)
    loud = ("gaussian:scale=0.3",)
    rows = train(cells(methods=("ppo",), noise=loud, training=how)[0])
    for seed in range(3):
        assert len({row["J"] for row in by_seed(rows, seed)}) == 1
    assert all(row["d_policy"] == 0 for row in rows)
    assert np.mean([row["cut"] for row in rows]) > 0.05


def test_learning_improves_the_exact_reward():
    """A hundred synchronous PPO steps raise J on every seed."""
    how = Training(steps=100, log_every=50)
    rows = train(cells(methods=("ppo",), lags=("0",), world=WorldSpec(), training=how)[0])
    for seed in range(3):
        J = [row["J"] for row in by_seed(rows, seed)]
        assert J[-1] > J[0] + 0.3


def test_paired_streams():
    """Methods share worlds, first weights and draws; @1 shares worlds and weights only."""
    found = {c.arm.label: train(c) for c in cells(methods=("ppo", "none", "ppo@1"), draws=2)}
    last = {label: by_seed(rows, 0)[-1] for label, rows in found.items()}
    assert len({row["J"] for row in last.values()}) == 3
    first = {label: by_seed(rows, 0)[0] for label, rows in found.items()}
    (far,) = cells(methods=("ppo",), lags=("5",))
    assert by_seed(train(far), 0)[0] == first["ppo"]
    assert first["ppo"]["J"] == first["none"]["J"] == first["ppo@1"]["J"]
    assert first["ppo"]["reward"] == first["none"]["reward"]
    assert first["ppo"]["d_bar"] != first["ppo@1"]["d_bar"]


def test_gradient_clip_and_a_lane_that_blows_up():
    """A lane with a non-finite gradient stands still and is counted; the others go on."""
    from simlab.simulator.optimizer import clip_gradients

    w = {"a": torch.zeros(3, 2, requires_grad=True), "b": torch.zeros(3, 1, 1, requires_grad=True)}
    w["a"].grad = torch.tensor([[3.0, 0.0], [0.3, 0.0], [float("inf"), 0.0]])
    w["b"].grad = torch.tensor([4.0, 0.4, 1.0]).view(3, 1, 1)
    norm, finite = clip_gradients(w, 1.0)
    assert norm.tolist() == pytest.approx([5.0, 0.5, float("inf")])
    assert finite.tolist() == [True, True, False]
    assert w["a"].grad[:, 0].tolist() == pytest.approx([0.6, 0.3, 0.0])
    assert w["b"].grad.flatten().tolist() == pytest.approx([0.8, 0.4, 0.0])


def test_a_layer_is_clipped_at_a_multiple_of_its_own_mean():
    """Norms 1, 1, 1, 10 at alpha 2: R is 3.25 and the factor 0.65; each lane and layer by itself, and a
    norm that is not finite counts in no mean."""
    from simlab.simulator.optimizer import LayerClip

    clip, lanes = LayerClip(2.0), torch.tensor([1.0, 0.5])
    w = {name: torch.zeros(2, 2, requires_grad=True) for name in "ab"}
    for size in (1.0, 1.0, float("inf"), 1.0, 10.0):
        w["a"].grad = torch.stack([lanes * size, torch.zeros(2)], 1)
        w["b"].grad = torch.ones(2, 2)
        clip(w)
        assert (w["b"].grad == 1).all()
        want = 6.5 if size == 10 else size
        assert w["a"].grad[:, 0].tolist() == pytest.approx([want, want / 2])
    w["a"].grad = torch.zeros(2, 2)
    clip(w)
    assert (w["a"].grad == 0).all()
    (cell,), (clipped,) = (
        cells(methods=("ppo",), lags=("8",), training=Training(steps=6, layer_clip=x))
        for x in (float("inf"), 1.01)
    )
    assert train(cell)[-1]["J"] != train(clipped)[-1]["J"]


@pytest.mark.slow
def test_logged_steps_see_every_age():
    """The default log_every does not alias with the lags of any experiment."""
    for experiment in EXPERIMENTS.values():
        config = Config(**experiment.SETTINGS)
        for lag in map(regime, config.lags):
            steps = range(0, config.training.steps + 1, config.training.log_every)
            ages = [k - lag.version(k) for k in steps if k >= 2 * (lag.largest_age + 1)]
            every = {k - lag.version(k) for k in range(2 * (lag.largest_age + 1), 2000)}
            missed = every - set(ages)
            assert len(missed) <= len(every) / 2, (experiment.__name__, lag)
            assert abs(np.mean(ages) - np.mean(list(every))) < 0.05 * np.mean(list(every)) + 0.2


@pytest.mark.parametrize(
    "aggregation",
    ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"],
)
def test_every_aggregation_trains(aggregation):
    """With equal lengths the means coincide and the plain sum is T times them."""
    how = Training(steps=1, log_every=1, aggregation=aggregation)
    loss = train(cells(methods=("none",), reference="none", training=how)[0])[0]["loss"]
    how = Training(steps=1, log_every=1)
    reference = train(cells(methods=("none",), reference="none", training=how)[0])[0]["loss"]
    scale = 5 if aggregation == "seq_mean_token_sum" else 1
    assert loss == pytest.approx(scale * reference, rel=1e-4, abs=1e-7)


# ---------------------------------------------------------------- what methods ask of the loop
def last(name, *, method="decoupled", lags=("2",), steps=12, **how):
    """A logged number at the last step, per seed."""
    training = Training(**({"steps": steps, "log_every": 4} | how))
    (cell,) = cells(methods=(method,), reference=method, lags=lags, training=training)
    rows = train(cell)
    return [row[name] for row in rows if row["step"] == steps]


def test_every_proximal_policy_is_another_one():
    """rollout, step and ewma give three runs; an arm's own argument is the training setting."""
    tight = "eps_low=0.01,eps_high=0.01"
    ways = ("rollout", "step", "ewma")
    runs = {how: last("J", method=f"decoupled:{tight}", proximal=how) for how in ways}
    assert len({tuple(x) for x in runs.values()}) == 3
    for how, run in runs.items():
        assert last("J", method=f"decoupled:{tight},proximal={how}") == run
        written_out = f"decoupled:{tight},proximal=batch"  # the default: what the training hands in
        assert last("J", method=written_out, proximal=how) == run


def test_the_proximal_policy_of_step_is_the_current_one():
    """At `step` pi/prox is 1: nothing is ever clipped, and a band on k is a band on pi/mu."""
    assert last("cut", method="decoupled:proximal=step,eps_low=0,eps_high=0") == [0.0] * 3
    assert max(last("cut", method="decoupled:proximal=rollout,eps_low=0,eps_high=0")) > 0


def test_noise_without_numbers_ends_the_run():
    """Engine log-probs that are NaN are a sentence, not a run of skipped steps."""
    noise = (Noise("student_t", {"df": 1e-9}),)
    (cell,) = cells(methods=("ppo",), lags=("1",), training=Training(steps=2))
    with pytest.raises(RunError, match="noise student_t: the engine's log-probs are not numbers"):
        train(replace(cell, noise=noise))


def test_a_kl_term_holds_the_policy_near_the_first_one():
    """A large coefficient ends nearer to the reward of the first policy; 0 is no term at all."""
    start = last("J", steps=1, lr=0.0)
    slow = {"steps": 60, "lr": 0.2}
    free, held = (np.array(last("J", kl_coef=c, kl="k2", **slow)) for c in (0.0, 3.0))
    assert np.abs(held - start).mean() < 0.5 * np.abs(free - start).mean()
    assert list(free) == last("J", kl="k1", **slow)


def test_the_learning_rate_follows_the_ess():
    """VCPO's factor below 1 moves the policy less than the same loss at the full rate."""
    full, scaled = (
        np.array(last("d_policy", method=f"vcpo:base={base}", lags=("8",), steps=7, lr=0.5))
        for base in (1e-6, 1.0)
    )
    assert (scaled < full).all()


@pytest.mark.parametrize("how", ADVANTAGES)
def test_every_advantage_trains(how):
    """Each is another run, and finite."""
    J = last("J", advantage=how, method="ppo")
    assert np.isfinite(J).all()
    assert (J != last("J", method="ppo")) == (how != "grpo")


def test_a_random_gate_draws_from_its_own_stream():
    """Same cell, same numbers; another stream, others; and the other arms' draws are not touched."""
    assert last("gate_rate", method="sat_open:gate=random") == last(
        "gate_rate", method="sat_open:gate=random"
    )
    rates = last("gate_rate", method="sat_open:gate=random,rate=0.3")
    assert all(0.1 < x < 0.5 for x in rates)
    never = last("J", method="sat_open:gate=random,rate=0")
    assert never == last("J", method="ppo")


@pytest.mark.parametrize(
    "method",
    ["estr", "estr:scale=gini", "estr:source=trainer", "estr:source=head", "oracle", "dppo:divergence=topk_kl", "centering", "centering:mode=band,columns=3,placebo=true", "sat_open:gate=stratum", "sat:ema=0.9",
     "decoupled:proximal=loglinear", "sat_open:gate=age,threshold=2"],
)  # fmt: skip
def test_methods_that_see_more_run(method):
    """Entropy, Gini, total variation, top-k, position, age and a smoothed quantile are supplied."""
    assert np.isfinite(last("J", method=method)).all()
