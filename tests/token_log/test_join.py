"""Two files about the same responses."""

import numpy as np
import pytest
import torch
from logs import small, wrote

from simlab.token_log.names import ROLES
from simlab.token_log.pairs import read_tokens

ROLLOUT, _ = small(rows=4)
TOKENS = [[10 * i + j for j in range(6)] for i in range(4)]


def pair(tmp_path, mine, its):
    """Rollout and trainer files of the same numbers, the second in reverse order, with more columns."""
    rollout = [{"rollout_logprobs": x.tolist(), **mine(i)} for i, x in enumerate(ROLLOUT)]
    trainer = [{"trainer_logprobs": x.tolist(), **its(i)} for i, x in enumerate(ROLLOUT)][::-1]
    return wrote(tmp_path, rollout, "rollout.jsonl"), wrote(tmp_path, trainer, "trainer.jsonl")


def read(files):
    return read_tokens(files[0], more=tuple(ROLES), join=files[1])


def test_C105_joined_by_what_names_a_response(tmp_path):
    """By id, or by the ids of tokens where there is none; the order of the second file is nothing."""
    for column in (
        lambda i: {"request_id": f"r{i}"},
        lambda i: {"token_ids": TOKENS[i]},
        lambda i: {"id": 7, "token_ids": TOKENS[i]},
    ):
        t, findings = read(pair(tmp_path, column, column))
        assert np.abs(t.trainer - t.rollout).mean() == 0
        assert (len(t.row), findings) == (4, [])
    t, findings = read(pair(tmp_path, lambda i: {"id": i}, lambda i: {"id": float(i + 1)}))
    assert (len(t.row), [x.cause for x in findings]) == (3, ["missing"])


@pytest.mark.parametrize(
    "column", [lambda i: {}, lambda i: {"id": 7}, lambda i: {"token_ids": [1] * 6}]
)
def test_C105_never_by_position(tmp_path, column):
    """Without such a column it is refused in one sentence."""
    with pytest.raises(ValueError, match=r"cannot be joined with trainer\.jsonl: no id") as caught:
        read(pair(tmp_path, column, column))
    assert "\n" not in str(caught.value)


def test_slime_is_joined_by_position(tmp_path):
    """Groups and versions of rollout_data by rollout_position; that folder is no log of its own."""
    for name in ("train_data", "rollout_data"):
        (tmp_path / name).mkdir()
    train = [{"log_probs": [-1.0, -1], "rollout_log_probs": [-1.1, -0.9], "loss_masks": [1, 1], "tokens": [4, 5, 6],
              "rewards": 1.0, "rollout_position": p} for p in (2, 0)]  # fmt: skip
    rollout = [{"group_index": i, "weight_versions": [str(i)], "tokens": [4, 5, 6], "rollout_log_probs": [-1.1, -0.9]} for i in range(3)]  # fmt: skip
    torch.save({"rollout_id": 7, "samples": train}, tmp_path / "train_data" / "7.pt")
    torch.save({"rollout_id": 7, "samples": rollout}, tmp_path / "rollout_data" / "7.pt")
    t, findings = read_tokens(str(tmp_path), more=tuple(ROLES))
    assert not findings
    assert t.extra["group"].tolist() == [2, 0]
    assert t.version is not None
    assert t.version.tolist() == [2, 2, 0, 0]
    assert t.extra["step"].tolist() == [7, 7]
    rollout[2]["weight_versions"] = ["1", "2"]
    torch.save({"rollout_id": 7, "samples": rollout}, tmp_path / "rollout_data" / "7.pt")
    t, (finding,) = read_tokens(str(tmp_path), more=tuple(ROLES))
    assert t.version is None
    assert "1 of 2 samples have several weight_versions" in finding.sentence
    torch.save({"samples": rollout[:1]}, tmp_path / "rollout_data" / "7.pt")
    _, (finding,) = read_tokens(str(tmp_path), more=tuple(ROLES))
    assert "rollout_position goes beyond the 1 samples of 7.pt" in finding.sentence
