"""What the engines are asked: prompts of a task, with the sampling settings and a seed for each response."""

from __future__ import annotations

from typing import Any

import numpy as np

from scaleup.plan.layouts import MARGIN, context
from scaleup.recipe import RunSpec
from scaleup.rollout.actor import Request
from scaleup.tasks.registry import make
from scaleup.tasks.task import Task
from simlab.study.settings import RunError

TRAINING, EVALUATION, ENGINE, GATE = range(4)  # what seeds are for: their streams are independent


def make_task(
    spec: RunSpec, config: dict[str, Any], tokenizer, name: str, options: dict, seed: int
) -> Task:
    """A task whose prompts leave room for a response in the context of the model of config.json `config`.

    Raises RunError for a prompt token that the model does not have, ValueError as the task.
    """
    room = context(config, spec.world) - spec.world.max_new_tokens - MARGIN
    task = make(name, tokenizer, seed=seed, limit=room, **options)
    if task.largest_token() >= (size := config["vocab_size"]):
        raise RunError(f"task {name} has token {task.largest_token()}, the model has {size}")
    return task


def seeds(spec: RunSpec, purpose: int, batch: int, index: int, n: int) -> np.ndarray:
    """A seed of 63 bits for each of n responses to prompt `index` of a batch."""
    key = (spec.seed, spec.arm.stream, purpose, batch, index)
    return np.random.SeedSequence(key).generate_state(n, np.uint64) >> np.uint64(1)


def draws(spec: RunSpec, batch: int) -> np.random.Generator:
    """The generator of the uniform draws of a batch, for methods that draw."""
    return np.random.default_rng((spec.seed, spec.arm.stream, GATE, batch))


def request(
    spec: RunSpec, task: Task, number: int, batch: int, index: int, draws: np.ndarray
) -> Request:
    """Responses to prompt `number` of a task, one for each seed of `draws`."""
    world = spec.world
    sampling = {"max_new_tokens": world.max_new_tokens, "temperature": world.temperature}
    sampling |= {"ignore_eos": True} if task.eos is None else {"stop_token_ids": [task.eos]}
    given = draws.tolist() if world.engine.deterministic else None  # else SGLang ignores them
    prompt, routed = task.prompt(number).ids, spec.replay == "r3"
    head = spec.head if batch >= 0 else 0  # an evaluation trains on nothing
    return Request(batch, index, prompt, len(draws), given, sampling, routed, head)
