"""A trainer rank of a run, as a Ray actor: the model and the Trainer of one recipe.

Every method is collective: the controller calls it on all ranks with the same arguments, and arguments
and results are plain values. A rank takes its own share of a batch; numbers of the whole batch are the
same on every rank.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import polars as pl
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from scaleup.models import weights
from scaleup.models.megatron import Layout, build, parallel_state, start
from scaleup.recipe import RunSpec
from scaleup.trainer import checkpoint
from scaleup.trainer.reduce import batch_sum, from_last_stage
from scaleup.trainer.responses import MicroBatch, Response, share_by_tokens
from scaleup.trainer.settings import Settings
from scaleup.trainer.trainer import Trainer
from simlab.stabilizers import needs
from simlab.study.files import write
from simlab.study.measure import measure
from simlab.token_log.rows import experts_digest, from_batch


class Rank:
    """One process of the trainer group.

    Raises ValueError for a model or a layout that Megatron-Core or the recipe cannot follow.
    """

    def address(self, ranks: int) -> str:
        """Where `ranks` processes may meet: a free port of this machine."""
        host = "127.0.0.1" if ranks == 1 else ray.util.get_node_ip_address()
        with socket.socket() as s:
            s.bind(("", 0))
            return f"tcp://{host}:{s.getsockname()[1]}"

    def join(self, rank: int, ranks: int, address: str, timeout: float) -> None:
        """Meet the others; `timeout` in seconds holds for every collective of torch."""
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "gloo":
            torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            init_method=address,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )

    def prepare(self, spec: RunSpec, folder: str) -> int:
        """Build the model of checkpoint `folder` and a new trainer; returns the parameters on this rank."""
        self.spec, training, setup = spec, spec.training, spec.world.trainer
        hf, layout = weights.read_config(folder), Layout(tp=setup.tp, pp=setup.pp, ep=setup.ep)
        overrides = {"moe_enable_routing_replay": True} if spec.replay != "none" else {}
        if setup.recompute:
            overrides |= {"recompute_granularity": "full", "recompute_method": "uniform"}
            overrides |= {"recompute_num_layers": 1}
        start(layout, seed=spec.seed)
        self.trainer = self.reference = self.kept = None  # an earlier run's: their memory is needed
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        model = build(hf, layout, dtype=getattr(torch, setup.dtype), **overrides)
        weights.load(model, weights.read(folder))
        self.trainer = Trainer(
            model,
            spec.arm.stabilizer,
            Settings(
                lr=training.lr,
                grad_clip=training.grad_clip,
                aggregation=training.aggregation,
                horizon=spec.world.max_new_tokens,
                quantile=setup.quantile,
                kl=training.kl,
                kl_coef=training.kl_coef,
                temperature=spec.world.temperature,
                head=spec.head,
                grad_cosine=setup.grad_cosine,
                replay=spec.replay,
                optimizer_offload=setup.optimizer_offload,
            ),
        )
        referenced = training.kl_coef or "logp_ref" in needs(self.trainer.stabilizer)
        first = self._weights() if referenced or setup.keep_weights else None
        self.reference = first if referenced else None
        self.kept = {0: first} if setup.keep_weights else {}
        return sum(p.numel() for p in model.parameters())

    # ------------------------------------------------------------ one step
    def step(
        self, responses: Sequence[Response], log: dict[str, Sequence] | None = None
    ) -> tuple[dict, pl.DataFrame | None]:
        """Train on the batch of a step: numbers of the whole batch, and this rank's rows of the token log.

        `log` asks for rows and holds columns of them, one entry for every response.
        """
        trainer, limit = self.trainer, self.spec.world.trainer.tokens
        replicas = parallel_state.get_data_parallel_world_size()
        mine = share_by_tokens(responses, limit, replicas)[trainer.dp_rank]
        micro_batches = trainer.collate(mine)
        version = trainer.iteration
        if self.reference is not None:
            for micro, scores in self._scores(micro_batches, self.reference):
                micro.b = replace(micro.b, logp_ref=scores.logp)
        if self.spec.arm.proximal(self.spec.training.proximal) == "mu":
            for micro in micro_batches:
                micro.b = replace(micro.b, logp_prox=micro.b.logp_mu)
        before = self._before(micro_batches) if self.kept else None
        result = trainer.step(micro_batches)
        if self.kept:
            oldest = version - self.spec.regime.largest_age + 1
            self.kept = {v: w for v, w in self.kept.items() if v >= oldest}
            self.kept[trainer.iteration] = self._weights()
        numbers = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "updated": result.updated,
            "micro_batches": len(micro_batches) * replicas,
        } | {name: float(x) for name, x in result.stats.items() if x.numel() == 1}
        numbers |= result.diagnostics | measured(result.batches, result.actives, before)
        rows = None
        if (
            log is not None
            and result.batches
            and parallel_state.get_tensor_model_parallel_rank() == 0
        ):
            rows = self._rows(responses, mine, micro_batches, result, before, version, log)
        return numbers, rows

    def _before(self, micro_batches: list[MicroBatch]) -> list[Tensor]:
        """Log-probs `[N]` of each micro-batch under the trainer's weights that sampled each token."""
        used = {int(v) for micro in micro_batches for v in micro.b.age.unique()}
        ages = [None] * parallel_state.get_data_parallel_world_size()  # of each rank's tokens
        dist.all_gather_object(ages, used, group=parallel_state.get_data_parallel_group())
        before = [torch.full_like(micro.b.logp, torch.nan) for micro in micro_batches]
        entropies = [x.clone() for x in before]
        for age in sorted(set().union(*ages)):
            old = self.kept[self.trainer.iteration - age]
            for i, (micro, scores) in enumerate(self._scores(micro_batches, old)):
                before[i] = torch.where(micro.b.age == age, scores.logp, before[i])
                if scores.entropy is not None:
                    entropies[i] = torch.where(micro.b.age == age, scores.entropy, entropies[i])
        if self.spec.arm.proximal(self.spec.training.proximal) == "rollout":
            read = "entropy_prox" in needs(self.spec.arm.stabilizer)
            for micro, logp, entropy in zip(micro_batches, before, entropies, strict=True):
                more = {"entropy_prox": entropy} if read else {}
                micro.b = replace(micro.b, logp_prox=logp, **more)
        return before

    def _scores(self, micro_batches, other: list[Tensor]):
        """(micro-batch, its scores) under other weights; nothing on stages before the last."""
        now = self._weights()
        self._put(other)
        scores = self.trainer.scores(micro_batches)
        self._put(now)
        return list(zip(micro_batches, scores, strict=False))

    def _weights(self) -> list[Tensor]:
        """A copy of this rank's weights on the CPU."""
        return [p.detach().to("cpu", copy=True) for p in self.trainer.model.parameters()]

    @torch.no_grad()
    def _put(self, other: list[Tensor]) -> None:
        for p, x in zip(self.trainer.model.parameters(), other, strict=True):
            p.copy_(x)

    def _rows(self, responses, mine, micro_batches, result, before, version, log) -> pl.DataFrame:
        """Rows of this rank's responses, numbered as in the batch of the step."""
        number = {id(r): i for i, r in enumerate(responses)}
        frames = []
        for i, (shared, micro) in enumerate(zip(mine, micro_batches, strict=True)):
            if not shared:
                continue
            numbers = [number[id(r)] for r in shared]
            more = {"trainer_logprobs_step": micro.logp} if micro.logp is not None else {}
            if before is not None:
                more["trainer_logprobs_before"] = before[i]
            if micro.head is not None:
                more["top_token_ids"] = micro.head
            if result.entropies:
                more["entropy"] = result.entropies[i]
            if shared[0].experts is not None:
                more["routed_experts_digest"] = [experts_digest(r.experts) for r in shared]
            frame = from_batch(
                result.batches[i],
                step=version,
                trainer_version=version,
                token_ids=micro.target[0, micro.at],
                group=torch.tensor([log["group"][j] for j in numbers]),
                reward=torch.tensor([log["reward"][j] for j in numbers], dtype=torch.float64),
                finish_reason=[log["finish_reason"][j] for j in numbers],
                prompt_ids=[r.tokens[: r.prompt].tolist() for r in shared],
                **more,
            )
            frames.append(frame.with_columns(response=pl.Series(numbers, dtype=pl.Int64)))
        return pl.concat(frames, how="vertical_relaxed") if frames else None

    # ------------------------------------------------------------ weights and state
    def export(self) -> tuple[bool, dict[str, Tensor]]:
        """True, and on rank 0 the whole checkpoint by its Hugging Face names."""
        tensors, first = {}, dist.get_rank() == 0
        for name, tensor in weights.export(self.trainer.model):
            if first:
                tensors[name] = tensor.cpu()
        return True, tensors

    def save(self, folder: str) -> str:
        """A checkpoint; the path of it. Kept weights are for the same layout only."""
        path = checkpoint.save(folder, self.trainer)
        if self.kept:
            write(self._kept_file(path), lambda part: torch.save(self.kept, part))
        return str(path)

    def load(self, path: str) -> None:
        """Go on at a checkpoint of `save`."""
        checkpoint.load(path, self.trainer)
        if self.kept:
            self.kept = torch.load(self._kept_file(path), weights_only=True)

    def _kept_file(self, path: str | Path) -> Path:
        """Old weights that the next steps still ask for."""
        return Path(path) / f"kept_rank{dist.get_rank()}.pt"


def measured(batches: list, actives: list[Tensor], before: list[Tensor] | None) -> dict[str, float]:
    """The shared columns of docs/results.md, over all micro-batches and ranks; equal on every rank."""
    numbers = None
    if batches:
        columns = measure(batches, actives, batch_sum, before)
        numbers = {name: x.item() for name, x in columns.items()}
    return from_last_stage(numbers)
