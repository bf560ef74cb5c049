"""The loop. Read this first: every step of a run, for all seeds of a cell at once.

table of log mu, v(k) steps old  ->  answers  ->  TokenBatch  ->  stabilizer  ->  (sum, count)
-> one optimizer step, and every `log_every` steps the exact numbers of exact.py.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from simlab.aggregate import AGGREGATIONS, mean
from simlab.batch_stats import flat_groups, mismatch, reduce_diagnostics
from simlab.config import Cell, Training
from simlab.draws import NOISE, SAMPLE, Draws
from simlab.exact import evaluate
from simlab.noise import behaviour
from simlab.policies import POLICIES, log_normalise
from simlab.pretrain import pretrain
from simlab.sample import Answers, cumulative, sample, token_batch
from simlab.specs import regime
from simlab.stabilizers import ppo
from simlab.tasks.world import World
from simlab.tokens import TokenBatch


def train(cell: Cell) -> list[dict]:
    """Run one cell: a stabilizer at a lag, over a block of seeds. Rows, one per seed and logged step."""
    spec, arm, seeds, how = cell.world, cell.arm, cell.seeds, cell.training
    world, X, w = pretrain(spec, seeds)
    policy, shape, L = POLICIES[spec.policy], world.sizes, len(seeds)
    w = {name: x.clone().requires_grad_() for name, x in w.items()}
    lag, stabilizer = regime(cell.lag), arm.stabilizer
    aggregate = AGGREGATIONS[how.aggregation]
    if how.aggregation == "seq_mean_token_sum_norm":
        aggregate = partial(aggregate, horizon=spec.horizon)
    optimizer = _optimizer(how, w)
    uniforms = Draws(seeds, SAMPLE, arm.stream)
    engine, rows, skipped = {}, [], torch.zeros(L, dtype=torch.int64)

    for step in range(how.steps + 1):
        logp = log_normalise(policy.logits(w, X)).unflatten(1, shape[:-1])
        if lag.broadcast_now(step):
            with torch.no_grad():
                draws = Draws(seeds, NOISE, arm.stream, step)
                mu = behaviour(policy, w, X, shape, cell.noise, draws)
            engine[step] = mu, cumulative(mu), logp.detach()
        version = lag.version(step)
        engine = {v: tables for v, tables in engine.items() if v >= version}
        logp_mu, cdf, logp_rollout = engine[version]
        answers = sample(world, cdf, uniforms.uniform(spec.prompts, spec.answers, spec.horizon))
        prox = logp_rollout if how.proximal == "rollout" else logp.detach()
        b = token_batch(answers, logp, logp_mu, prox, version)

        S, active, diagnostics = stabilizer(b)
        loss = -mean(*aggregate(S, b))
        optimizer.zero_grad()
        loss.sum().backward()
        norm, finite = _clip_gradients(w, how.grad_clip)
        skipped += ~finite

        if step % how.log_every == 0 or step == how.steps:
            found = measure(world, b, answers, logp.detach(), logp_mu, logp_rollout)
            found |= gradient_shares(b, active) | reduce_diagnostics(b, diagnostics)
            found |= {"loss": loss, "grad_norm": norm, "skipped_steps": skipped.clone()}
            found["age"] = step - b.version.double().mean(-1)
            table = {name: x.detach().expand(L).tolist() for name, x in found.items()}
            for lane, seed in enumerate(seeds):
                rows.append({"seed": seed, "step": step} | {k: x[lane] for k, x in table.items()})
        if step < how.steps:
            optimizer.step()
    return rows


def measure(
    world: World,
    b: TokenBatch,
    answers: Answers,
    logp: Tensor,
    logp_mu: Tensor,
    logp_rollout: Tensor,
) -> dict[str, Tensor]:
    """What is logged of a batch and its three tables `[L, P, T, M, V]`, whatever the method; all `[L]`.

    `d_policy` and `d_impl` are the exact two-term split of SAT (2) in mean absolute nats: current
    weights against the rollout's, and trainer against engine at the rollout's weights.
    `flat_groups` is the share of groups whose answers got one and the same reward.
    """
    same_weights = logp_rollout.flatten(1).gather(-1, answers.slot)
    return {
        **evaluate(world, logp, logp_mu),
        **mismatch(b),
        "d_policy": (b.logp.detach() - same_weights).abs().mean(-1),
        "d_impl": (same_weights - b.logp_mu).abs().mean(-1),
        "reward": answers.reward.mean((1, 2)),
        "flat_groups": flat_groups(answers.reward).double().mean(-1),
    }


def gradient_shares(b: TokenBatch, active: Tensor) -> dict[str, Tensor]:
    """Shares of active tokens: `cut` have an advantage and no gradient; `unlike_ppo` keep a gradient
    where PPO (.2/.2) cuts it or the other way round, i.e. where the method acts at all."""
    reference = ppo.surrogate(b).active
    n = b.mask.sum(-1).clamp(min=1)
    cut = b.mask & (b.advantage != 0) & ~active
    return {"cut": cut.sum(-1) / n, "unlike_ppo": (active != reference).sum(-1) / n}


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
