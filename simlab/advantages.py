"""Advantages: rewards of G answers to each of P prompts -> one number an answer.

Every entry of `ADVANTAGES` maps reward `[..., P, G]` and length `[..., P, G]` (active tokens of the
answer, may be 0) to advantages `[..., P, G]`, in reward units or, where it divides by one, in
standard deviations. Leading axes are lanes and never mix. A flat group (equal rewards) and a group
of one get 0; in `spo_pp` they do before its normalisation.

`PRESETS` joins an advantage and an aggregation as published. What else belongs to a recipe is set
elsewhere (the method and its radii, the KL term, the sampler) or is not modelled here:

    preset   loss and clip radii                what else the recipe changes
    grpo     PPO .2 / .2                        KL to a reference as a loss, k3, coefficient .04
    dr_grpo  PPO .2 / .2                        no KL; the horizon is the constant largest length
    rloo     A log pi, on-policy, no clip       KL to a reference inside the reward
    dapo     PPO .2 / .28 ("clip-higher")       no KL; flat groups are dropped and new prompts drawn
                                                in their place; overlong answers lose reward
    sat      SAT .2 / .2, alpha .9, exponent 2  KL as a loss, low_var, coefficient 1e-3

Sources: GRPO 2402.03300; Dr. GRPO 2503.20783; RLOO 2402.14740; DAPO 2503.14476; SAT 2607.18722,
whose project page averages over tokens, while its trainer by default averages over answers first.
Here a flat group stays in the batch with advantage 0: under `token_mean` its tokens still count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from simlab.batch_stats import flat_groups, group_advantage


def grpo(reward: Tensor, length: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6) in each group, std with G - 1. Length is not read."""
    return group_advantage(reward)


def dr_grpo(reward: Tensor, length: Tensor) -> Tensor:
    """R - mean of the group, no division: expected gradient (G - 1) / G times the true one."""
    centred = reward - reward.mean(-1, keepdim=True)
    return torch.where(flat_groups(reward).unsqueeze(-1), 0.0, centred)


def rloo(reward: Tensor, length: Tensor) -> Tensor:
    """R minus the mean of the other answers, = G / (G - 1) (R - mean): unbiased on-policy."""
    G = reward.shape[-1]
    return dr_grpo(reward, length) * (G / max(G - 1, 1))


def spo_pp(reward: Tensor, length: Tensor, eps: float = 1e-6) -> Tensor:
    """SPO++ (2608.24870): A = R - group mean, standardised over the tokens of the whole batch.

    m = sum T A / sum T,  v = sum T (A - m)^2 / sum T,  (A - m) / sqrt(v + eps), T the lengths, sums
    over prompts and answers: hand in the whole optimizer batch. The token mean is then 0 and the
    token variance v / (v + eps). Every flat group ends at the same -m / sqrt(v + eps). If v = 0,
    each answer with a token has A = m and gets 0 (to rounding). An answer without a token gets 0.
    The formula is known from a secondary source, and eps is ours.
    """
    A, T = dr_grpo(reward, length), length.to(reward.dtype)
    total = T.sum((-2, -1), keepdim=True)  # 0 only where every length is 0
    m = (T * A).sum((-2, -1), keepdim=True) / total
    v = (T * (A - m) ** 2).sum((-2, -1), keepdim=True) / total
    return torch.where(length > 0, (A - m) / (v + eps).sqrt(), 0.0)


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dr_grpo": dr_grpo,
    "grpo": grpo,
    "rloo": rloo,
    "spo_pp": spo_pp,
}

PRESETS: dict[str, dict[str, object]] = {
    "dapo": {"advantage": "grpo", "aggregation": "token_mean"},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "seq_mean_token_sum_norm"},
    "grpo": {"advantage": "grpo", "aggregation": "seq_mean_token_mean"},
    "rloo": {"advantage": "rloo", "aggregation": "seq_mean_token_sum"},
    "sat": {"advantage": "grpo", "aggregation": "token_mean"},
}
