"""Logs of other frameworks, one file a format, recognised by their columns.

A reader has MARKS, sets of columns one of which must all be there; NAMES, its columns by role; ALSO, columns
that `rows` needs; and `rows(frame)`, which takes what it adds (packing, padding, joins) out of a frame. A
log that says nothing but text is told which option of its framework writes log-probs.
"""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType

from simlab.token_log.readers import miles, nemo_rl, prime_rl, slime

READERS: dict[str, ModuleType] = {
    "prime_rl": prime_rl,
    "nemo_rl": nemo_rl,
    "slime": slime,
    "miles": miles,
}
NOTHING_TO_MEASURE = {  # columns of a log without both log-probs: what would write them
    ("input", "output", "gts", "score"): "verl's rollout_data_dir holds text only; write old_log_probs, rollout_log_probs and response_mask of the batch beside it (actor_rollout_ref.rollout.calculate_log_probs=True)",
    ("prompt", "completion", "advantage"): "TRL's log_completions holds text only; log sampling_per_token_logps and old_per_token_logps by a callback (use_vllm with vllm_importance_sampling_correction has both)",
    ("task_id", "head_version", "tail_version", "completion"): "AReaL's rollout dump holds text only; write logprobs and prox_logp of the batch beside it",
    ("prompt_tokens", "response_tokens", "sample_idx"): "open-instruct's save_traces writes the engine's side at most (logprobs); the trainer's old log-probs are needed beside it",
    ("sample_index", "response_length", "total_length", "rollout_log_probs"): "a dashboard's dump has the engine's side only; the trainer's is in train_data/{id}_{rank}.pt",
    ("response", "responses_create_params"): "NeMo-Gym's rollouts have the engine's side only (generation_log_probs); NeMo-RL's train_data_step*.jsonl has both (prev_logprobs)",
    ("choices", "model"): "an OpenAI-style answer has the engine's side only (logprobs); score the same tokens with the trainer and put them beside it as trainer_logprobs",
    ("role", "output_token_logprobs"): "turns of an agent have the engine's side only (output_token_logprobs); score the same tokens with the trainer",
}  # fmt: skip


def recognise(columns: Collection[str]) -> ModuleType | None:
    """The reader of a file with these columns, None if it is of this project or unknown."""
    for reader in READERS.values():
        if any(marks <= set(columns) for marks in reader.MARKS):
            return reader
    return None


def without_log_probs(columns: Collection[str]) -> str:
    """What to do about a known log that lacks one of the two log-probs; "" for any other."""
    for marks, cure in NOTHING_TO_MEASURE.items():
        if set(marks) <= set(columns):
            return cure
    return ""
