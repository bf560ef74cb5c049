"""Calls into the peers on padded float64 rows `[B, T]`; each factory returns a named function.

Only what surrounds the peers' code is set here (a configuration, a stub trainer without a model, a
lookup of log-probs in place of a forward pass); what they compute is theirs.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("RL_WARNINGS", "False")

import martingale.corrections
import numpy as np
import polgrad
import torch
import torchrl.objectives as rl
import verl.trainer.ppo.core_algos as core
from martingale.exact import defendants
from pairs import HORIZON, Call, Padded, show
from polgrad.diagnostics import importance_ess
from polgrad.kl import KLEstimator, kl_estimate
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor
from torchrl.objectives.llm.grpo import CISPOLoss, GRPOLoss
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo import rollout_corr_helper
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

F64 = torch.float64


@contextmanager
def default_float64() -> Iterator[None]:
    """TRL and torchrl make constants of the default dtype: 1.05 would be a float32."""
    torch.set_default_dtype(F64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def named(who: str, what: str, **arguments) -> str:
    """The label of a peer's function."""
    return f"{who} `{what}({show(arguments)})`" if arguments else f"{who} `{what}`"


# ---------------------------------------------------------------- verl
def actor(policy_loss: dict | None = None, **arguments) -> ActorConfig:
    """verl's configuration, with its own defaults for what is not given."""
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**(policy_loss or {})),
        **arguments,
    )


def verl(
    name: str,
    agg: str = "token-mean",
    *,
    correct: dict | None = None,
    of: tuple[str, str] = ("prox", "mu"),
    **config,
) -> Call:
    """A policy loss. `correct` are the arguments of verl's rollout correction for the pair `of`.

    Without it the loss's old log-probs are mu; with it they are the first of `of`, except that a
    correction of the current policy (lp against mu) is the bypass form, where they stay mu.
    """
    settings = actor(**config)
    old = "mu" if correct is None or of[0] == "lp" else of[0]

    def loss(x: Padded) -> Tensor:
        weights, mask = None, x.mask
        if correct is not None:
            first, second = (getattr(x, name).detach() for name in of)
            found, mask, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
                first, second, x.mask, **correct
            )
            weights = found.batch["rollout_is_weights"] if found is not None else None
        return core.get_policy_loss_fn(name)(
            getattr(x, old), x.lp, x.A, mask, agg, settings, weights
        )[0]

    label = named("verl", name, **config) + f", {agg}"
    return Call(label + (f", rollout correction `{show(correct)}`" if correct else ""), loss)


def verl_bypass(agg: str = "token-mean", **correction) -> Call:
    """bypass_mode: weights and rejection are computed inside, from the current policy and mu."""
    config = actor({"rollout_correction": RolloutCorrectionConfig(**correction)})

    def loss(x):
        return core.get_policy_loss_fn("bypass_mode")(x.mu, x.lp, x.A, x.mask, agg, config)[0]

    return Call(named("verl", "bypass_mode", **correction) + f", {agg}", loss)


def verl_agg(mode: str, **globals_) -> Call:
    """agg_loss on the REINFORCE loss of each token."""

    def loss(x):
        return core.agg_loss(-x.A * x.lp, x.mask, mode, **globals_)

    return Call(named("verl", "agg_loss", loss_agg_mode=mode, **globals_), loss)


def verl_agg_micro(mode: str) -> Call:
    """agg_loss of two micro-batches with the counts of the whole batch, added up."""

    def loss(x: Padded) -> Tensor:
        counts = {"batch_num_tokens": int(x.mask.sum()), "global_batch_size": x.rows}
        parts = (slice(0, 2), slice(2, None))
        return sum(
            core.agg_loss(-x.A[i] * x.lp[i], x.mask[i], mode, loss_scale_factor=HORIZON, **counts)
            for i in parts
        )

    return Call(named("verl", "agg_loss", loss_agg_mode=mode) + " of micro-batches", loss)


def verl_kl(kind: str) -> Call:
    """kl_penalty per token."""

    def value(x):
        return torch.where(x.mask, core.kl_penalty(x.lp, x.ref, kind), 0.0)

    return Call(named("verl", "kl_penalty", kl_penalty=kind), value)


def verl_metric(name: str) -> Call:
    """A number of compute_offpolicy_metrics, the current policy taken as the trainer's."""

    def value(x: Padded) -> Tensor:
        found = rollout_corr_helper.compute_offpolicy_metrics(x.lp.detach(), x.mu, x.mask)
        return torch.tensor(found[name], dtype=F64)

    return Call(f'verl `compute_offpolicy_metrics()["{name}"]`', value)


def verl_advantage(name: str, **arguments) -> Call:
    """An advantage estimator: reward and length `[P, G]` -> the answers' advantages `[P, G]`."""

    def value(x) -> Tensor:
        reward, length = x.reward.flatten(), x.length.flatten()
        steps = torch.arange(int(length.max()))
        scores = torch.where(steps == length.unsqueeze(1) - 1, reward.unsqueeze(1), 0.0)
        mask = (steps < length.unsqueeze(1)).long()
        group = np.repeat(np.arange(x.reward.shape[0]), x.reward.shape[1])
        found, _ = core.get_adv_estimator_fn(name)(
            token_level_rewards=scores, response_mask=mask, index=group, **arguments
        )
        return found[:, 0].view_as(x.reward)  # every answer has a first token

    return Call(named("verl", name, **arguments), value)


# ---------------------------------------------------------------- TRL
def statements(function, first: str, last: str):
    """The statements of a function from the one that starts with `first` to `last`, compiled.

    Raises LookupError when the source has changed.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            text = [ast.unparse(x) for x in body] if isinstance(body, list) else []
            starts = [i for i, x in enumerate(text) if x.startswith(first)]
            ends = [i for i, x in enumerate(text) if x.startswith(last)]
            if starts and ends:
                return compile("\n".join(text[starts[0] : ends[-1] + 1]), function.__name__, "exec")
    raise LookupError(f"{function.__qualname__} no longer holds {first!r} and {last!r}")


PREPARE = GRPOTrainer._generate_and_score_completions
WEIGHT = statements(PREPARE, "mask = completion_mask", "if self.vllm_importance_sampling_mode")
GROUP = statements(PREPARE, "if self.multi_objective_aggregation", "advantages = torch.nan_to_num")
LEAVE_ONE_OUT = statements(
    RLOOTrainer._generate_and_score_completions,
    "grouped_rewards = rewards.view",
    "advantages = torch.nan_to_num",
)


def lines(code, function, **names) -> dict:
    """Run lifted statements over these names, and the globals of their module; all names after."""
    scope = dict(inspect.unwrap(function).__globals__) | names
    exec(code, scope)
    return scope


def trl(
    loss_type: str,
    *,
    level: str = "token",
    eps: float = 0.2,
    eps_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    bias_kl: bool = True,
    opsm: float | None = None,
    weight: tuple | None = None,
    by_token: bool = True,
) -> Call:
    """GRPOTrainer._compute_loss, or GMPOTrainer's for `gmpo`, on a stub: no model, no tokenizer.

    `weight` is (mode, lowest, highest) of the vLLM correction: old is then prox, else mu.
    """
    trainer = GMPOTrainer if loss_type == "gmpo" else GRPOTrainer
    args = SimpleNamespace(
        delta=delta,
        use_bias_correction_kl=bias_kl,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=1,
    )

    def same(x, *_, **__):
        return x

    def loss(x: Padded) -> Tensor:
        stub = SimpleNamespace(
            args=args,
            _get_per_token_logps_and_entropies=lambda *_, **__: (x.lp, torch.ones_like(x.A), None),
            get_off_policy_mask=trainer.get_off_policy_mask,
            get_gamma_weights=trainer.get_gamma_weights,
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=opsm,
            importance_sampling_level=level,
            beta=beta,
            loss_type=loss_type,
            epsilon_low=eps,
            epsilon_high=eps if eps_high is None else eps_high,
            use_vllm=weight is not None,
            vllm_importance_sampling_correction=True,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1,
            max_completion_length=HORIZON,
            _entropy_bonus_enabled=False,
            accelerator=SimpleNamespace(
                gather=same, reduce=same, num_processes=1, pad_across_processes=same
            ),
            _metrics={"train": defaultdict(list)},
        )
        ids, mask = torch.zeros(x.mask.shape, dtype=torch.long), x.mask.long()
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": x.A if by_token else x.A[:, 0],
            "old_per_token_logps": x.mu if weight is None else x.prox,
            "ref_per_token_logps": x.ref,
            "num_items_in_batch": mask.sum(),
        }
        if weight is not None:
            inputs["importance_sampling_ratio"] = trl_weight(x, *weight)
        with default_float64():
            return trainer._compute_loss(stub, None, inputs)

    said = {
        "loss_type": None if loss_type == "gmpo" else loss_type,
        "importance_sampling_level": None if level == "token" else level,
        "epsilon": None if loss_type in ("sapo", "cispo", "vespo") else eps,
        "epsilon_high": eps_high,
        "delta": delta,
        "beta": beta or None,
        "use_bias_correction_kl": bias_kl if beta else None,
        "off_policy_mask_threshold": opsm,
    }
    label = named(
        "TRL",
        trainer.__name__,
        **{name: value for name, value in said.items() if value is not None},
    )
    if weight is not None:
        mode, low, high = weight
        bounds = {"mode": mode} | ({} if low is None else {"clip_min": low}) | {"clip_max": high}
        label += f", vLLM correction `{show(bounds)}`"
    return Call(label, loss)


def trl_weight(x: Padded, mode: str, low: float | None, high: float) -> Tensor:
    """TRL's weight for a sampler that differs from its trainer: `[B, T]`, or `[B, 1]` by row."""
    stub = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    found = lines(
        WEIGHT,
        PREPARE,
        self=stub,
        completion_mask=x.mask.long(),
        tool_mask=None,
        old_per_token_logps=x.prox,
        sampling_per_token_logps=x.mu,
    )
    return found["vllm_importance_sampling_ratio"]


def trl_advantage(scale: str) -> Call:
    """The group advantage of GRPOTrainer; `scale` is its scale_rewards."""

    def value(x) -> Tensor:
        reward, size = x.reward.reshape(-1, 1).clone(), x.reward.shape[1]
        stub = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            scale_rewards=scale,
            reward_weights=torch.ones(1, dtype=F64),
        )
        none = torch.zeros(len(reward), dtype=torch.bool)
        names = {"rewards_per_func": reward, "num_generations": size, "unscorable_mask": none}
        found = lines(GROUP, PREPARE, self=stub, device="cpu", **names)
        return found["advantages"].view_as(x.reward)

    return Call(named("TRL", "GRPOTrainer", scale_rewards=scale), value)


def trl_rloo() -> Call:
    """The leave-one-out advantage of RLOOTrainer."""

    def value(x) -> Tensor:
        found = lines(
            LEAVE_ONE_OUT,
            RLOOTrainer._generate_and_score_completions,
            self=SimpleNamespace(normalize_advantages=False),
            rewards=x.reward.flatten(),
            num_generations=x.reward.shape[1],
        )
        return found["advantages"].view_as(x.reward)

    return Call("TRL `RLOOTrainer`", value)


# ---------------------------------------------------------------- polgrad
def polgrad_loss(label: str, config: polgrad.PolicyLossConfig, old: str = "mu") -> Call:
    """policy_loss for any configuration; the rollout log-probs are mu."""

    def loss(x: Padded) -> Tensor:
        return polgrad.policy_loss(
            config,
            logprobs=x.lp,
            old_logprobs=getattr(x, old),
            advantages=x.A,
            response_mask=x.mask,
            rollout_logprobs=x.mu,
        ).loss

    return Call(f"polgrad `policy_loss`: {label}", loss)


def polgrad_kl(kind: str) -> Call:
    """kl_estimate per token."""

    def value(x):
        return kl_estimate(x.lp, x.ref, KLEstimator[kind], response_mask=x.mask)

    return Call(f"polgrad `kl_estimate`, {kind}", value)


def polgrad_ess(level: str) -> Call:
    """The effective sample size of pi / mu as a share."""

    def value(x: Padded) -> Tensor:
        found = importance_ess(x.lp.detach(), x.mu, x.mask, level=level)
        return torch.tensor(found.ess_ratio, dtype=F64)

    return Call(named("polgrad", "importance_ess", level=level), value)


def polgrad_advantage(function, *config) -> Call:
    """An advantage estimator over group ids."""

    def value(x) -> Tensor:
        group = torch.arange(x.reward.shape[0]).repeat_interleave(x.reward.shape[1])
        return function(x.reward.flatten(), group, *config).view_as(x.reward)

    said = (
        {"scale": config[0].scale} | ({"eps": config[0].eps} if config[0].scale == "std" else {})
        if config
        else {}
    )
    return Call(named("polgrad", function.__name__, **said), value)


# ---------------------------------------------------------------- torchrl
class Table(torch.nn.Module):
    """An actor that exists only because a loss module wants one."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(2, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        """Unused."""
        return self.logits.expand(*x.shape[:-1], -1)


def table_actor() -> ProbabilisticTensorDictSequential:
    """Table as torchrl wants it."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(Table(), in_keys=["obs"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


class Clip(rl.ClipPPOLoss):
    """ClipPPOLoss with both log-probs looked up."""

    def _get_cur_log_prob(self, tensordict, params=None):
        return tensordict["cur" if params is None else "prox"], None, False


class Grpo(GRPOLoss):
    """GRPOLoss with the current log-prob looked up."""

    def _get_cur_log_prob(self, tensordict):
        return tensordict["cur"], SimpleNamespace(mask=tensordict["m"]), False


class Cispo(CISPOLoss):
    """CISPOLoss with the current log-prob looked up."""

    _get_cur_log_prob = Grpo._get_cur_log_prob


def torchrl_clip(*, decoupled: bool, cap: float | None = None, eps=(0.2, 0.2)) -> Call:
    """ClipPPOLoss over the live tokens; decoupled with prox as the delayed actor."""
    with default_float64():
        module = Clip(
            table_actor(),
            None,
            clip_epsilon=eps,
            entropy_bonus=False,
            delay_actor=decoupled,
            max_importance_ratio=cap,
            reduction="mean",
        )
    module.set_keys(sample_log_prob="behav", action="action")

    def loss(x: Padded) -> Tensor:
        A = x.A[x.mask]
        fields = {name: y[x.mask] for name, y in (("cur", x.lp), ("behav", x.mu), ("prox", x.prox))}
        fields |= {"advantage": A.unsqueeze(-1), "action": torch.zeros(A.shape, dtype=torch.long)}
        return module(TensorDict(fields, [len(A)]))["loss_objective"]

    said = {"clip_epsilon": eps, "delay_actor": decoupled}
    said |= {} if cap is None else {"max_importance_ratio": cap}
    return Call(named("torchrl", "ClipPPOLoss", **said), loss)


def torchrl_llm(
    kind: type, aggregation: str = "token_mean", eps=(0.2, 0.2), kl_mask: float | None = None
) -> Call:
    """A loss of torchrl.objectives.llm against mu."""
    with default_float64():
        module = kind(None, clip_epsilon=eps, aggregation=aggregation, kl_mask_threshold=kl_mask)
        module.entropy_bonus = False

    def loss(x: Padded) -> Tensor:
        fields = {
            "cur": x.lp,
            "m": x.mask,
            "advantage": x.A.unsqueeze(-1),
            ("log_probs", "full"): x.mu,
            ("tokens", "full"): torch.zeros(x.mask.shape, dtype=torch.long),
        }
        with default_float64():
            return module(TensorDict(fields, [x.rows])).loss_objective.squeeze()

    said = {"clip_epsilon": eps, "aggregation": aggregation}
    said |= {} if kl_mask is None else {"kl_mask_threshold": kl_mask}
    return Call(named("torchrl", kind.__mro__[1].__name__, **said), loss)


def torchrl_ewma() -> Call:
    """SoftUpdate over a path of one weight: the target after each step `[steps]`."""

    def value(x) -> Tensor:
        with default_float64():
            module = rl.ClipPPOLoss(table_actor(), None, delay_actor=True, entropy_bonus=False)
        update = rl.SoftUpdate(module, eps=x.beta)
        weight = next(iter(module.actor_network_params.values(True, True)))
        target = next(iter(module.target_actor_network_params.values(True, True)))
        with torch.no_grad():
            weight.fill_(float(x.path[0]))
            target.data.fill_(float(x.path[0]))
        found = []
        for theta in x.path[1:]:
            with torch.no_grad():
                weight.fill_(float(theta))
            update.step()
            found.append(target.data[0].clone())
        return torch.stack(found)

    return Call("torchrl `SoftUpdate(eps=beta)`", value)


# ---------------------------------------------------------------- martingale
def martingale_ppo(eps: float) -> Call:
    """ppo_surrogate_loss over the live tokens."""
    f = martingale.corrections.ppo_surrogate_loss

    def loss(x):
        return f(x.lp[x.mask], x.mu[x.mask], x.A[x.mask], eps)

    return Call(named("martingale", "ppo_surrogate_loss", eps=eps), loss)


def martingale_cispo(low: float, high: float) -> Call:
    """cispo_loss over the live tokens."""
    f = martingale.corrections.cispo_loss

    def loss(x):
        return f(x.lp[x.mask], x.mu[x.mask], x.A[x.mask], low, high)

    return Call(named("martingale", "cispo_loss", eps_lo=low, eps_hi=high), loss)


def martingale_tis(cap: float) -> Call:
    """truncated_is as the weight of -A log pi."""

    def loss(x: Padded) -> Tensor:
        lp = x.lp[x.mask]
        w = martingale.corrections.truncated_is(lp.detach(), x.mu[x.mask], cap, F64)
        return -(w * x.A[x.mask] * lp).mean()

    return Call(named("martingale", "truncated_is", cap=cap) + " times -A log pi", loss)


def registries() -> dict[str, tuple[str, set[str]]]:
    """By peer: a name that must be there, and those of all its losses, estimators and settings."""
    source = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss)))
    texts = {x.value for x in ast.walk(source) if isinstance(x, ast.Constant)}

    def settings(*kinds):
        return {f.name for kind in kinds for f in dataclasses.fields(kind)}

    verl_names = {*core.POLICY_LOSS_REGISTRY, *core.ADV_ESTIMATOR_REGISTRY}
    correction = rollout_corr_helper.compute_rollout_correction_and_rejection_mask
    return {
        "verl": (
            "gspo",
            verl_names
            | settings(ActorConfig, PolicyLossConfig, RolloutCorrectionConfig)
            | set(inspect.signature(correction).parameters),
        ),
        "TRL": ("sapo", {x for x in texts if isinstance(x, str)} | settings(GRPOConfig)),
        "polgrad": ("gspo", set(polgrad.ALGORITHMS) | settings(polgrad.PolicyLossConfig)),
        "torchrl": ("GRPOLoss", {*dir(rl), *dir(rl.llm), *inspect.signature(GRPOLoss).parameters}),
        "martingale": ("token_is", set(defendants.BUILTIN)),
    }
