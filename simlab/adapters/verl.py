"""verl (0.9): any method, composition or file of your own as a registered policy loss.

    # my_losses.py; name it in VERL_USE_EXTERNAL_MODULES, or in actor_rollout_ref.model.external_lib
    from simlab.adapters.verl import register
    register("mine=gspo+tis", mu="weights")

    # and on verl's command line
    actor_rollout_ref.actor.policy_loss.loss_mode=mine

verl does not hand a loss the engine's log-probs. Say where they are:

    mu="old"      old_log_prob is the engine's: algorithm.rollout_correction.bypass_mode=true copies it there.
                  There is no proximal policy then.
    mu="weights"  decoupled mode: old_log_prob is the trainer's before the step (`logp_prox`), and the
                  correction's weights are exp(old - mu): rollout_is=token, rollout_is_threshold=1e9, so that
                  nothing is truncated. verl holds their logarithm within 20. The weights are used for this and
                  do not multiply the loss: a cap is the method's (`ppo+tis`).

verl aggregates, by its loss_agg_mode and with its own global counts. It hands over a micro-batch at a time, so a
number of the whole batch (SAT's q) is one of the micro-batch on one rank: a method that has one must be asked for
with `whole_batch="micro"`. tests/conformance/test_adapters.py holds this file against verl's own losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

from simlab.adapters.common import numbers, served
from simlab.core.tokens import TokenBatch
from simlab.stabilizers import Stabilizer, bind, needs
from simlab.study.specs import parse

GIVEN = ("position",)  # besides the required fields


def register(
    spec: str,
    *,
    mu: Literal["old", "weights"] = "old",
    whole_batch: Literal["refuse", "micro"] = "refuse",
) -> str:
    """Register `[label=]name[:argument=value,...][+term...]` under its label; returns that, for loss_mode.

    Raises ValueError in one sentence for a method that needs what verl does not hand over, or a number of
    the whole batch without `whole_batch="micro"`.
    """
    label, name, _, arguments = parse(spec)
    method = bind(name, **arguments)
    register_policy_loss(label)(policy_loss(method, mu=mu, whole_batch=whole_batch))
    return label


def policy_loss(
    method: Stabilizer,
    *,
    mu: Literal["old", "weights"] = "old",
    whole_batch: Literal["refuse", "micro"] = "refuse",
) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """The method in the signature of verl's policy losses. Raises ValueError as `register` does."""
    given = (*GIVEN, "logp_prox") if mu == "weights" else GIVEN
    if [x for x in needs(method) if x not in given] == ["logp_prox"]:
        raise ValueError(
            f'{method.name}: verl hands a loss no logp_prox; mu="weights" has the proximal log-probs'
        )
    served(method, method.name, "verl", given, whole_batch == "micro")

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """`[B, T]` each. Returns the loss, and the method's diagnostics as actor/NAME."""
        fields, logp_mu = {}, old_log_prob
        if mu == "weights":
            if rollout_is_weights is None:
                raise ValueError(
                    "mu='weights' needs rollout correction: rollout_is=token, rollout_is_threshold=1e9"
                )
            logp_mu = old_log_prob - rollout_is_weights.log()
            fields["logp_prox"] = old_log_prob
        elif rollout_is_weights is not None:
            raise ValueError(
                "mu='old' takes old_log_prob for the engine's, and rollout correction gave weights beside it; "
                "use mu='weights', or bypass_mode without rollout_is"
            )
        b = TokenBatch.from_padded(log_prob, logp_mu, advantages, response_mask, **fields)
        out = method(b)
        metrics = {f"actor/{name}": x.item() for name, x in numbers(b, out).items()}
        total = agg_loss(
            loss_mat=-out.S.view_as(log_prob),
            loss_mask=response_mask,
            loss_agg_mode=loss_agg_mode,
            **(config.global_batch_info if config is not None else {}),
        )
        return total, metrics

    return loss
