"""Tokens per second of whole training steps: all seeds at once against one seed at a time in Python.

The loop (loop.py) draws the same uniforms and noise as simlab.simulator.train and must reproduce its first
tokens, gradients and losses before anything is timed. Everything runs in one process on one thread,
in turns.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"

from dataclasses import replace

import numpy as np
import torch
from bench import Report, arguments, interleave, spread
from loop import LAG, SCALE, Lane

from simlab.core.advantages import group_advantage
from simlab.simulator.config import Cell, Config, WorldSpec
from simlab.simulator.noise import behaviour
from simlab.simulator.policies import POLICIES, log_normalise
from simlab.simulator.pretrain import pretrain
from simlab.simulator.rng import NOISE, SAMPLE, Generators
from simlab.simulator.sample import cumulative, sample, token_batch
from simlab.simulator.train import train
from simlab.study.settings import Training

NOISES = {
    "moe": ("grid", f"router:scale={SCALE}", f"gaussian:scale={SCALE}"),
    "tabular": ("grid", f"gaussian:scale={SCALE}"),
}
GOAL = {"moe": 30, "tabular": 150}


def cell(policy: str, steps: int, log_every: int) -> Cell:
    """PPO at lag 8 in the default world, 24 seeds."""
    how = Training(steps=steps, log_every=log_every)
    world = WorldSpec(policy=policy)
    return Config(
        world=world, training=how, methods=("ppo",), lags=(str(LAG),), noise=NOISES[policy]
    ).cells()[0]


def first_tables(c: Cell):
    """World, weights, features and the first log pi and log mu of simlab."""
    world, X, w = pretrain(c.world, c.seeds)
    w = {name: x.clone().requires_grad_() for name, x in w.items()}
    policy, shape = POLICIES[c.world.policy], world.sizes
    with torch.no_grad():
        log_mu = behaviour(policy, w, X, shape, c.noise, Generators(c.seeds, NOISE, 0, 0))
    return world, w, log_normalise(policy.logits(w, X)).unflatten(1, shape[:-1]), log_mu


def check(c: Cell) -> str:
    """Raises AssertionError unless loop and simlab agree: first gradients, then sixteen steps."""
    world, w, logp, log_mu = first_tables(c)
    P, T, _, V = world.sizes
    answers = sample(
        world, cumulative(log_mu), Generators(c.seeds, SAMPLE, 0).uniform(P, c.world.answers, T)
    )
    tables = {"logp": logp, "logp_mu": log_mu, "logp_prox": log_mu}
    b = token_batch(answers, tables, group_advantage(answers.reward), 0)
    S = c.arm.stabilizer(b).S
    (-S.mean(-1)).sum().backward()
    lanes, worst = [Lane(c, seed) for seed in c.seeds], 0.0
    for i, lane in enumerate(lanes):
        mine = log_mu[i].numpy().reshape(-1, V)
        slots, rewards = lane.bisect(lane.table(mine, "bisect"))
        assert slots == answers.slot[i].tolist(), "the loop drew other tokens"
        for gradient in (lane.gradient, lane.token_by_token)[: 1 + (i == 0)]:
            loss, grads = gradient(mine, slots, rewards)
            assert abs(loss + S[i].mean().item()) < 1e-6, "the loop has another loss"
            for name, x in w.items():
                size = x.grad[i].abs().max().item()
                worst = max(worst, np.abs(grads[name] - x.grad[i].numpy()).max() / size)
    assert worst < 1e-4, f"gradients differ by {worst} of their largest entry"
    how = replace(c, training=c.training.model_copy(update={"steps": 15, "log_every": 1}))
    names = ("loss", "grad_norm", "reward")
    theirs = {(row["seed"], row["step"]): [row[n] for n in names] for row in train(how)}
    own = {(s, k): row for s in c.seeds for k, row in enumerate(Lane(c, s).train(16))}
    gap = np.median([np.abs(np.subtract(own[key], theirs[key])).max() for key in own])
    assert gap < 1e-4, f"sixteen steps: loss, norm or reward differ by {gap}"
    return (
        f"{c.world.policy}: same tokens as simlab in the first step of 24 seeds; largest gradient "
        f"gap {worst:.1e} of the largest entry; median gap over 16 steps {gap:.1e}."
    )


def compare(report: Report, policy: str, steps: int, rounds: int, sampled: int) -> None:
    """Two tables: whole steps, sampling only."""
    c = cell(policy, steps - 1, steps)
    report.note(check(c))
    logged = cell(policy, steps - 1, 10)
    batch = c.world.prompts * c.world.answers * c.world.horizon

    def alone():
        for seed in c.seeds[:2]:
            train(replace(c, seeds=(seed,)))
        return 2 * steps * batch

    def loop(seeds, *how, steps=16):
        for seed in seeds:
            Lane(c, seed).train(steps, *how)
        return len(seeds) * steps * batch

    world, _, _, log_mu = first_tables(c)
    shape = (c.world.prompts, c.world.answers, c.world.horizon)
    lane, uniforms = Lane(c, 0), Generators(c.seeds, SAMPLE, 0)
    mine, cdf = log_mu[0].numpy().reshape(-1, c.world.vocab), cumulative(log_mu)

    def batched():
        for _ in range(sampled):
            sample(world, cdf, uniforms.uniform(*shape))
        return sampled * batch * len(c.seeds)

    def one(sampler, times):
        table = lane.table(mine, sampler)
        for _ in range(times):
            getattr(lane, sampler)(table)
        return times * batch

    all_seeds = len(c.seeds) * steps * batch
    whole = {
        "simlab, 24 seeds at once": lambda: (train(c), all_seeds)[1],
        "the same, exact evaluation every 10 steps": lambda: (train(logged), all_seeds)[1],
        "simlab, one seed at a time": alone,
        "loop: cumulative tables, bisect": lambda: loop(c.seeds),
        "loop: env.step, rng.choice": lambda: loop(c.seeds[:2], "gymnasium"),
        "the same, gradient token by token": lambda: loop(
            c.seeds[:1], "gymnasium", "token_by_token", steps=8
        ),
    }
    draws = {
        "simlab.sample, 24 seeds at once": batched,
        "loop: cumulative tables, bisect": lambda: one("bisect", 8 * sampled),
        "loop: env.step, rng.choice": lambda: one("gymnasium", sampled),
    }
    for title, arms in (("whole training steps", whole), ("sampling only", draws)):
        s = interleave(arms, rounds)
        base = next(iter(s.values()))
        rows = [[k, f"{1 / np.median(x):,.0f}", spread(x / base)] for k, x in s.items()]
        report.table(f"{policy}: {title}", ["arm", "tokens/s", "simlab is faster by (range)"], rows)
        if arms is whole:
            behind = [k for k, x in s.items() if np.median(x / base) >= GOAL[policy]]
            report.note(f"Goal {GOAL[policy]}x, reached against: {'; '.join(behind) or 'no arm'}.")


if __name__ == "__main__":
    asked = arguments(__doc__)
    report = Report("Simulator speed")
    for policy in NOISES:
        size = (16, 2, 2) if asked.quick else (96, 9, 10)
        compare(report, policy, *size)
    report.write(asked.out)
