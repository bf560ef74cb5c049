"""prime-rl: any method as its custom loss.

    # my_losses.py
    from simlab.adapters.prime_rl import loss_of
    mine = loss_of("dppo+tis")

    # in the trainer's TOML
    [trainer.loss]
    type = "custom"
    import_path = "my_losses.mine"

prime-rl calls it once a sequence, with 1-D tensors, adds the sums up and divides by the number of tokens of all
ranks. mu are `inference_logprobs`; there is no proximal policy. A method on whole sequences (GSPO) is right,
because the call has the whole one; a number of the whole batch is not to be had, and `whole_batch="micro"`
takes that of the one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import torch

from simlab.adapters.common import method, numbers
from simlab.core.tokens import TokenBatch


def loss_of(
    spec: str, *, whole_batch: Literal["refuse", "micro"] = "refuse"
) -> Callable[[Any], Any]:
    """The method in the signature of prime-rl's custom losses. Raises ValueError in one sentence."""
    chosen = method(spec, "prime-rl", ("position", "logp_ref"), whole_batch == "micro")

    def loss(inputs: Any) -> Any:
        """LossInputs of one sequence to LossOutputs: minus the sum of S, and the method's diagnostics."""
        n = len(inputs.trainer_logprobs)
        device = inputs.trainer_logprobs.device
        ref = {} if inputs.ref_logprobs is None else {"logp_ref": inputs.ref_logprobs}
        b = TokenBatch.from_packed(
            inputs.trainer_logprobs,
            inputs.inference_logprobs,
            inputs.advantages,
            inputs.loss_mask,
            torch.tensor([0, n], device=device),
            **ref,
        )
        out = chosen(b)
        weights = getattr(inputs, "loss_weights", None)
        S = out.S if weights is None else out.S * torch.where(b.mask, weights, 0.0)
        return outputs(loss=-S.sum(), metrics=numbers(b, out))

    return loss


try:
    from prime_rl.trainer.rl.loss import LossOutputs as outputs
except ImportError:  # the same two fields, for a check without prime-rl
    outputs = SimpleNamespace
