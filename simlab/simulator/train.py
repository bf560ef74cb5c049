"""The loop. Read this first: every step of a run, for all seeds of a cell at once.

tables of log mu, some steps old  ->  answers  ->  TokenBatch  ->  stabilizer  ->  (sum, count)
-> one optimizer step, and every `log_every` steps the exact numbers of exact.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from simlab.core.aggregate import AGGREGATIONS, mean, reduce_diagnostics
from simlab.core.columns import LOGGED
from simlab.core.kl import KL
from simlab.core.state import (
    active_share,
    beta_for,
    cosine,
    ewma_reset_where,
    ewma_start,
    ewma_step,
    scale_update,
)
from simlab.simulator.config import Cell
from simlab.simulator.noise import behaviour
from simlab.simulator.optimizer import LayerClip, clip_gradients, make_optimizer
from simlab.simulator.policies import POLICIES, log_normalise
from simlab.simulator.pretrain import pretrain
from simlab.simulator.record import record
from simlab.simulator.rng import GATE, NOISE, SAMPLE, Generators
from simlab.simulator.sample import (
    compose,
    cumulative,
    full_distribution,
    of_responses,
    sample,
    token_batch,
)
from simlab.stabilizers import needs
from simlab.study.settings import RunError
from simlab.study.specs import regime

RESET = 0.9  # "missing old logits": the EWMA of the weights starts anew below this active share


def train(cell: Cell, log: Callable | None = None) -> list[dict]:
    """Run one cell: a stabilizer at a lag, over a block of seeds. Rows, one per seed and logged step.

    `log(step, b, answers, logp, logp_rollout)` hears of every logged step, with the batch and the
    tables `[L, P, T, M, V]` of the trainer at the step's weights and at the rollout's; it changes nothing.
    """
    spec, arm, seeds, training = cell.world, cell.arm, cell.seeds, cell.training
    world, X, w = pretrain(spec, seeds)
    policy, shape, L = POLICIES[spec.policy], world.sizes, len(seeds)
    w = {name: x.clone().requires_grad_() for name, x in w.items()}
    lag, stabilizer = regime(cell.lag), arm.stabilizer
    wanted, proximal = needs(stabilizer), arm.proximal(training.proximal) or "rollout"
    aggregate = AGGREGATIONS[training.aggregation]
    if training.aggregation == "seq_mean_token_sum_norm":
        aggregate = partial(aggregate, horizon=spec.horizon)
    optimizer, to_advantages = make_optimizer(training, w), training.to_advantages
    uniforms, gates = (Generators(seeds, purpose, arm.stream) for purpose in (SAMPLE, GATE))
    clip_layers = LayerClip(training.layer_clip)
    length = torch.full((L, spec.prompts, spec.answers), spec.horizon)
    average, beta = ewma_start(w), beta_for(lag.largest_age)
    engine, stats, reference, gradient = {}, None, None, None
    rows, skipped = [], torch.zeros(L, dtype=torch.int64)

    def log_table(weights: dict[str, Tensor]) -> Tensor:
        return log_normalise(policy.logits(weights, X)).unflatten(1, shape[:-1])

    for step in range(training.steps + 1):
        logp = log_table(w)
        now = logp.detach()
        reference = now if reference is None else reference
        if lag.broadcast_now(step):
            with torch.no_grad():
                rng = Generators(seeds, NOISE, arm.stream, step)
                mu = behaviour(policy, w, X, shape, cell.noise, rng)
            if mu.isnan().any() and all(x.isfinite().all() for x in w.values()):
                names = ", ".join(noise.name for noise in cell.noise)
                raise RunError(f"noise {names}: the engine's log-probs are not numbers")
            engine[step] = mu, cumulative(mu), now
        engine = {v: tables for v, tables in engine.items() if v >= lag.version(step)}
        versions = lag.versions(step, spec.horizon)
        logp_mu, cdf, logp_rollout = compose(engine, versions)
        answers = sample(world, cdf, uniforms.uniform(spec.prompts, spec.answers, spec.horizon))
        averaged = log_table(average.weights) if proximal == "ewma" else None
        prox = {"rollout": logp_rollout, "step": now, "ewma": averaged, "mu": logp_mu}[proximal]
        tables = {"logp": logp, "logp_mu": logp_mu, "logp_prox": prox}
        tables |= {"logp_ref": reference} if training.kl_coef or "logp_ref" in wanted else {}
        extra = full_distribution(wanted, answers, tables, spec.horizon)
        extra |= of_responses(wanted, answers, spec.horizon)
        extra |= {"uniform": gates.uniform(answers.slot.shape[-1])} if "uniform" in wanted else {}
        advantage = to_advantages(answers.reward, length)
        b = token_batch(answers, tables, advantage, [step - v for v in versions], **extra)
        stats = stabilizer.stats([b], previous=stats)
        S, active, diagnostics = stabilizer.surrogate(b, **stats)
        if training.kl_coef:
            S = S - training.kl_coef * KL[training.kl](b.logp, b.logp_ref)
        loss = -mean(*aggregate(S, stabilizer.counted(b)))
        optimizer.zero_grad()
        loss.sum().backward()
        gradient, earlier = {k: x.grad.clone() for k, x in w.items()}, gradient  # pyright: ignore[reportOptionalMemberAccess]
        clip_layers(w)
        norm, finite = clip_gradients(w, training.grad_clip)
        skipped += ~finite

        if step % training.log_every == 0 or step == training.steps:
            if log is not None:
                log(step, b, answers, logp.detach(), logp_rollout)
            numbers = record(world, b, active, answers, logp.detach(), logp_mu, logp_rollout)
            if clash := diagnostics.keys() & (LOGGED | numbers.keys()):
                raise RunError(
                    f"{arm.label}: its diagnostic {min(clash)} has the name of a column that every "
                    f"run has; rename it in {arm.file or arm.name}"
                )
            numbers |= reduce_diagnostics(b, diagnostics)
            numbers |= {"loss": loss, "grad_norm": norm, "skipped_steps": skipped.clone()}
            table = {name: x.detach().expand(L).tolist() for name, x in numbers.items()}
            c = cosine(gradient, earlier).tolist()
            table["grad_cosine"] = [x if math.isfinite(x) else None for x in c]  # None: no number
            for lane, seed in enumerate(seeds):
                rows.append({"seed": seed, "step": step} | {k: x[lane] for k, x in table.items()})
        if step < training.steps:
            before = {k: x.detach().clone() for k, x in w.items()} if "lr_factor" in stats else {}
            optimizer.step()
            if before:
                scale_update(before, w, stats["lr_factor"])
            if proximal == "ewma":
                average = ewma_step(average, w, beta)
                average = ewma_reset_where(average, w, active_share(b, active) < RESET)
    return rows
