"""One optimizer step of Megatron-Core under a stabilizer of the registry.

    trainer = Trainer(model, bind("sat"), Settings(lr=1e-6))     # model: megatron.build, loaded
    for responses in ...:                                        # Response, the whole batch
        mine = share(responses, micro_batches=4)[trainer.dp_rank]
        result = trainer.step(trainer.collate(mine))

packed responses -> Megatron's schedule -> vocabulary-parallel logits -> simlab.core.logits -> TokenBatch
-> simlab.stabilizers.fused.terms -> (sum, count) -> Megatron divides by the count of the whole batch.

No loss is written here. The loss does not depend on how the batch is cut into micro-batches and
over ranks, and neither do the whole-batch numbers (SAT's quantile): they come from a forward-only
pass over all micro-batches and, by all-reduces of counts, over the data-parallel ranks.
`Settings.quantile` says when that pass is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from scaleup.models.megatron import parallel_state
from scaleup.trainer import routing_replay
from scaleup.trainer.forward import schedule, score
from scaleup.trainer.reduce import batch_sum, from_last_stage, is_last_stage, shard, world_sum
from scaleup.trainer.responses import MicroBatch, Response, collate
from scaleup.trainer.settings import Settings
from scaleup.trainer.summary import Record, summarize
from simlab.core.kl import KL
from simlab.core.logits import TokenScores
from simlab.core.state import cosine, ema
from simlab.core.tokens import TokenBatch, on_mask
from simlab.stabilizers import Stabilizer, check_average, needs
from simlab.stabilizers.fused import fuse, terms

from megatron.core.distributed import (  # isort: skip  after the shim of megatron.py
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # isort: skip


class Step(NamedTuple):
    """What `Trainer.step` returns. Numbers are those of the whole batch, equal on every rank."""

    loss: float  # KL term included
    grad_norm: float  # before clipping
    count: int  # what the loss was divided by: tokens or responses
    tokens: int  # in the mask
    active: int  # whose log-prob received a gradient from the stabilizer
    stats: dict[str, Tensor]  # whole-batch numbers of this step; {} for `local`
    diagnostics: dict[str, float]
    updated: bool  # False: the gradient was not finite, and nothing was changed
    batches: list[TokenBatch]  # this rank's, with logp of the loss; [] off the last stage
    actives: list[Tensor]  # bool [N] for each of `batches`
    entropies: list[Tensor]  # nats [N] for each of `batches`; [] unless asked for


def with_scores(b: TokenBatch, scores: TokenScores) -> TokenBatch:
    """b with the log-probs of a pass, those of its head among them."""
    b = replace(b, logp=scores.logp)
    return b if scores.head is None else replace(b, topk=scores.head)


class Trainer:
    """A GPTModel of `megatron.build` with its weights, Megatron's distributed Adam, and a stabilizer.

    Every method is collective: all ranks call it with their own micro-batches, the same number of
    them on each.
    """

    def __init__(self, model: torch.nn.Module, stabilizer: Stabilizer, settings: Settings):
        """Raises ValueError for settings that the model or the method cannot follow."""
        self.stabilizer, self.settings = stabilizer, settings
        self.aggregate = settings.aggregate()
        if settings.quantile == "ema":
            check_average(stabilizer)
        self._fused = fuse(stabilizer, self.aggregate) if settings.compile else None
        self.config = config = model.config
        if settings.replay != "none":
            routing_replay.routers(model)  # raises
        config.calculate_per_token_loss = True  # (sum, count): exact whatever the layout
        config.variable_seq_lengths = config.pipeline_model_parallel_size > 1
        config.batch_p2p_comm = False
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        )
        self.model = DistributedDataParallel(config, ddp, model)
        config.no_sync_func = self.model.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        adam = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.lr,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            weight_decay=settings.weight_decay,
            clip_grad=settings.grad_clip,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
            optimizer_cpu_offload=settings.optimizer_offload,
            optimizer_offload_fraction=float(settings.optimizer_offload),
        )
        if settings.optimizer_offload:
            # No float32 weights on the GPU. The field behind it, use_precision_aware_optimizer,
            # fails without Transformer Engine, whose Adam this path does not use.
            adam.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        self.optimizer = get_megatron_optimizer(adam, [self.model])
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.iteration = 0  # steps, those that changed nothing too; a checkpoint holds it
        self.stats: dict[str, Tensor] | None = None  # the last whole-batch numbers
        self._gradient: dict[str, Tensor] | None = None  # of the last step, for its cosine
        self._proximal = {"logp_prox", "entropy_prox"} & {*needs(stabilizer)}

    def collate(self, micro_batches: Sequence[Sequence[Response]]) -> list[MicroBatch]:
        """This rank's micro-batches for `before` and `step`. Raises ValueError as `collate`."""
        multiple = parallel_state.get_tensor_model_parallel_world_size()
        device = next(self.model.parameters()).device
        routed = None
        if self.settings.replay == "r3":
            routed = self.config.num_layers, self.config.moe_router_topk
        collated = [collate(x, multiple, device, routed, self.settings.head) for x in micro_batches]
        for micro in collated:
            if routed:
                routes = routing_replay.local_routes(self.model, micro.experts)
                micro.routes, micro.experts = routing_replay.compact(routes, self.config), None
        return collated

    # ------------------------------------------------------------ the forward-only pass
    def before(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """The forward-only pass. A micro-batch keeps the log-probs (and, for r2, the routes) of its
        first one. The whole-batch numbers become `self.stats` and are returned, equal on every rank."""
        batches = self.token_batches(micro_batches)
        quantile = self.settings.quantile
        if quantile == "local":
            self.stats = {}
        elif quantile != "ema" or self.stats is None:
            self.stats = self._whole_batch(batches, self.stats)
        return self.stats

    def token_batches(self, micro_batches: Sequence[MicroBatch]) -> list[TokenBatch]:
        """The forward-only pass of `before` alone: what the loss would see; [] off the last stage."""

        def look(micro: MicroBatch, logits: Tensor, **_) -> TokenBatch:
            by_entropy = "entropy_prox" in self._proximal
            scores = score(micro, logits, self.settings.temperature, by_entropy, head=True)
            if micro.logp is None:
                micro.logp, micro.entropy = scores.logp, scores.entropy
            return self._with_proximal(micro, with_scores(micro.b, scores))

        return self._forward_only(micro_batches, look)

    def scores(self, micro_batches: Sequence[MicroBatch]) -> list[TokenScores]:
        """log pi `[N]` of each micro-batch at the model's present weights, and the entropy where the
        stabilizer reads it; [] off the last stage.

        Nothing is kept: routes that r2 would record are forgotten again.
        """

        def log_probs(micro: MicroBatch, logits: Tensor, **_) -> TokenScores:
            by_entropy = "entropy_prox" in self._proximal
            return score(micro, logits, self.settings.temperature, by_entropy)

        routes = [micro.routes for micro in micro_batches]
        scores = self._forward_only(micro_batches, log_probs)
        for micro, earlier in zip(micro_batches, routes, strict=True):
            micro.routes = earlier
        return scores

    def _forward_only(self, micro_batches: Sequence[MicroBatch], collect) -> list:
        replay = self.settings.replay
        with torch.no_grad():
            return schedule(self.model, micro_batches, collect, replay, forward_only=True)

    def _whole_batch(self, batches: list[TokenBatch], previous: dict | None) -> dict[str, Tensor]:
        """Numbers of all micro-batches and data-parallel ranks; the last stage tells the others."""
        stats = self.stabilizer.stats(batches, batch_sum, previous) if is_last_stage() else None
        return from_last_stage(stats)

    # ------------------------------------------------------------ the step
    def step(self, micro_batches: Sequence[MicroBatch]) -> Step:
        """One optimizer step on this rank's micro-batches.

        Raises ValueError where `quantile="pre_step"` and `before` has never been called, or the
        stabilizer or the KL term misses a field.
        """
        settings = self.settings
        if settings.quantile == "pre_step" and self.stats is None:
            raise ValueError(
                "quantile pre_step: call before(micro_batches) ahead of the first step"
            )
        if self._needs_pass(micro_batches):
            self.before(micro_batches)
        stats = self.stats or {}
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        records = schedule(self.model, micro_batches, partial(self._loss, stats), settings.replay)
        loss, numbers = from_last_stage(summarize(records) if is_last_stage() else None)
        norm, updated = self._update(stats, numbers)
        self.iteration += 1
        batches = [x.b for x in records]
        if settings.quantile == "ema":
            raw = self._whole_batch(batches, None)
            mixed = {k: ema(stats.get(k), x, settings.decay) for k, x in raw.items()}
            self.stats = {k: torch.where(x.isfinite(), x, raw[k]) for k, x in mixed.items()}
        return Step(
            loss,
            norm,
            *(int(numbers.pop(name)) for name in ("count", "tokens", "active")),
            stats,
            numbers,
            updated,
            batches,
            [x.active for x in records],
            [x.entropy for x in records if x.entropy is not None],
        )

    def _needs_pass(self, micro_batches: Sequence[MicroBatch]) -> bool:
        settings, fresh = self.settings, [m.logp is None for m in micro_batches]
        prox = any(getattr(m.b, x) is None for m in micro_batches for x in self._proximal)
        if settings.quantile == "each_step" and self.stabilizer.whole_batch:
            return True
        first = settings.quantile == "ema" and self.stats is None
        routes = settings.replay == "r2" and any(m.routes is None for m in micro_batches)
        # the schedule of a stage is collective, and only the last stage has log-probs
        return first or routes or (prox and from_last_stage(any(fresh)))

    def _with_proximal(self, micro: MicroBatch, b: TokenBatch) -> TokenBatch:
        """pi before the step as the proximal policy, where the response brought none."""
        before = {"logp_prox": micro.logp, "entropy_prox": micro.entropy}
        lacking = {x: before[x] for x in self._proximal if getattr(b, x) is None}
        return replace(b, **lacking) if lacking else b

    def _loss(
        self, stats: dict, micro: MicroBatch, logits: Tensor
    ) -> tuple[Tensor, Tensor, Record]:
        """What Megatron's schedule calls: (minus the sum, the count, a record)."""
        settings = self.settings
        scores = score(micro, logits, settings.temperature, settings.entropy, head=True)
        b = self._with_proximal(micro, with_scores(micro.b, scores))
        if settings.quantile == "local":
            stats = self.stabilizer.stats([b])
            if "lr_factor" in stats:
                raise ValueError(
                    f"{self.stabilizer.name} has no learning rate for each micro-batch"
                )
        loss = self._fused or partial(terms, self.stabilizer, self.aggregate, True)
        total, count, diagnostics, reducers, active = loss(b, **stats)
        if settings.kl_coef:
            ref = b.need("logp_ref", "the KL term")
            penalty = KL[settings.kl](on_mask(b, b.logp), on_mask(b, ref))
            kl, _ = self.aggregate(penalty, b)  # linear: S - coef * penalty, aggregated
            total = total - settings.kl_coef * kl
            mean = penalty.detach().sum() / b.mask.sum().clamp(min=1)
            diagnostics = diagnostics | {"kl": mean}
        seen = with_scores(b, TokenScores(*(None if x is None else x.detach() for x in scores)))
        parts = total.detach(), count, seen, active, scores.entropy, diagnostics, reducers
        return -total, count.to(torch.int), Record(*parts, micro.screened)

    def _update(self, stats: dict, numbers: dict[str, float]) -> tuple[float, bool]:
        """Clip and step; a gradient that is not finite changes nothing. (norm, whether it stepped)"""
        self.optimizer.prepare_grads()
        if self.settings.grad_cosine:
            now = shard(self.optimizer)
            numbers["grad_cosine"] = float(cosine(now, self._gradient, world_sum))
            self._gradient = {name: x.clone() for name, x in now.items()}
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm, False
        factor = float(stats.get("lr_factor", 1.0))  # Adam's step is linear in the learning rate
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return norm, True
