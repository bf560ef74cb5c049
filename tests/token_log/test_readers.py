"""Logs of other frameworks as their writers make them, small."""

import gzip
import json

import numpy as np
import polars as pl
import pytest
import torch
from logs import small, wrote

from simlab.token_log.names import ROLES, Names
from simlab.token_log.pairs import read_tokens
from simlab.token_log.readers import NOTHING_TO_MEASURE


def read(path, names=""):
    return read_tokens(str(path), Names.of(names), tuple(ROLES))


def gaps(t):
    keep = t.mask & np.isfinite(t.trainer) & np.isfinite(t.rollout)
    return (t.trainer - t.rollout)[keep]


def test_D024_C030_prime_rl(tmp_path):
    """Ranks of a step; prompt ignored; null is not finite; a pack is cut at its positions."""
    trainer, rollout = small(rows=24)
    for rank in range(2):
        rows = []
        for i in range(12 * rank, 12 * rank + 12):
            rows.append({
                "schema_version": 1, "step": 3, "rank": rank, "micro_step": 0, "micro_sequence_idx": i, "export_sequence_idx": i,
                "env_name": "sum", "token_ids": list(range(11)), "position_ids": list(range(11)), "loss_mask": [False] * 5 + [True] * 6,
                "advantages": [1.0] * 11, "inference_logprobs": [0.0] * 5 + rollout[i].tolist(),
                "trainer_logprobs": [-1.0] * 5 + trainer[i].tolist(), "entropy": [0.5] * 11, "is_masked": [False] * 11,
            })  # fmt: skip
        if rank:
            rows[0]["inference_logprobs"][7] = None
        (tmp_path / "token_exports").mkdir(exist_ok=True)
        wrote(tmp_path / "token_exports" / "step_3", rows, f"rank_{rank}.jsonl")
    t, _ = read(tmp_path / "token_exports")
    assert (len(t.row), int(t.mask.sum())) == (24, 144)
    assert int((t.mask & np.isnan(t.rollout)).sum()) == 1
    assert np.abs(gaps(t)).mean() < 0.03
    assert t.extra["step"].tolist() == [3.0] * 24
    (tmp_path / "token_exports" / "step_3" / "STABLE").touch()
    (tmp_path / "token_exports" / "step_4").mkdir()
    wrote(tmp_path / "token_exports" / "step_4", [rows[2] | {"step": 4}], "rank_0.jsonl")
    (unfinished,) = read(tmp_path / "token_exports")[1]
    assert unfinished.sentence.startswith("step_4 of 2 steps have no file STABLE")
    pack = {
        "position_ids": [0, 1, 2, 0, 1], "loss_mask": [False, True, True, True, True],
        "inference_logprobs": [0, -1, -1, 0, -1], "trainer_logprobs": [0, -1, -1, -20, -1],
    }  # fmt: skip
    t, _ = read(wrote(tmp_path, [pack]))
    assert np.diff(t.starts).tolist() == [3, 2]
    assert gaps(t).tolist() == [0, 0, 0]


def test_C107_D018_nemo_rl(tmp_path):
    """Flat or wrapped once more; a sample of mask 0 is nothing; padding is cut."""
    flat = {
        "token_loss_mask": [0, 1, 1, 1], "generation_logprobs": [0, -0.2, -0.3, 0], "prev_logprobs": [0, -0.21, -0.29, -9],
        "sample_loss_mask": 1, "input_lengths": 3, "rewards": 1.0,
    }  # fmt: skip
    wrapped = {name: [x] for name, x in flat.items()}
    for rows in (
        [flat],
        [wrapped],
        [flat, wrapped],
        [wrapped, {**wrapped, "sample_loss_mask": [0]}],
    ):
        t, _ = read(wrote(tmp_path, rows))
        d = gaps(t)
        assert np.abs(d).mean() == pytest.approx(0.01)
        assert d.mean() == pytest.approx(0, abs=1e-12)
        assert len(d) in (2, 4)


def test_C103_D025_torch_files(tmp_path):
    """Plain containers are read, a sample without rollout log-probs is counted, and objects are never unpickled."""
    samples = [
        {"index": 0, "train_log_probs": torch.tensor([-1.0, -2]), "old_log_probs": [-1.2, -2], "rollout_log_probs": [-1.5, -2.1], "local_loss_mask": [1, 1]},
        {"index": 1, "train_log_probs": [-0.5], "old_log_probs": [-0.5], "local_loss_mask": [1]},
    ]  # fmt: skip
    torch.save({"rank": 0, "samples": samples}, tmp_path / "rank_0_call_0.pt")
    t, findings = read(tmp_path / "rank_0_call_0.pt")
    assert gaps(t).tolist() == pytest.approx([0.5, 0.1])
    assert (t.extra["proximal"] - t.rollout).tolist() == pytest.approx([0.3, 0.1])
    assert [(x.cause, x.number) for x in findings] == [("missing", 1)]
    slime = {
        "log_probs": [-1.0],
        "rollout_log_probs": [-1.1],
        "loss_masks": [1],
        "tokens": [4, 5, 6],
        "rewards": 1.0,
    }
    torch.save({"rollout_id": 0, "samples": [slime]}, tmp_path / "0.pt")
    t, _ = read(tmp_path / "0.pt")
    assert (gaps(t).tolist(), t.extra["token"].tolist()) == (pytest.approx([0.1]), [6])

    class Evil:
        def __reduce__(self):
            return exec, ("raise SystemExit('ran')",)

    torch.save({"samples": [Evil()]}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="unpickling runs code: save plain lists and tensors"):
        read(tmp_path / "evil.pt")


@pytest.mark.parametrize("columns", NOTHING_TO_MEASURE, ids=lambda x: x[0])
def test_logs_without_both_log_probs(tmp_path, columns):
    """One sentence with what would write them."""
    path = wrote(tmp_path, [dict.fromkeys(columns, "x")])
    with pytest.raises(ValueError, match=r"log.?prob|logp|trainer's") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_kinds_of_files(tmp_path):
    """Parquet, Arrow, lines, one JSON list, CSV a token a row: the same numbers."""
    trainer, rollout = small()
    frame = pl.DataFrame({"lt": trainer.tolist(), "lr": rollout.tolist()})
    frame.write_parquet(tmp_path / "a.parquet")
    frame.write_ipc(tmp_path / "a.arrow")
    frame.write_ndjson(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text(json.dumps(frame.to_dicts(), indent=1))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress((tmp_path / "a.json").read_bytes()))
    (tmp_path / "b.arrow.gz").write_bytes(gzip.compress((tmp_path / "a.arrow").read_bytes()))
    with pytest.raises(ValueError, match="unpack it first"):
        read(tmp_path / "b.arrow.gz")
    long = frame.with_row_index("response").explode("lt", "lr")
    long.write_csv(tmp_path / "a.csv")
    for name in ("a.parquet", "a.arrow", "a.jsonl", "a.json", "a.json.gz", "a.csv"):
        t, _ = read(tmp_path / name, "trainer=lt,rollout=lr")
        assert np.array_equal(t.trainer, trainer.ravel())
        assert len(t.row) == 8


def test_a_pickle_is_never_opened(tmp_path):
    """SkyRL's dump_data_batch is told what to write instead."""
    (tmp_path / "global_step_1_training_input.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ValueError, match=r"is a pickle, which runs code .*SkyRL: action_log_probs"):
        read(tmp_path / "global_step_1_training_input.pkl")
