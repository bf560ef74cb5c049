"""A trainer rank of a run: a model and a Trainer of one recipe, under calls that plain values cross.

Every method is collective: the controller calls it on all ranks with the same arguments. A rank
takes its share of a batch by itself, and what the whole batch says comes back from rank 0.
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

from scaleup import checkpoint, weights
from scaleup.model import Layout, build, parallel_state, start
from scaleup.recipe import RunSpec
from scaleup.responses import MicroBatch, Response, share_by_tokens
from scaleup.train import Settings, Trainer
from simlab.page import write
from simlab.token_rows import experts_digest, from_batch


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
        self.spec, how, at = spec, spec.training, spec.world.trainer
        hf, layout = weights.read_config(folder), Layout(tp=at.tp, pp=at.pp, ep=at.ep)
        overrides = {"moe_enable_routing_replay": True} if spec.replay != "none" else {}
        if at.recompute:
            overrides |= {"recompute_granularity": "full", "recompute_method": "uniform"}
            overrides |= {"recompute_num_layers": 1}
        start(layout, seed=spec.seed)
        self.trainer = self.reference = self.kept = (
            None  # of an earlier run, whose memory this needs
        )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        model = build(hf, layout, dtype=getattr(torch, at.dtype), **overrides)
        weights.load(model, weights.read(folder))
        self.trainer = Trainer(
            model,
            spec.arm.stabilizer,
            Settings(
                lr=how.lr,
                grad_clip=how.grad_clip,
                aggregation=how.aggregation,
                horizon=spec.world.max_new_tokens,
                quantile=at.quantile,
                kl=how.kl,
                kl_coef=how.kl_coef,
                temperature=spec.world.temperature,
                replay=spec.replay,
                optimizer_offload=at.optimizer_offload,
            ),
        )
        first = self._weights() if how.kl_coef or at.keep_weights else None
        self.reference = first if how.kl_coef else None
        self.kept = {0: first} if at.keep_weights else {}
        return sum(p.numel() for p in model.parameters())

    # ------------------------------------------------------------ one step
    def step(
        self, responses: Sequence[Response], log: dict[str, Sequence] | None = None
    ) -> tuple[dict, pl.DataFrame | None]:
        """Train on the batch of a step: numbers of the whole batch, and this rank's rows of the token log.

        `log` asks for rows and holds columns of them, one entry for every response.
        """
        trainer, at = self.trainer, self.spec.world.trainer
        replicas = parallel_state.get_data_parallel_world_size()
        mine = share_by_tokens(responses, at.tokens, replicas)[trainer.dp_rank]
        micro_batches = trainer.collate(mine)
        version = trainer.iteration
        if self.reference is not None:
            for micro, logp in self._scores(micro_batches, self.reference):
                micro.b = replace(micro.b, logp_ref=logp)
        before = self._before(micro_batches) if self.kept else None
        found = trainer.step(micro_batches)
        if self.kept:
            oldest = version - self.spec.regime.largest_age + 1
            self.kept = {v: w for v, w in self.kept.items() if v >= oldest}
            self.kept[trainer.iteration] = self._weights()
        numbers = {
            "loss": found.loss,
            "grad_norm": found.grad_norm,
            "updated": found.updated,
            "tokens": found.tokens,
            "active": found.active / max(found.tokens, 1),
            "micro_batches": len(micro_batches) * replicas,
        } | {name: float(x) for name, x in found.stats.items() if x.numel() == 1}
        numbers |= found.diagnostics | self._mismatch(found.batches, found.actives, before)
        rows = None
        if (
            log is not None
            and found.batches
            and parallel_state.get_tensor_model_parallel_rank() == 0
        ):
            rows = self._rows(responses, mine, micro_batches, found, before, version, log)
        return numbers, rows

    def _before(self, micro_batches: list[MicroBatch]) -> list[Tensor]:
        """Log-probs `[N]` of each micro-batch under the trainer's weights that sampled each token."""
        used = {int(v) for micro in micro_batches for v in micro.b.age.unique()}
        held = [None] * parallel_state.get_data_parallel_world_size()
        dist.all_gather_object(held, used, group=parallel_state.get_data_parallel_group())
        found = [torch.full_like(micro.b.logp, torch.nan) for micro in micro_batches]
        for age in sorted(set().union(*held)):
            old = self.kept[self.trainer.iteration - age]
            for i, (micro, logp) in enumerate(self._scores(micro_batches, old)):
                found[i] = torch.where(micro.b.age == age, logp, found[i])
        if self.spec.arm.proximal(self.spec.training) == "rollout":
            for micro, logp in zip(micro_batches, found, strict=True):
                micro.b = replace(micro.b, logp_prox=logp)
        return found

    def _scores(self, micro_batches, held: list[Tensor]):
        """(micro-batch, log-probs `[N]`) under other weights; none off the last stage."""
        now = self._weights()
        self._put(held)
        logps = self.trainer.scores(micro_batches)
        self._put(now)
        return list(zip(micro_batches, logps, strict=False))

    def _weights(self) -> list[Tensor]:
        return [p.detach().to("cpu", copy=True) for p in self.trainer.model.parameters()]

    @torch.no_grad()
    def _put(self, held: list[Tensor]) -> None:
        for p, x in zip(self.trainer.model.parameters(), held, strict=True):
            p.copy_(x)

    def _mismatch(
        self, batches: list, actives: list[Tensor], before: list[Tensor] | None
    ) -> dict[str, float]:
        """d = log pi - log mu over the tokens of the whole batch, its two parts where known, and the cut.

        d_bar = mean |d|; k1, k3: estimators of KL(mu || pi); d_policy: the trainer now against the
        trainer at the weights that sampled the token; d_engine: that trainer against the engine;
        cut: share of tokens that have an advantage and no gradient (the simulator's `cut`).
        """
        sums, largest = torch.zeros(9, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        for i, (b, active) in enumerate(zip(batches, actives, strict=True)):
            logp, mu, age = (x[b.mask].double() for x in (b.logp, b.logp_mu, b.age))
            cut = ((b.advantage != 0) & ~active)[b.mask].double()
            old = mu if before is None else before[i][b.mask].double()
            d = logp - mu
            k3 = d.clamp(max=70).exp() - 1 - d
            parts = (logp - old).abs(), (old - mu).abs()
            terms = d.abs(), d.square(), -d, k3, age, cut, *parts
            of_token = torch.stack([torch.ones_like(d), *terms])
            sums += of_token.sum(1).cpu()
            if d.numel():
                largest = torch.maximum(largest, of_token[[1, 5]].amax(1).cpu())
        sums, largest = self.trainer.whole(sums, largest)
        n = max(float(sums[0]), 1.0)
        names = ("d_bar", "d_square", "kl_k1", "kl_k3", "age", "cut", "d_policy", "d_engine")
        found = dict(zip(names, (sums[1:] / n).tolist(), strict=True))
        if before is None:
            del found["d_policy"], found["d_engine"]
        return found | {"d_max": float(largest[0]), "age_max": int(largest[1])}

    def _rows(self, responses, mine, micro_batches, found, before, version, log) -> pl.DataFrame:
        """Rows of this rank's responses, numbered as in the batch of the step."""
        number = {id(r): i for i, r in enumerate(responses)}
        frames = []
        for i, (micro, held) in enumerate(zip(mine, micro_batches, strict=True)):
            if not micro:
                continue
            at = [number[id(r)] for r in micro]
            more = {"trainer_logprobs_step": held.logp} if held.logp is not None else {}
            if before is not None:
                more["trainer_logprobs_before"] = before[i]
            if found.entropies:
                more["entropy"] = found.entropies[i]
            if micro[0].experts is not None:
                more["routed_experts_digest"] = [experts_digest(r.experts) for r in micro]
            frame = from_batch(
                found.batches[i],
                step=version,
                trainer_version=version,
                token_ids=held.target[0, held.at],
                group=torch.tensor([log["group"][j] for j in at]),
                reward=torch.tensor([log["reward"][j] for j in at], dtype=torch.float64),
                finish_reason=[log["finish_reason"][j] for j in at],
                prompt_ids=[r.tokens[: r.prompt].tolist() for r in micro],
                **more,
            )
            frames.append(frame.with_columns(response=pl.Series(at, dtype=pl.Int64)))
        return pl.concat(frames, how="vertical_relaxed") if frames else None

    # ------------------------------------------------------------ weights and state
    def export(self) -> tuple[bool, dict[str, Tensor]]:
        """True, and on rank 0 the whole checkpoint by its Hugging Face names."""
        found, first = {}, dist.get_rank() == 0
        for name, tensor in weights.export(self.trainer.model):
            if first:
                found[name] = tensor.cpu()
        return True, found

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
