"""How an optimizer step is taken. `quantile` says when the whole-batch numbers (SAT's quantile) are found:

each_step   a forward-only pass before every optimizer step, over the batch of that step: exact
pre_step    one pass when the rollout batch arrives (`Trainer.before`), for all optimizer steps on it
ema         no extra pass: the moving average of what earlier steps saw
local       each micro-batch by itself; depends on how the batch was cut
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from scaleup import QUANTILES, REPLAYS
from simlab.core.aggregate import AGGREGATIONS
from simlab.core.arguments import check_name
from simlab.core.kl import KL
from simlab.core.tokens import TokenBatch


@dataclass(frozen=True)
class Settings:
    """How a step is taken. Raises ValueError for a choice that does not exist."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.98)  # of Adam
    eps: float = 1e-8  # of Adam
    weight_decay: float = 0.0
    grad_clip: float = math.inf  # largest norm of the whole gradient
    aggregation: str = "token_mean"
    horizon: int | None = None  # of seq_mean_token_sum_norm
    quantile: str = "each_step"
    decay: float = 0.9  # of the moving average that `quantile="ema"` keeps
    kl: str = "k2"
    kl_coef: float = 0.0  # needs `logp_ref` in the fields of every response
    temperature: float = 1.0  # of the rollout
    grad_cosine: bool = False  # report the cosine of consecutive gradients; keeps a copy of one
    entropy: bool = True  # report that of pi at every token
    head: int = 0  # tokens of the head of every response, whose log-probs the loss gets
    replay: str = "none"  # r3: the experts of the rollout; r2: those of the forward-only pass
    # Adam with float32 weights and moments on the host; needs a GPU, and has not been run here
    optimizer_offload: bool = False
    compile: bool = False  # the loss by torch.compile; pays from about 1e5 tokens a micro-batch on

    def __post_init__(self):
        check_name("aggregation", self.aggregation, AGGREGATIONS)
        check_name("quantile", self.quantile, QUANTILES)
        check_name("KL term", self.kl, KL)
        check_name("replay", self.replay, REPLAYS)
        if not self.grad_clip > 0:
            raise ValueError(f"grad_clip must be above 0, got {self.grad_clip}")
        if self.optimizer_offload and not torch.cuda.is_available():
            raise ValueError("optimizer_offload moves Adam from a GPU to the host: there is no GPU")

    def aggregate(self) -> Callable[[Tensor, TokenBatch], tuple[Tensor, Tensor]]:
        """The aggregation with its horizon."""
        aggregate = AGGREGATIONS[self.aggregation]
        if self.aggregation == "seq_mean_token_sum_norm":
            return partial(aggregate, horizon=self.horizon or 0)
        return aggregate
