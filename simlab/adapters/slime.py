"""slime: any method as its custom loss, with numbers of the whole rollout (SAT's q) from a hook before training.

    # my_slime.py, on the path of the trainer
    from simlab.adapters.slime import Method
    mine = Method("sat")
    loss, before_training = mine.loss, mine.before_training

    # and on slime's command line
    --loss-type custom_loss --custom-loss-function-path my_slime.loss
    --rollout-data-postprocess-path my_slime.before_training    # methods with a number of the whole batch

mu are `rollout_log_probs`; leave --use-rollout-logprobs and --use-tis off. `log_probs`, the trainer's before the
step, are `logp_prox`, which slime always computes under custom_loss. The hook runs on every rank once a rollout;
its number is exact for the first optimizer step of the rollout and kept for the others. How tokens are averaged
is slime's: `sum_of_sample_mean` with its own denominators. Without a KL or an entropy term. Context parallelism
must be 1: a response has to be whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simlab.adapters.common import method, numbers
from simlab.core.quantile import Reduce
from simlab.core.tokens import TokenBatch

LogProbs = Callable[..., list[Tensor]]  # (logits, args, batch) -> a tensor of log-probs a response


class Method:
    """A loss and the hook that goes with it. Raises ValueError in one sentence.

    `log_probs` and `reduce` are slime's own by default; a test hands in its own.
    """

    def __init__(self, spec: str, log_probs: LogProbs | None = None, reduce: Reduce | None = None):
        self.stabilizer = method(spec, "slime", ("position", "logp_prox"), whole_batch=True)
        self.log_probs = log_probs or of_slime
        self.reduce = reduce
        self.stats: dict | None = None

    def before_training(self, args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        """Compute the numbers of the whole batch from this rank's part of the rollout, over all ranks."""
        if not self.stabilizer.whole_batch or "log_probs" not in rollout_data:
            return  # a pipeline stage before the last has no log-probs
        b = batch(rollout_data["log_probs"], rollout_data)
        self.stats = self.stabilizer.stats([b], reduce=self.reduce or of_ranks)

    def loss(
        self, args: Any, batch_: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """slime's (args, batch, logits, sum_of_sample_mean) -> (loss, scalars to log)."""
        if self.stabilizer.whole_batch and self.stats is None:
            raise ValueError(
                f"{self.stabilizer.name} reads a number of the whole batch; give "
                "--rollout-data-postprocess-path its before_training"
            )
        b = batch(self.log_probs(logits, args, batch_), batch_)
        out = self.stabilizer.surrogate(b, **(self.stats or {}))
        loss = (
            -sum_of_sample_mean(out.S) + 0 * logits.sum()
        )  # every rank has a graph, also an empty shard
        return loss, {"loss": loss.detach().clone(), **numbers(b, out)}


def batch(logp: Sequence[Tensor], data: dict[str, Any]) -> TokenBatch:
    """The responses of a batch of slime, one after another. Raises ValueError for parts of responses."""
    masks = data["loss_masks"]
    if any(len(x) != len(m) for x, m in zip(logp, masks, strict=True)):
        raise ValueError("slime handed over parts of responses; context parallelism must be 1")
    if data.get("rollout_log_probs") is None:
        raise ValueError(
            "slime gave no rollout_log_probs, and mu is the engine's; see return_logprob"
        )
    joined = [torch.cat([torch.as_tensor(x) for x in data[k]]).to(logp[0].device) for k in ("rollout_log_probs", "advantages", "loss_masks", "log_probs")]  # fmt: skip
    starts = torch.tensor([0, *(len(x) for x in logp)]).cumsum(0)
    return TokenBatch.from_packed(torch.cat(list(logp)), *joined[:3], starts, logp_prox=joined[3])


def of_slime(logits: Tensor, args: Any, data: dict[str, Any]) -> list[Tensor]:
    """Log-probs of the responses by slime's own function."""
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=data["unconcat_tokens"],
        total_lengths=data["total_lengths"],
        response_lengths=data["response_lengths"],
        with_entropy=False,
    )
    found = found[1] if isinstance(found, tuple) else found  # of either generation of slime
    return found["log_probs"]


def of_ranks(x: Tensor) -> Tensor:
    """The sum over the data-parallel ranks of Megatron."""
    from megatron.core import mpu

    torch.distributed.all_reduce(x, group=mpu.get_data_parallel_group())
    return x
