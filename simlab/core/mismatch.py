"""How far the policy in training is from the one that sampled: one measurement for simulator, trainer and audit.

Everything is a sum over tokens that adds over micro-batches and, through `reduce`, over ranks, and then
a number of the whole batch: how the batch was cut changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from simlab.core.quantile import Reduce, abs_quantile, summed
from simlab.core.tokens import TokenBatch, log_ratio

LEVELS = (50, 90, 99)  # percent, of the logged quantiles of |d|


def mismatch(
    batches: Iterable[TokenBatch],
    reduce: Reduce | None = None,
    logp_rollout: Sequence[Tensor] | None = None,
) -> dict[str, Tensor]:
    """d = log pi - log mu of the sampled tokens of all micro-batches; all `[...]`, without gradient.

    - `d_bar` = mean |d| in nats, SAT (52); `d_mean` = mean d (signed);
      `d_q50 .. d_max` = inverse-CDF quantiles of |d|; `d_kurtosis` = E(d-Ed)^4 / Var(d)^2.
    - `k1` = mean(-d), `k2` = mean(d^2)/2, `k3` = mean(r - 1 - d): estimators of KL(mu || pi).
    - `ess` = (sum r)^2 / (n sum r^2), a fraction in (0, 1], 1 when on-policy, scale-free.
    - `chi2` = mean(r^2) - 1, per token.
    - `age`, `age_max`: optimizer steps since the weights that sampled a token, where batches know it.
    - `d_policy`, `d_engine`: the two parts of d of SAT (2) in mean absolute nats, where `logp_rollout`
      has the trainer's log-probs `[..., N]` at the weights that sampled each token, one tensor a batch:
      trainer now against trainer then, and trainer then against engine.

    With no active token every value is 0 and `tokens` says so. Finite input: `screen` first. Raises
    ValueError without a micro-batch; it may be an empty one.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("mismatch needs at least one micro-batch (it may be empty)")
    shards = [(log_ratio(b).detach(), b.mask) for b in batches]

    def sums(*terms: list[Tensor]) -> list[Tensor]:
        """The sum of each term, one tensor `[..., N]` a batch, over the active tokens of all of them."""
        of_batch = [
            torch.stack([torch.where(mask, x, 0).sum(-1) for x in xs])
            for xs, (_, mask) in zip(zip(*terms, strict=True), shards, strict=True)
        ]
        return list(summed(of_batch, reduce))

    def of(function) -> list[Tensor]:
        return [function(d) for d, _ in shards]

    n = summed([mask.sum(-1) for _, mask in shards], reduce)
    some = n.clamp(min=1)
    names = ("d_bar", "d_mean", "k1", "k2", "k3", "chi2")
    terms = (
        of(torch.abs), of(lambda d: d), of(torch.neg), of(lambda d: d**2),
        of(lambda d: torch.expm1(d) - d), of(lambda d: torch.expm1(2 * d)),
    )  # fmt: skip
    out = {name: x / some for name, x in zip(names, sums(*terms), strict=True)}
    out["k2"] = out["k2"] / 2
    for level in LEVELS:
        out[f"d_q{level}"] = abs_quantile(shards, level / 100, reduce)
    out["d_max"] = abs_quantile(shards, 1.0, reduce)

    centre = out["d_mean"].unsqueeze(-1)
    sd = (sums(of(lambda d: (d - centre) ** 2))[0] / some).sqrt()
    spread = sd > 4 * torch.finfo(sd.dtype).eps * out["d_max"]  # equal gaps differ by rounding only
    unit = torch.where(spread, sd, 1).unsqueeze(-1)
    fourth = sums(of(lambda d: ((d - centre) / unit) ** 4))[0] / some
    out["d_kurtosis"] = torch.where(spread, fourth, 0)

    largest = abs_quantile([(d.clamp(min=0), mask) for d, mask in shards], 1.0, reduce)
    shift = largest.double().unsqueeze(-1)  # the largest ratio is 1: no sum overflows
    r, square = sums(*(of(lambda d, k=k: (k * (d.double() - shift)).exp()) for k in (1, 2)))
    out["ess"] = torch.where(n > 0, r**2 / (some * torch.where(square > 0, square, 1)), 0)

    ages = [b.age.double() for b in batches if b.age is not None]
    if len(ages) == len(batches):
        out["age"] = sums(ages)[0] / some
        out["age_max"] = abs_quantile(
            [(x, b.mask) for x, b in zip(ages, batches, strict=True)], 1.0, reduce
        )
    if logp_rollout is not None:
        pairs = list(zip(logp_rollout, batches, strict=True))
        policy, engine = sums(
            [(b.logp.detach() - then).abs() for then, b in pairs],
            [(then - b.logp_mu).abs() for then, b in pairs],
        )
        out |= {"d_policy": policy / some, "d_engine": engine / some}
    return {"tokens": n} | out


def gradient_shares(
    batches: Sequence[TokenBatch],
    active: Sequence[Tensor],
    base: Sequence[Tensor],
    reduce: Reduce | None = None,
) -> dict[str, Tensor]:
    """Shares of the tokens of all micro-batches `[...]`; `active` and `base` are bool `[..., N]` each.

    `active` keep a gradient; `cut` have an advantage and no gradient; `unlike_ppo` keep one where the
    base method (PPO at 0.2/0.2) cuts it or the other way round, i.e. where the method acts at all.
    """
    counts = summed(
        [
            torch.stack([
                b.mask.sum(-1),
                (b.mask & mine).sum(-1),
                (b.mask & (b.advantage != 0) & ~mine).sum(-1),
                (b.mask & (mine != other)).sum(-1),
            ])
            for b, mine, other in zip(batches, active, base, strict=True)
        ],
        reduce,
    )  # fmt: skip
    n = counts[0].clamp(min=1)
    return dict(zip(("active", "cut", "unlike_ppo"), counts[1:] / n, strict=True))
