"""TRL (1.16): GRPOTrainer with any method, composition or file of your own as its loss.

    from simlab.adapters.trl import StabilizedGRPOTrainer
    StabilizedGRPOTrainer(..., stabilizer="ppo:eps_high=0.28")

mu are the engine's log-probs where vLLM samples (`sampling_per_token_logps`), else the model's before the
first of `num_iterations` (`old_per_token_logps`), which are also `logp_prox`. With neither, one update a batch
by the model that sampled it, mu is the model itself: no ratio differs from 1 and no clip can act.

TRL's loss_type says how tokens are averaged (grpo, bnpo, dr_grpo, dapo), beta weighs the KL term to the reference.
What would correct the ratio a second time, or is read by TRL's own loss only, is refused by name. The loss sees
a micro-batch on one rank: a method with a number of the whole batch (SAT's q) must be asked for with
`whole_batch="micro"`, and gets that of the micro-batch.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from trl import GRPOTrainer

from simlab.adapters.common import method, numbers
from simlab.core.kl import KL
from simlab.core.tokens import TokenBatch, ratio

GIVEN = ("position", "logp_prox")
AVERAGES = ("grpo", "bnpo", "dr_grpo", "dapo")


class StabilizedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose policy loss is a method of simlab; `stabilizer` is its spec, the rest TRL's own."""

    def __init__(
        self,
        *args: Any,
        stabilizer: str,
        whole_batch: Literal["refuse", "micro"] = "refuse",
        **kwargs: Any,
    ):
        self.stabilizer = method(stabilizer, "TRL", GIVEN, whole_batch == "micro")
        super().__init__(*args, **kwargs)
        options = {
            "loss_type": self.loss_type not in AVERAGES,
            "importance_sampling_level": self.importance_sampling_level != "token",
            "vllm_importance_sampling_correction": self.use_vllm
            and self.vllm_importance_sampling_correction,
            "off_policy_mask_threshold": self.off_policy_mask_threshold is not None,
            "top_entropy_quantile": self.top_entropy_quantile < 1,
            "delta": self.args.delta is not None,
            "entropy_coef": self._entropy_bonus_enabled,
            "router_aux_loss_coef": self.aux_loss_enabled,
        }
        if wrong := [name for name, is_set in options.items() if is_set]:
            raise ValueError(
                f"{wrong[0]} is an option of TRL's own loss, and {stabilizer} takes its place; leave it at "
                f"{'one of ' + ', '.join(AVERAGES) if wrong[0] == 'loss_type' else 'its value that does nothing'}"
            )

    def _compute_loss(self, model, inputs: dict[str, Any]) -> Tensor:
        """Minus the aggregate of S, as TRL divides it; diagnostics join TRL's metrics."""
        if "pixel_values" in inputs:
            raise ValueError(f"{self.stabilizer.name}: images are not handed on to the model")
        mask = inputs["completion_mask"]
        mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
        logp, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
        )
        prox = inputs.get("old_per_token_logps")
        prox = logp.detach() if prox is None else prox
        mu = inputs.get("sampling_per_token_logps", prox)
        b = TokenBatch.from_padded(logp, mu, inputs["advantages"], mask, logp_prox=prox)
        out = self.stabilizer(b)
        kept = mask.bool()
        S = out.S.view_as(logp)
        mode = "train" if self.model.training else "eval"
        log = self._metrics[mode]
        if self.beta != 0:
            x, ref, old = (
                torch.where(kept, y, 0.0) for y in (logp, inputs["ref_per_token_logps"], prox)
            )
            kl = KL["k3"](x, ref)
            if self.args.use_bias_correction_kl:
                kl = kl * ratio(x - old)  # its gradient too, as TRL's
            S = S - self.beta * kl
            log["kl"].append(kl.sum().item() / max(int(kept.sum()), 1))
        log["entropy"].append(entropies[kept].mean().item())
        for name, x in numbers(b, out).items():
            log[name].append(x.item())
        return -self._averaged(S, kept, inputs, mode)

    def _averaged(self, S: Tensor, mask: Tensor, inputs: dict[str, Any], mode: str) -> Tensor:
        """S `[B, T]` as TRL averages it over the accumulated micro-batches."""
        steps = self.current_gradient_accumulation_steps if mode == "train" else 1
        if self.loss_type == "dapo":  # tokens of the generation batch, over all ranks
            count = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            share = steps / self.args.steps_per_generation if mode == "train" else 1
            return S.sum() / (count * share)
        if self.loss_type == "grpo":
            return (S.sum(-1) / mask.sum(-1).clamp(min=1)).mean() / steps
        if self.loss_type == "bnpo":
            return S.sum() / mask.sum().clamp(min=1) / steps
        return S.sum() / (S.size(0) * self.max_completion_length) / steps
