"""The batch of a step: accepted samples and their rewards become the responses that the trainer sees."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from scaleup.rollout.sample import Sample
from scaleup.trainer.responses import Response
from simlab.core.advantages import Advantage, flat_groups


class Group(NamedTuple):
    """The accepted samples of a prompt and the reward of each."""

    samples: list[Sample]
    rewards: list[float]


@dataclass(frozen=True)
class Batch:
    """What a step trains on, and numbers of it."""

    responses: list[Response]
    columns: dict[str, list]  # of the token log: group, reward, finish_reason of each response
    reward: float  # mean
    flat_groups: float  # share of prompts whose responses all got one reward
    length: float  # mean tokens of a response
    digest: str  # hash of all tokens: equal for equal batches


def make_batch(
    step: int,
    groups: list[Group],
    to_advantages: Advantage,
    wanted: Collection[str] = (),
    rng: np.random.Generator | None = None,
) -> Batch:
    """The batch that step `step` trains on, prompt by prompt.

    Of the optional fields of TokenBatch a response has its age and, where `wanted`, its reward, its group,
    the position of each token and uniform draws of `rng`.
    """
    rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
    lengths = torch.tensor([[len(s.output) for s in group.samples] for group in groups])
    advantages = to_advantages(rewards, lengths)
    responses, columns = [], {"group": [], "reward": [], "finish_reason": []}
    digest = hashlib.sha256()
    for p, group in enumerate(groups):
        for g, sample in enumerate(group.samples):
            digest.update(f"{step} {p} {g} {sample.output}".encode())
            more = {
                "reward": float(rewards[p, g]),
                "group": p,
                "position": torch.arange(len(sample.output)),
            }
            if rng is not None:
                more["uniform"] = torch.from_numpy(rng.random(len(sample.output)))
            fields = {name: x for name, x in more.items() if name in wanted}
            responses.append(_response(sample, float(advantages[p, g]), step, fields))
            columns["group"].append(p)
            columns["reward"].append(float(rewards[p, g]))
            columns["finish_reason"].append(sample.finish)
    return Batch(
        responses,
        columns,
        reward=float(rewards.mean()),
        flat_groups=float(flat_groups(rewards).double().mean()),
        length=float(lengths.double().mean()),
        digest=digest.hexdigest()[:16],
    )


def _response(sample: Sample, advantage: float, step: int, fields: dict) -> Response:
    """What the trainer sees of a sample: in its head the sampled token itself is left out (core/head.py)."""
    fields, head = {"age": step - sample.version} | fields, None
    if sample.head is not None and sample.head_logp is not None:
        itself = sample.head == torch.tensor(sample.output, dtype=torch.int32).unsqueeze(-1)
        head = sample.head.long().masked_fill(itself, -1)
        fields["topk_mu"] = sample.head_logp.masked_fill(itself, -torch.inf)
    return Response(
        tokens=torch.tensor(sample.prompt + sample.output),
        prompt=len(sample.prompt),
        logp_mu=sample.logp_mu,
        advantage=advantage,
        experts=sample.experts,
        fields=fields,
        head=head,
    )
