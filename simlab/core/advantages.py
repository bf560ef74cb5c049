"""Advantages: rewards of G answers to each of P prompts -> one number an answer.

Every entry of `ADVANTAGES` maps reward `[..., P, G]` and length `[..., P, G]` (active tokens of the
answer, may be 0) to advantages `[..., P, G]`, in reward units or, where it divides by one, in
standard deviations. Leading axes are lanes and never mix. A flat group (equal rewards) and a group
of one get 0; in `spo_pp` they do before its normalisation. Integer rewards are read as float64.

A reward of NaN is a missing one (a verifier gave up): the answer is left out of every mean and spread
and gets 0, so take its tokens out of the mask. So is an answer without a token, which has nothing to
learn from; `empty=True` lets it count. A group with fewer than `least` answers left gets 0. An
infinite reward raises ValueError.

`PRESETS` joins an advantage and an aggregation as published. What else belongs to a recipe is set
elsewhere (the method and its radii, the KL term, the sampler) or is not modelled here:

    preset   loss and clip radii                   what else the recipe changes
    grpo     PPO 0.2 / 0.2                         KL to a reference as a loss, k3, coefficient 0.04
    dr_grpo  PPO 0.2 / 0.2                         no KL; the horizon is the constant largest length
    rloo     A log pi, on-policy, no clip          KL to a reference inside the reward
    dapo     PPO 0.2 / 0.28 ("clip-higher")        no KL; flat groups are dropped and new prompts drawn
                                                   in their place; overlong answers lose reward
    sat      SAT 0.2 / 0.2, alpha 0.9, exponent 2  KL as a loss, low_var, coefficient 1e-3

Sources: GRPO 2402.03300; Dr. GRPO 2503.20783; RLOO 2402.14740; DAPO 2503.14476; SAT 2607.18722,
whose project page averages over tokens, while its trainer by default averages over answers first.
Here a flat group stays in the batch with advantage 0: under `token_mean` its tokens still count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from simlab.core.tokens import widen


def grpo(reward: Tensor, length: Tensor, *, least: int = 2, empty: bool = False) -> Tensor:
    """(R - mean) / (std + 1e-6) in each group, std with G - 1."""
    return group_advantage(counted(reward, length, empty), least=least)


def dr_grpo(reward: Tensor, length: Tensor, *, least: int = 2, empty: bool = False) -> Tensor:
    """R - mean of the group, no division: expected gradient (G - 1) / G times the true one."""
    return _centred(counted(reward, length, empty), least)


def rloo(reward: Tensor, length: Tensor, *, least: int = 2, empty: bool = False) -> Tensor:
    """R minus the mean of the other answers, = G / (G - 1) (R - mean): unbiased on-policy."""
    reward = counted(reward, length, empty)
    G = (~reward.isnan()).sum(-1, keepdim=True).to(reward.dtype)
    return _centred(reward, least) * (G / (G - 1).clamp(min=1))


def batch_sd(
    reward: Tensor, length: Tensor, *, least: int = 2, empty: bool = False, eps: float = 1e-6
) -> Tensor:
    """(R - mean of the group) / (std + eps), std of the rewards of the whole batch, with n - 1.

    AReaL's mean_level "group" and std_level "batch" (AReaL #303). Hand in the whole optimizer batch.
    """
    reward = counted(reward, length, empty)
    there = ~reward.isnan()
    n = there.sum((-2, -1), keepdim=True)
    mean = torch.where(there, reward, 0).sum((-2, -1), keepdim=True) / n.clamp(min=1)
    return _over_batch(_centred(reward, least), torch.where(there, reward - mean, 0), n, eps)


def gdpo(
    reward: Tensor, length: Tensor, *, least: int = 2, empty: bool = False, eps: float = 1e-6
) -> Tensor:
    """GDPO (NVlabs/GDPO): several rewards `[..., P, G, K]`, each as in `grpo`, added, over the batch's std.

    Weights of the rewards, if any, are multiplied in by the caller after dividing: here all are 1. The
    std is that of the sums over the whole batch, with n - 1; their mean is 0 as it is in each group.
    One reward may come as `[..., P, G]`. An answer that misses one reward misses all.
    """
    reward = reward if reward.dim() > length.dim() else reward.unsqueeze(-1)
    reward = counted(reward, length.unsqueeze(-1), empty)
    there = ~reward.isnan().any(-1)
    reward = torch.where(there.unsqueeze(-1), reward, torch.nan)
    A = group_advantage(reward.movedim(-1, 0), least=least).sum(0)
    return _over_batch(A, A, there.sum((-2, -1), keepdim=True), eps)


def spo_pp(
    reward: Tensor, length: Tensor, eps: float = 1e-6, *, least: int = 2, empty: bool = False
) -> Tensor:
    """SPO++ (2608.24870): A = R - group mean, standardised over the tokens of the whole batch.

    m = sum T A / sum T,  v = sum T (A - m)^2 / sum T,  (A - m) / sqrt(v + eps), T the lengths, sums
    over prompts and answers: hand in the whole optimizer batch. The token mean is then 0 and the
    token variance v / (v + eps). Every flat group ends at the same -m / sqrt(v + eps). If v = 0,
    each answer with a token has A = m and gets 0 (to rounding). An answer without a token gets 0.
    The formula is known from a secondary source, and eps is ours.
    """
    reward = counted(reward, length, empty)
    A = _centred(reward, least)
    T = torch.where(reward.isnan(), 0, length).to(A.dtype)
    total = T.sum((-2, -1), keepdim=True)  # 0 only where every length is 0
    m = (T * A).sum((-2, -1), keepdim=True) / total
    v = (T * (A - m) ** 2).sum((-2, -1), keepdim=True) / total
    return torch.where(T > 0, (A - m) / (v + eps).sqrt(), 0.0)


Advantage = Callable[[Tensor, Tensor], Tensor]
ADVANTAGES: dict[str, Advantage] = {
    "batch_sd": batch_sd,
    "dr_grpo": dr_grpo,
    "gdpo": gdpo,
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


# ---------------------------------------------------------------- groups
def counted(reward: Tensor, length: Tensor, empty: bool = False) -> Tensor:
    """The rewards as floats, NaN where an answer is missing or, unless `empty`, has no token.

    Raises ValueError for an infinite reward.
    """
    reward = _floats(reward)
    return reward if empty else torch.where(length > 0, reward, torch.nan)


def group_advantage(reward: Tensor, eps: float = 1e-6, ddof: int = 1, least: int = 2) -> Tensor:
    """GRPO: (R - mean) / (std + eps) within each group; reward and answer are `[..., G]`.

    `ddof=1` is what verl, TRL and slime compute. NaN is left out. A group of one, of fewer than `least`
    and of equal rewards get 0.
    """
    reward = _floats(reward)
    centred = _centred(reward, least)
    n = (~reward.isnan()).sum(-1, keepdim=True)
    std = (centred.pow(2).sum(-1, keepdim=True) / (n - ddof).clamp(min=1)).sqrt()
    return torch.where(centred == 0, 0.0, centred / (std + eps))


def flat_groups(reward: Tensor) -> Tensor:
    """Groups whose answers all got one reward, which teach nothing: bool `[...]` from `[..., G]`.

    NaN is left out; a group without any reward is flat.
    """
    reward = _floats(reward)
    edge = reward.new_full((*reward.shape[:-1], 1), torch.inf)
    low = torch.cat([reward.nan_to_num(torch.inf), edge], -1).amin(-1)
    high = torch.cat([reward.nan_to_num(-torch.inf), -edge], -1).amax(-1)
    return low >= high


def _floats(reward: Tensor) -> Tensor:
    reward = widen(reward) if reward.is_floating_point() else reward.double()
    if reward.isinf().any():
        raise ValueError("a reward is infinite: a missing one is NaN, every other a finite number")
    return reward


def _centred(reward: Tensor, least: int) -> Tensor:
    """R - mean over the rewards that are there; 0 for a missing one, in a flat and in a small group."""
    if least < 1:
        raise ValueError(f"least must be at least 1, got {least}")
    there = ~reward.isnan()
    n = there.sum(-1, keepdim=True)
    mean = torch.where(there, reward, 0).sum(-1, keepdim=True) / n.clamp(min=1)
    return torch.where(
        there & (n >= least) & ~flat_groups(reward).unsqueeze(-1), reward - mean, 0.0
    )


def _over_batch(A: Tensor, centred: Tensor, n: Tensor, eps: float) -> Tensor:
    """A over the root of the mean square of `centred` over prompts and answers, with n - 1."""
    variance = centred.pow(2).sum((-2, -1), keepdim=True) / (n - 1).clamp(min=1)
    return torch.where(A == 0, 0.0, A / (variance.sqrt() + eps))
