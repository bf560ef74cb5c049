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

from simlab.across_steps import (
    active_share,
    beta_for,
    ewma_reset_where,
    ewma_start,
    ewma_step,
    scale_update,
)
from simlab.advantages import ADVANTAGES
from simlab.aggregate import AGGREGATIONS, mean
from simlab.batch_stats import reduce_diagnostics
from simlab.config import Cell, RunError, Training
from simlab.draws import GATE, NOISE, SAMPLE, Draws
from simlab.kl import KL
from simlab.measure import gradient_shares, measure
from simlab.noise import behaviour
from simlab.policies import POLICIES, log_normalise
from simlab.pretrain import pretrain
from simlab.sample import compose, cumulative, full_distribution, sample, token_batch
from simlab.specs import regime
from simlab.stabilizers import needs

RESET = 0.9  # "missing old logits": the EWMA of the weights starts anew below this active share


def train(cell: Cell, log: Callable | None = None) -> list[dict]:
    """Run one cell: a stabilizer at a lag, over a block of seeds. Rows, one per seed and logged step.

    `log(step, b, answers, logp, logp_rollout)` hears of every logged step, with the batch and the
    tables `[L, P, T, M, V]` of the trainer at the step's weights and at the rollout's; it changes nothing.
    """
    spec, arm, seeds, how = cell.world, cell.arm, cell.seeds, cell.training
    world, X, w = pretrain(spec, seeds)
    policy, shape, L = POLICIES[spec.policy], world.sizes, len(seeds)
    w = {name: x.clone().requires_grad_() for name, x in w.items()}
    lag, stabilizer = regime(cell.lag), arm.stabilizer
    wanted, proximal = needs(stabilizer), arm.proximal(how) or "rollout"
    aggregate = AGGREGATIONS[how.aggregation]
    if how.aggregation == "seq_mean_token_sum_norm":
        aggregate = partial(aggregate, horizon=spec.horizon)
    optimizer = _optimizer(how, w)
    uniforms, gates = (Draws(seeds, purpose, arm.stream) for purpose in (SAMPLE, GATE))
    length = torch.full((L, spec.prompts, spec.answers), spec.horizon)
    average, beta = ewma_start(w), beta_for(lag.largest_age)
    engine, stats, reference = {}, None, None
    rows, skipped = [], torch.zeros(L, dtype=torch.int64)

    def log_table(weights: dict[str, Tensor]) -> Tensor:
        return log_normalise(policy.logits(weights, X)).unflatten(1, shape[:-1])

    for step in range(how.steps + 1):
        logp = log_table(w)
        now = logp.detach()
        reference = now if reference is None else reference
        if lag.broadcast_now(step):
            with torch.no_grad():
                draws = Draws(seeds, NOISE, arm.stream, step)
                mu = behaviour(policy, w, X, shape, cell.noise, draws)
            if mu.isnan().any() and all(x.isfinite().all() for x in w.values()):
                names = ", ".join(noise.name for noise in cell.noise)
                raise RunError(f"noise {names}: the engine's log-probs are not numbers")
            engine[step] = mu, cumulative(mu), now
        engine = {v: tables for v, tables in engine.items() if v >= lag.version(step)}
        versions = lag.versions(step, spec.horizon)
        logp_mu, cdf, logp_rollout = compose(engine, versions)
        answers = sample(world, cdf, uniforms.uniform(spec.prompts, spec.answers, spec.horizon))
        tables = {"logp": logp, "logp_mu": logp_mu, "logp_prox": logp_rollout}
        if proximal != "rollout":
            tables["logp_prox"] = log_table(average.weights) if proximal == "ewma" else now
        if how.kl_coef:
            tables["logp_ref"] = reference
        extra = full_distribution(wanted, answers, now, logp_mu, spec.horizon)
        if "uniform" in wanted:
            extra["uniform"] = gates.uniform(answers.slot.shape[-1])
        advantage = ADVANTAGES[how.advantage](answers.reward, length)
        b = token_batch(answers, tables, advantage, [step - v for v in versions], **extra)

        stats = stabilizer.stats([b], previous=stats)
        S, active, diagnostics = stabilizer.surrogate(b, **stats)
        if how.kl_coef:
            S = S - how.kl_coef * KL[how.kl](b.logp, b.logp_ref)
        loss = -mean(*aggregate(S, b))
        optimizer.zero_grad()
        loss.sum().backward()
        norm, finite = _clip_gradients(w, how.grad_clip)
        skipped += ~finite

        if step % how.log_every == 0 or step == how.steps:
            if log is not None:
                log(step, b, answers, logp.detach(), logp_rollout)
            found = measure(world, b, answers, logp.detach(), logp_mu, logp_rollout)
            found |= gradient_shares(b, active) | reduce_diagnostics(b, diagnostics)
            found |= {"loss": loss, "grad_norm": norm, "skipped_steps": skipped.clone()}
            found["age"] = b.age.double().mean(-1)
            table = {name: x.detach().expand(L).tolist() for name, x in found.items()}
            for lane, seed in enumerate(seeds):
                rows.append({"seed": seed, "step": step} | {k: x[lane] for k, x in table.items()})
        if step < how.steps:
            before = {k: x.detach().clone() for k, x in w.items()} if "lr_factor" in stats else {}
            optimizer.step()
            if before:
                scale_update(before, w, stats["lr_factor"])
            if proximal == "ewma":
                average = ewma_step(average, w, beta)
                average = ewma_reset_where(average, w, active_share(b, active) < RESET)
    return rows


def _optimizer(how: Training, w: dict[str, Tensor]) -> torch.optim.Optimizer:
    if how.optimizer == "sgd":
        return torch.optim.SGD(list(w.values()), lr=how.lr, foreach=True)
    return torch.optim.Adam(list(w.values()), lr=how.lr, betas=(0.9, 0.98), foreach=True)


def _clip_gradients(w: dict[str, Tensor], limit: float) -> tuple[Tensor, Tensor]:
    """Gradient norm of each lane `[L]` and whether it is finite; where it is not, a lane's is 0."""
    grads = [x.grad for x in w.values()]
    norm = sum(g.flatten(1).square().sum(-1) for g in grads).sqrt()
    finite = torch.isfinite(norm)
    if limit == math.inf and finite.all():
        return norm, finite
    scale = (limit / norm.clamp(min=1e-12)).clamp(max=1)
    for g in grads:
        lane = (-1, *[1] * (g.dim() - 1))
        g.copy_(torch.where(finite.view(lane), g * scale.view(lane), 0.0))
    return norm, finite
