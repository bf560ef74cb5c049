"""What a push sends to an engine and how its arrival is checked; nothing here talks to an engine."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from scaleup.rollout.checksums import expected_checksums

BUCKET = 2**28  # bytes of one update request
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def files(folder: Path) -> Iterator[safe_open]:
    """The open safetensors files of a checkpoint. Raises FileNotFoundError where it has none."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"rollout: no safetensors in {folder}")
    for path in paths:
        with safe_open(path, "pt") as f:
            yield f


def each_once(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The pairs of an iterable or a dict. Raises ValueError for a name that comes twice."""
    seen = set()
    pairs = named_tensors.items() if hasattr(named_tensors, "items") else named_tensors
    for name, tensor in pairs:
        if name in seen:
            raise ValueError(f"push: {name} was given twice")
        seen.add(name)
        yield name, tensor


def complete(
    given: dict[str, Tensor],
    shapes: dict[str, tuple[int, ...]],
    config: dict[str, Any],
    dtype: torch.dtype,
    model: str,
) -> dict[str, Tensor]:
    """A copy of the whole model on the CPU, in the engine's dtype, with the tied head that was left out.

    Raises ValueError for a name or a shape that `shapes` does not have, and for a missing weight;
    `model` is what the sentence calls the checkpoint.
    """
    tied = config.get("tie_word_embeddings", False)
    if (
        tied
        and EMBEDDING in given
        and not torch.equal(given.setdefault(HEAD, given[EMBEDDING]), given[EMBEDDING])
    ):
        raise ValueError(f"push: {HEAD} differs from {EMBEDDING}, but the model ties them")
    shapes = shapes | ({HEAD: shapes[EMBEDDING]} if tied else {})
    for name, tensor in given.items():
        if name not in shapes:
            raise ValueError(f"push: {name!r} is not a weight of {model}")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"push: {name} has shape {tuple(tensor.shape)}, the model has {shapes[name]}"
            )
    missing = sorted(shapes.keys() - given.keys())
    if missing:
        raise ValueError(f"push: {len(missing)} weights are missing, the first is {missing[0]}")
    # detached, and without a larger storage behind a view, which would be sent whole
    return {k: v.detach().to("cpu", dtype).contiguous().clone() for k, v in given.items()}


def buckets(tensors: dict[str, Tensor]) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """(tensors of one request, whether it is the last); a tensor above BUCKET goes alone."""
    bucket, size = [], 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket, False
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket, True


def serialized(bucket: list[tuple[str, Tensor]]) -> str:
    """The tensors by value, as SGLang reads them: this works across processes and hosts alike."""
    return base64.b64encode(pickle.dumps(bucket, protocol=4)).decode()


def check_equal(
    ranks: list[dict[str, str]], tensors: dict[str, Tensor], config: dict[str, Any]
) -> None:
    """Raises RuntimeError unless every checksum in the engine, by rank, is that of the tensors sent."""
    for rank, present in enumerate(ranks):
        expected = expected_checksums(tensors, config, rank, len(ranks))
        wrong = [k for k in present.keys() | expected if present.get(k) != expected.get(k)]
        if wrong:
            raise RuntimeError(
                f"{len(wrong)} weights in the engine differ from those sent, "
                f"the first is {min(wrong)} on rank {rank}"
            )


def check_changes(
    before: list[dict[str, str]],
    after: list[dict[str, str]],
    sent_before: dict[str, str],
    sent: dict[str, str],
) -> None:
    """Raises RuntimeError unless those weights changed in the engine, on any rank, that changed in the push."""
    changed = {
        k: any(a.get(k) != b.get(k) for a, b in zip(after, before, strict=True)) for k in sent
    }
    wrong = [k for k in sent if changed[k] != (sent[k] != sent_before[k])]
    if wrong:
        raise RuntimeError(
            f"{len(wrong)} weights in the engine did not change with those sent, "
            f"the first is {min(wrong)}"
        )
