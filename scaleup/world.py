"""The section [world] of a recipe: the model, the task, the engines and the trainer, each setting checked."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from scaleup import QUANTILES, REPLAYS, engine_options
from scaleup.tasks.registry import TASKS, check_options
from simlab.core.arguments import check_name
from simlab.study.specs import named
from simlab.study.strict import Strict

Count = Annotated[int, Field(ge=1)]
Type = Literal["float32", "bfloat16"]


class EngineSpec(Strict):
    """The rollout pool."""

    dtype: Type = "bfloat16"
    """Type of SGLang's weights."""
    count: Count = 1
    """Engines; a prompt goes to the one with the fewest responses in flight."""
    tp: Count = 1
    """GPUs of one engine."""
    deterministic: bool = False
    """A seed for every response, so that the same weights give the same tokens; slower on a GPU."""
    head: Annotated[int, Field(ge=0)] = 0
    """Log-probs of so many likeliest tokens come with every sampled one, for methods that read a head (`topk`)."""
    exact: bool = True
    """Compare a checksum of every pushed weight; False where a GPU kernel shuffles them."""
    timeout: Annotated[float, Field(gt=0, le=1e8)] = 600.0
    """Timeout in seconds for a call, and for an engine that finishes no response."""
    restarts: Annotated[int, Field(ge=0)] = 2
    """How many times an engine may be restarted in one run."""
    options: dict[str, str | int | float | bool] = Field(default={})
    """Further server arguments of SGLang."""

    @model_validator(mode="after")
    def _read_here(self):
        for name in ("context_length", "max_total_tokens", "max_running_requests"):
            if not (type(x := self.options.get(name, 1)) is int and x > 0):
                raise ValueError(f"options.{name} must be a whole number above 0, got {x!r}")
        share = self.options.get("mem_fraction_static", 0.5)
        if isinstance(share, str | bool) or not 0 < share < 1:
            raise ValueError(f"options.mem_fraction_static must lie in (0, 1), got {share!r}")
        engine_options.check(self.options)
        return self


class TrainerSpec(Strict):
    """The trainer group."""

    dtype: Type = "bfloat16"
    """Type of the weights; master weights and gradients are float32."""
    ranks: Count = 1
    """Processes, one GPU each; what tp and pp leave is data parallel."""
    tp: Count = 1
    """Tensor parallel size; above 1 with sequence parallelism."""
    pp: Count = 1
    """Pipeline stages."""
    ep: Count = 1
    """Expert parallel size."""
    tokens: Count = 32_768
    """Tokens of a micro-batch at most; a longer response is a micro-batch of its own."""
    recompute: bool = False
    """Recompute activations in the backward pass."""
    optimizer_offload: bool = False
    """Keep Adam, its float32 weights and its moments on the host; needs a GPU."""
    grad_cosine: bool = False
    """Log the cosine of consecutive gradients, GAC's diagnostic; keeps a float32 copy of each rank's share of one."""
    quantile: str = "each_step"
    """When whole-batch numbers are computed: each_step, ema or local."""
    keep_weights: bool = False
    """Keep the weights of every version in use, on the CPU: splits d into policy and engine, and `proximal = "rollout"` works."""

    @model_validator(mode="after")
    def _fits(self):
        one_step = [x for x in QUANTILES if x != "pre_step"]  # a batch has no second step
        check_name("quantile", self.quantile, one_step)
        if self.ranks % (self.tp * self.pp):
            raise ValueError(f"{self.ranks} ranks cannot be shared by tp {self.tp} x pp {self.pp}")
        if (self.ranks // self.pp) % self.ep:
            raise ValueError(f"{self.ranks} ranks cannot be shared by ep {self.ep}")
        return self


def _task(name: str) -> str:
    check_name("task", name, TASKS)
    return name


TaskName = Annotated[str, AfterValidator(_task)]


class Evaluation(Strict):
    """Problems that the served weights answer at intervals."""

    task: TaskName
    """residue, reasoning_gym or math."""
    task_options: dict = Field(default={})
    """Arguments of the task."""
    problems: Count
    """The first problems of the task."""
    samples: Count
    """Responses to each problem (k)."""
    repeats: Count = 1
    """How many times the whole set is answered."""

    @model_validator(mode="after")
    def _options(self):
        check_options(self.task, self.task_options)
        return self


class EngineWorld(Strict):
    """A language model, a task, and the machines they run on."""

    model: str
    """A folder with a Hugging Face checkpoint, smollm, or tiny[:kind=...,size=...] (random weights)."""
    task: TaskName
    """residue, reasoning_gym or math."""
    task_options: dict = Field(default={})
    """Arguments of the task."""
    prompts: Count = 16
    """Prompts of a step."""
    answers: Annotated[int, Field(ge=2)] = 8
    """Responses to each prompt (the group)."""
    max_new_tokens: Count = 12
    """Tokens of a response, at most."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Temperature of the sampler and of the trainer's log-probs. There is no truncation: top-p 1, top-k off."""
    replay: tuple[str, ...] = ("none",)
    """Routing replay: none, r2 or r3; `scaleup compare` runs all of them."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """0 runs on the CPU."""
    gpu_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 80.0
    """Memory of a GPU, in 1e9 bytes: 80 (H100) or 141 (H200)."""
    host_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Memory of a node in 1e9 bytes; where it is given, `scaleup plan` refuses what needs more."""
    shm_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Size of /dev/shm on a node in 1e9 bytes, which Ray's store cannot exceed; by default Ray takes 0.3 of the memory."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between checkpoints; with 0 there are none, and a stopped run starts from the beginning."""
    token_log_every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between files of the token log; 0 writes none."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between evaluations, which wait for the next push; 0 makes none."""
    evaluation: Evaluation | None = None
    """The task of an evaluation and its size."""
    engine: EngineSpec = EngineSpec()
    trainer: TrainerSpec = TrainerSpec()

    @field_validator("replay", mode="before")
    @classmethod
    def _one_or_many(cls, value):
        return (value,) if isinstance(value, str) else tuple(value)

    @property
    def maker(self) -> tuple[str, dict]:
        """Who makes the first weights, with arguments: tiny or smollm; else a folder that holds them."""
        return named(self.model) if ":" in self.model else (self.model, {})

    @model_validator(mode="after")
    def _names(self):
        if not self.replay:
            raise ValueError("replay: at least one is needed")
        if len(set(self.replay)) < len(self.replay):
            raise ValueError("replay: an entry is given twice")
        for name in self.replay:
            check_name("replay", name, REPLAYS)
        check_options(self.task, self.task_options)
        if self.trainer.optimizer_offload and not self.gpus_per_node:
            raise ValueError("trainer.optimizer_offload moves Adam off a GPU: gpus_per_node is 0")
        if self.evaluate_every and self.evaluation is None:
            raise ValueError("evaluate_every needs an evaluation with task, problems and samples")
        return self
