"""One optimizer step of Megatron-Core under a stabilizer of the registry.

    trainer = Trainer(model, bind("sat"), Settings(lr=1e-6))     # model: scaleup.model.build, loaded
    for responses in ...:                                        # Response, the whole batch
        mine = share(responses, micro_batches=4)[trainer.dp_rank]
        result = trainer.step(trainer.collate(mine))

packed responses -> Megatron's schedule -> vocabulary-parallel logits -> simlab.logits -> TokenBatch
-> simlab.fused.terms -> (sum, count) -> Megatron divides by the count of the whole batch.

No loss is written here. The loss does not depend on how the batch is cut into micro-batches and
over ranks, and neither do the whole-batch numbers (SAT's quantile): they come from a forward-only
pass over all micro-batches and, by all-reduces of counts, over the data-parallel ranks.
`Settings.quantile` says when:

    each_step   a forward-only pass before every optimizer step, over the batch of that step: exact
    pre_step    one pass when the rollout batch arrives (`before`), for all optimizer steps on it
    ema         no extra pass: the moving average of what earlier steps saw
    local       each micro-batch by itself; depends on how the batch was cut
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scaleup import QUANTILES, REPLAYS, replay
from scaleup.model import parallel_state
from scaleup.responses import MicroBatch, Response, collate
from simlab.across_steps import ema
from simlab.aggregate import AGGREGATIONS
from simlab.arguments import check_name
from simlab.fused import fuse, terms
from simlab.kl import KL
from simlab.logits import VocabShard, token_log_probs
from simlab.stabilizers import Stabilizer, needs
from simlab.tokens import TokenBatch, on_mask

from megatron.core.distributed import (  # isort: skip  after the shim of scaleup.model
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip


@dataclass(frozen=True)
class Settings:
    """How a step is taken. Raises ValueError for a choice that there is not."""

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
    entropy: bool = True  # report that of pi at every token
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
        found = AGGREGATIONS[self.aggregation]
        if self.aggregation == "seq_mean_token_sum_norm":
            return partial(found, horizon=self.horizon or 0)
        return found


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
    batches: list[
        TokenBatch
    ]  # this rank's micro-batches with logp in the loss; [] off the last stage
    actives: list[Tensor]  # bool [N] for each of `batches`
    entropies: list[Tensor]  # nats [N] for each of `batches`; [] unless asked for


class Trainer:
    """A GPTModel of `scaleup.model.build` with its weights, Megatron's distributed Adam, and a stabilizer.

    Every method is collective: all ranks call it with their own micro-batches, the same number of
    them on each.
    """

    def __init__(self, model: torch.nn.Module, stabilizer: Stabilizer, settings: Settings):
        """Raises ValueError for settings that the model cannot follow."""
        self.stabilizer, self.settings = stabilizer, settings
        self.aggregate = settings.aggregate()
        self._fused = fuse(stabilizer, self.aggregate) if settings.compile else None
        self.config = config = model.config
        if settings.replay != "none":
            replay.routers(model)  # raises
        config.calculate_per_token_loss = True  # (sum, count): exact whatever the layout
        config.variable_seq_lengths = config.pipeline_model_parallel_size > 1
        config.batch_p2p_comm = False
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        )
        self.model = DistributedDataParallel(config, ddp, model)
        config.no_sync_func = self.model.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        how = OptimizerConfig(
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
            how.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        self.optimizer = get_megatron_optimizer(how, [self.model])
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.iteration = 0  # steps, those that changed nothing too; a checkpoint holds it
        self.stats: dict[str, Tensor] | None = None  # the last whole-batch numbers
        self._proximal = "logp_prox" in needs(stabilizer)

    def collate(self, micro_batches: Sequence[Sequence[Response]]) -> list[MicroBatch]:
        """This rank's micro-batches for `before` and `step`. Raises ValueError as `collate`."""
        multiple = parallel_state.get_tensor_model_parallel_world_size()
        device = next(self.model.parameters()).device
        routed = None
        if self.settings.replay == "r3":
            routed = self.config.num_layers, self.config.moe_router_topk
        found = [collate(x, multiple, device, routed) for x in micro_batches]
        for micro in found:
            if routed:
                routes = replay.local_routes(self.model, micro.experts)
                micro.routes, micro.experts = replay.compact(routes, self.config), None
        return found

    # ------------------------------------------------------------ the forward-only pass
    def before(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """The forward-only pass. A micro-batch keeps the log-probs (and, for r2, the routes) of its
        first one. The whole-batch numbers become `self.stats` and are returned, equal on every rank."""
        with torch.no_grad():
            batches = self._schedule(micro_batches, self._look, forward_only=True)
        how = self.settings.quantile
        if how == "local":
            self.stats = {}
        elif how != "ema" or self.stats is None:
            self.stats = self._whole_batch(batches, self.stats)
        return self.stats

    def scores(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """log pi `[N]` of each micro-batch at the model's present weights; [] off the last stage.

        Nothing is kept: routes that r2 would record are forgotten again.
        """
        routes = [micro.routes for micro in micro_batches]
        with torch.no_grad():
            found = self._schedule(
                micro_batches,
                lambda micro, logits, **_: self._score(micro, logits, entropy=False)[0],
                forward_only=True,
            )
        for micro, held in zip(micro_batches, routes, strict=True):
            micro.routes = held
        return found

    def _look(self, micro: MicroBatch, logits: Tensor, **_) -> TokenBatch:
        logp, _ = self._score(micro, logits, entropy=False)
        micro.logp = logp if micro.logp is None else micro.logp
        return self._with_proximal(micro, replace(micro.b, logp=logp))

    def _whole_batch(self, batches: list[TokenBatch], previous: dict | None) -> dict[str, Tensor]:
        """Numbers of all micro-batches and data-parallel ranks; the last stage tells the others."""
        stats = self.stabilizer.stats(batches, self._sum, previous) if self._last_stage else None
        return self._from_last_stage(stats)

    # ------------------------------------------------------------ the step
    def step(self, micro_batches: Sequence[MicroBatch]) -> Step:
        """One optimizer step on this rank's micro-batches.

        Raises ValueError where `quantile="pre_step"` and `before` has never been called, or the
        stabilizer or the KL term misses a field.
        """
        how = self.settings
        if how.quantile == "pre_step" and self.stats is None:
            raise ValueError(
                "quantile pre_step: call before(micro_batches) ahead of the first step"
            )
        if self._needs_pass(micro_batches):
            self.before(micro_batches)
        stats = self.stats or {}
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self._schedule(micro_batches, partial(self._loss, stats))
        loss, shown = self._from_last_stage(self._summary(found) if self._last_stage else None)
        norm, updated = self._update(stats)
        self.iteration += 1
        batches = [x["b"] for x in found]
        if how.quantile == "ema":
            raw = self._whole_batch(batches, None)
            mixed = {k: ema(stats.get(k), x, how.decay) for k, x in raw.items()}
            self.stats = {k: torch.where(x.isfinite(), x, raw[k]) for k, x in mixed.items()}
        return Step(
            loss,
            norm,
            *(int(shown.pop(name)) for name in ("count", "tokens", "active")),
            stats,
            shown,
            updated,
            batches,
            [x["active"] for x in found],
            [x["entropy"] for x in found if x["entropy"] is not None],
        )

    def _needs_pass(self, micro_batches: Sequence[MicroBatch]) -> bool:
        how, fresh = self.settings, [m.logp is None for m in micro_batches]
        prox = self._proximal and any(m.b.logp_prox is None for m in micro_batches)
        if how.quantile == "each_step" and self.stabilizer.whole_batch:
            return True
        first = how.quantile == "ema" and self.stats is None
        routes = how.replay == "r2" and any(m.routes is None for m in micro_batches)
        # the schedule of a stage is collective, and only the last stage has log-probs
        return first or routes or (prox and self._from_last_stage(any(fresh)))

    def _with_proximal(self, micro: MicroBatch, b: TokenBatch) -> TokenBatch:
        """pi before the step as the proximal policy, where the response brought none."""
        if not self._proximal or b.logp_prox is not None:
            return b
        return replace(b, logp_prox=micro.logp)

    def _loss(self, stats: dict, micro: MicroBatch, logits: Tensor):
        """What Megatron's schedule calls: (minus the sum, the count, a record)."""
        how = self.settings
        logp, entropy = self._score(micro, logits, how.entropy)
        b = self._with_proximal(micro, replace(micro.b, logp=logp))
        if how.quantile == "local":
            stats = self.stabilizer.stats([b])
            if "lr_factor" in stats:
                raise ValueError(
                    f"{self.stabilizer.name} has no learning rate for each micro-batch"
                )
        run = self._fused or partial(terms, self.stabilizer, self.aggregate, True)
        total, count, shown, reducers, active = run(b, **stats)
        if how.kl_coef:
            ref = b.need("logp_ref", "the KL term")
            penalty = KL[how.kl](on_mask(b, b.logp), on_mask(b, ref))
            kl, _ = self.aggregate(penalty, b)  # linear: S - coef * penalty, aggregated
            total = total - how.kl_coef * kl
            shown = shown | {"kl": penalty.detach().sum() / b.mask.sum().clamp(min=1)}
        record = {
            "total": total.detach(),
            "count": count,
            "b": replace(b, logp=logp.detach()),
            "active": active,
            "entropy": entropy,
            "shown": shown,
            "how": reducers,
            "screened": micro.screened,
        }
        return -total, count.to(torch.int), record

    def _summary(self, found: list[dict]) -> tuple[float, dict[str, float]]:
        """Loss and diagnostics of the whole batch, from the records of this rank's micro-batches."""
        tokens = [x["b"].mask.sum() for x in found]
        sums = {"total": 0.0, "count": 0, "tokens": 0, "active": 0, "screened": 0}
        largest: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        for x, n in zip(found, tokens, strict=True):
            sums["total"] += x["total"].double()
            sums["count"] += x["count"]
            sums["tokens"] += n
            sums["active"] += x["active"].sum()
            sums["screened"] += x["screened"]
            shown = dict(x["shown"])
            if x["entropy"] is not None:
                shown["entropy"] = torch.where(x["b"].mask, x["entropy"], 0).sum() / n.clamp(min=1)
            for name, value in shown.items():
                how = x["how"].get(name, "mean")
                if how == "mean":
                    means[name] = means.get(name, 0) + value.double() * n
                else:
                    sign = -1 if how == "min" else 1
                    value = torch.where(n > 0, sign * value.double(), -torch.inf)
                    largest[name] = torch.maximum(largest.get(name, value), value)
        device = tokens[0].device
        values = [torch.as_tensor(x, device=device).double() for x in (sums | means).values()]
        summed = self._sum(torch.stack(values)).tolist()
        sums = dict(zip([*sums, *means], summed, strict=True))
        shown = {name: sums.pop(name) / max(sums["tokens"], 1) for name in means}
        if largest:
            tops = _reduced(torch.stack(list(largest.values())), dist.ReduceOp.MAX, _dp())
            signs = [-1 if found[0]["how"][name] == "min" else 1 for name in largest]
            tops = [
                s * x if sums["tokens"] else 0.0 for s, x in zip(signs, tops.tolist(), strict=True)
            ]
            shown |= dict(zip(largest, tops, strict=True))
        loss = -sums.pop("total") / max(sums["count"], 1)
        return loss, shown | sums

    def _update(self, stats: dict) -> tuple[float, bool]:
        """Clip and step; a gradient that is not finite changes nothing. (norm, whether it stepped)"""
        self.optimizer.prepare_grads()
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

    # ------------------------------------------------------------ Megatron's schedule
    def _schedule(
        self, micro_batches: Sequence[MicroBatch], loss: Callable, forward_only: bool = False
    ) -> list:
        """Run every micro-batch through the pipeline; what `loss` recorded, on the last stage."""
        mode = self.settings.replay

        def forward_step(iterator, model):
            micro = next(iterator)
            recording = mode == "r2" and micro.routes is None
            if recording:
                replay.record(model)
            elif mode != "none":
                replay.use(model, [x.to(micro.target.device, torch.int64) for x in micro.routes])
            packed = micro.packed
            logits = model(packed.tokens, packed.positions, None, packed_seq_params=packed.params)
            if recording:
                micro.routes = replay.compact(replay.recorded(model), self.config)
            elif mode != "none":
                replay.recompute(model)
            return logits, partial(loss, micro)

        with replay.replaying(self.model) if mode != "none" else nullcontext():
            found = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(micro_batches),
                model=[self.model],
                num_microbatches=len(micro_batches),
                seq_length=micro_batches[0].packed.tokens.shape[1],
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return found if self._last_stage else []

    def _score(
        self, micro: MicroBatch, logits: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """log pi of the sampled tokens `[N]` and, on request, the entropy, without gradient."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        shard = None
        if ranks > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            start = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
            shard = VocabShard(
                start,
                lambda x: _reduced(x, dist.ReduceOp.MAX, group),
                lambda x: _reduced(x, dist.ReduceOp.SUM, group),
            )
        scores = token_log_probs(
            logits,
            micro.target,
            temperature=self.settings.temperature,
            entropy=entropy,
            parallel=shard,
        )
        return scores.logp[0][micro.at], scores.entropy[0][micro.at].detach() if entropy else None

    # ------------------------------------------------------------ ranks
    @property
    def _last_stage(self) -> bool:
        return parallel_state.is_pipeline_last_stage()

    def _sum(self, x: Tensor) -> Tensor:
        """Sum over the data-parallel ranks: the `reduce` of the core."""
        return _reduced(x.clone(), dist.ReduceOp.SUM, _dp())

    def whole(self, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Sums and maxima over the data-parallel ranks of the last stage, on every rank; float64 on the host."""
        if self._last_stage:
            device = next(self.model.parameters()).device
            sums = self._sum(sums.to(device)).cpu()
            largest = _reduced(largest.to(device), dist.ReduceOp.MAX, _dp()).cpu()
        return self._from_last_stage((sums, largest))

    def _from_last_stage(self, value):
        """What the last pipeline stage has, on every stage."""
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return value
        held = [value]
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast_object_list(held, source, group=group)
        return held[0]


def _dp():
    return parallel_state.get_data_parallel_group()


def _reduced(x: Tensor, op, group) -> Tensor:
    """The all-reduce of a contiguous x, in place."""
    x = x.contiguous()
    dist.all_reduce(x, op, group=group)
    return x
