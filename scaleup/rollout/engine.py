"""Rollouts from SGLang 0.5.23: one interface over an engine in this process and over a server.

    engine = LocalEngine("runs/tiny")        # local.py; or serve("runs/tiny") of server.py
    samples = engine.generate([[1, 2, 3]], n=8, max_new_tokens=16)
    futures = engine.submit([[1, 2, 3]], n=8, max_new_tokens=16)  # returns at once
    engine.push(named_tensors, version=1)                   # while those are in flight
    samples = [f.result() for f in futures]

The distribution drawn from is exp(logp / temperature), without truncation: top-p 1, top-k off. The
log-prob of a sample is the one it was drawn with, so it is mu's, at its temperature.

After a start and after a push the served weights are verified. A push pauses the engine, loads, compares
a checksum of every weight inside the engine with the tensors that were handed in, and only then
announces the version. What becomes of the responses in flight is the pause mode:
    retract   (default) their keys and values are dropped and recomputed under the new weights; a
              span of tokens of one version is exactly a sample of that version, after its prefix
    in_place  the old keys and values stay: tokens after the push come from new weights on an old
              context, a policy that is neither version. It needs `disable_radix_cache=True`, else
              new requests would start from prefixes of old weights too
    abort     they end with what they have, log-probs included

Trap: a retracted response is prefilled again under the new weights, and the experts that SGLang returns
for its earlier tokens are then those of the new weights, not those the tokens were sampled with.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaleup.models import weights
from scaleup.rollout import push
from scaleup.rollout.checksums import expected_checksums
from scaleup.rollout.sample import Sample, parse

MODES = ("retract", "in_place", "abort")


class Engine:
    """The interface. A subclass brings `_call(route, body)`, which replies like SGLang's HTTP route.

    `exact` compares each checksum with that of the tensors sent, which holds on a CPU and for tensor
    parallelism alone. False asks, in any layout, that the weights that changed in the engine are
    those that changed in the push: a lost or misnamed weight is found, a distorted one is not.
    Every method may be called from any thread but not from a coroutine of the engine's own loop.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype,
        tp: int,
        radix_cache: bool,
        exact: bool,
        deterministic: bool = False,
    ):
        self.folder = Path(folder)
        self.config = weights.read_config(self.folder)
        self.shapes = {
            name: tuple(f.get_slice(name).get_shape())
            for f in push.files(self.folder)
            for name in f.keys()  # noqa: SIM118  (not a mapping)
        }
        self.dtype, self.tp, self.radix_cache, self.exact = dtype, tp, radix_cache, exact
        self.deterministic = deterministic  # seeds are read
        self._sent: dict[str, str] = {}  # checksums of the tensors of the last push
        self._present: list[dict[str, str]] = []  # those in the engine after it, by rank
        self.topk = self.config.get("num_experts_per_tok", 0)
        self.paused: str | None = None  # the mode, while paused
        self.fault: str | None = None  # why the served weights are not to be used
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _call(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _run(self, route: str, **body) -> dict[str, Any]:
        return asyncio.run_coroutine_threadsafe(self._call(route, body), self._loop).result()

    def submit(
        self,
        prompts: list[list[int]],
        n: int = 1,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        ignore_eos: bool = False,
        stop_token_ids: list[int] | None = None,
        seeds: Sequence[int] | None = None,
        head: int = 0,
    ) -> list[Future[Sample]]:
        """Start n responses to each prompt, in the order p0 p0 .. p1 p1 .., and return their futures.

        `seeds`, one for each response (63 bits), make its tokens a function of the weights; the engine
        must have been started with `enable_deterministic_inference=True`, or SGLang ignores them.
        `head` asks for the log-probs of so many likeliest tokens beside each sampled one.
        In a coroutine: `await asyncio.wrap_future(f)`. While the engine is paused, requests wait.
        Raises ValueError for an empty prompt, a token outside the vocabulary, a temperature that is
        not above 0 or seeds that would be ignored, RuntimeError after a push that failed.
        """
        if self.fault:
            raise RuntimeError(self.fault)
        if not temperature > 0:
            raise ValueError(f"rollout: temperature must be above 0, got {temperature}")
        for prompt in prompts:
            # SGLang's scheduler dies of such a token, and takes its parent process with it
            if not prompt or not 0 <= min(prompt) <= max(prompt) < self.config["vocab_size"]:
                raise ValueError("rollout: a prompt is empty or has a token outside the vocabulary")
        sampling = {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": ignore_eos,
            "stop_token_ids": stop_token_ids or [],
        }
        asked = [prompt for prompt in prompts for _ in range(n)]
        if seeds is None:
            settings = [sampling] * len(asked)
        elif not self.deterministic or len(seeds) != len(asked):
            raise ValueError(
                f"rollout: {len(seeds)} seeds for {len(asked)} responses of an engine "
                f"{'with' if self.deterministic else 'without'} enable_deterministic_inference"
            )
        else:
            settings = [sampling | {"sampling_seed": seed} for seed in seeds]
        return [
            asyncio.run_coroutine_threadsafe(self._sample(*each, head), self._loop)
            for each in zip(asked, settings, strict=True)
        ]

    async def _sample(self, prompt: list[int], sampling: dict[str, Any], head: int) -> Sample:
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": head,
            "return_routed_experts": bool(self.topk),
            "rid": uuid.uuid4().hex,
        }
        reply = await self._call("generate", body)
        return parse(prompt, reply, self.config["num_hidden_layers"], self.topk, head)

    def generate(self, prompts: list[list[int]], n: int = 1, **arguments) -> list[Sample]:
        """The samples of `submit`, waited for."""
        return [future.result() for future in self.submit(prompts, n, **arguments)]

    def pause(self, mode: str = "retract") -> None:
        """Stop drawing tokens. `abort` ends the responses in flight and may take a second.

        Raises ValueError for an unknown mode, and for in_place with the radix cache on.
        """
        if mode not in MODES:
            raise ValueError(
                f"rollout: unknown pause mode {mode!r}, choose from {', '.join(MODES)}"
            )
        if mode == "in_place" and self.radix_cache:
            raise ValueError(
                "rollout: in_place needs an engine with disable_radix_cache=True, else new requests "
                "continue prefixes computed under old weights"
            )
        self._run("pause_generation", mode=mode)
        self.paused = mode

    def resume(self) -> None:
        """Go on after `pause`. Raises RuntimeError after a push that failed."""
        if self.fault:
            raise RuntimeError(self.fault)
        self._run("continue_generation")
        self.paused = None

    def abort_all(self) -> None:
        """End every response in flight; each comes back with `finish == "abort"` and what it has."""
        self._run("abort_request", abort_all=True)

    def version(self) -> int:
        """Version of the weights served."""
        return int(self._run("model_info")["weight_version"])

    def forget(self) -> None:
        """No version is served until the next push, and what is sampled before it is refused."""
        self._run("update_weight_version", new_version="-1", abort_all_requests=False)

    def checksums(self) -> list[dict[str, str]]:
        """For each rank of the engine, the checksum of every weight, by SGLang's names."""
        reply = self._run("weights_checker", action="checksum")
        if not reply["success"]:
            raise RuntimeError(f"rollout: no checksums: {reply['message']}")
        return [rank["checksums"] for rank in reply["ranks"]]

    def push(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Serve these weights, the whole model by its Hugging Face names, as `version`.

        Pauses in the mode `retract` and resumes, unless the engine is paused already: then it stays
        so. Tensors of another dtype are cast to the engine's. Raises ValueError, before anything is
        touched, for a name, a shape or a version that does not fit or a weight that is missing;
        RuntimeError when the engine did not take the weights: it then stays paused and refuses to
        sample until a push succeeds; then `resume`.
        """
        tensors = self._complete(dict(push.each_once(named_tensors)))
        if version == self.version():
            raise ValueError(f"push: version {version} is being served, give another number")
        resume = self.paused is None
        if resume:
            self.pause("retract")
        self.fault = f"push: version {version} was not taken over, push again before sampling"
        try:
            self._load(tensors)
            self._verify(tensors)
            self._run("update_weight_version", new_version=str(version), abort_all_requests=False)
        except Exception as error:
            self.fault = f"push: version {version} was not taken over ({error}); push again"
            raise RuntimeError(self.fault) from error
        self.fault = None
        if resume:
            self.resume()

    def _complete(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return push.complete(given, self.shapes, self.config, self.dtype, self.folder.name)

    def _load(self, tensors: dict[str, Tensor]) -> None:
        self._accept("begin_weight_update", {})
        try:
            for bucket, last in push.buckets(tensors):
                body = {
                    "serialized_named_tensors": [push.serialized(bucket)] * self.tp,
                    "flush_cache": last and self.paused != "in_place",
                }
                self._accept("update_weights_from_tensor", body)
        finally:
            self._accept("end_weight_update", {})

    def _accept(self, route: str, body: dict[str, Any]) -> None:
        reply = self._run(route, **body)
        if not reply["success"]:
            raise RuntimeError(reply["message"])

    def _verify(self, tensors: dict[str, Tensor]) -> None:
        ranks, sent = self.checksums(), expected_checksums(tensors, self.config)
        if self.exact:
            push.check_equal(ranks, tensors, self.config)
        elif self._sent:
            push.check_changes(self._present, ranks, self._sent, sent)
        self._sent, self._present = sent, ranks

    def _check_start(self) -> None:
        tensors = self._complete(
            {name: f.get_tensor(name) for f in push.files(self.folder) for name in f.keys()}  # noqa: SIM118
        )
        try:
            try:
                self._verify(tensors)
            except RuntimeError:  # SGLang 0.5.23 leaves the head of a tied Qwen3-MoE random
                self._load(tensors)
                self._verify(tensors)
        except RuntimeError as error:
            self.close()
            raise RuntimeError(
                f"rollout: the engine does not hold {self.folder.name} ({error}); "
                "a layout that SGLang pads or shuffles needs exact=False"
            ) from error

    def close(self) -> None:
        """Stop the engine. Responses in flight are lost."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
