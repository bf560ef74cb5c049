"""Entries of engines and agents that are more than a number."""

import json

import numpy as np
import polars as pl
import pytest
from logs import wrote

from simlab.token_log.names import ROLES, Names
from simlab.token_log.pairs import read_tokens

TRAINER = [-0.31, -0.42]
FORMS = {
    "triples": [[-0.3, 11, None], [-0.4, 12, None]],
    "triples with text": [[-0.3, 11, "a"], [-0.4, 12, None]],
    "pairs": [[-0.3, 11], [-0.4, 12]],
    "OpenAI": {"content": [{"token": x, "logprob": y, "token_id": z, "top_logprobs": []} for x, y, z in (("a", -0.3, 11), ("b", -0.4, 12))]},
    "vLLM": [{"11": {"logprob": -0.3, "rank": 1}}, {"7": {"logprob": -0.1, "rank": 1}, "12": {"logprob": -0.4, "rank": 2}}],
}  # fmt: skip


def read(path, names=""):
    return read_tokens(str(path), Names.of(names), tuple(ROLES))


def row(entries, **more):
    return {"trainer_logprobs": TRAINER, "rollout_logprobs": entries, "token_ids": [11, 12]} | more


@pytest.mark.parametrize("form", FORMS)
def test_D027_entries_of_engines(tmp_path, form):
    """The number of each entry is taken, and its id is that of the column of ids or a fault."""
    t, findings = read(wrote(tmp_path, [row(FORMS[form])]))
    assert (t.trainer - t.rollout).tolist() == pytest.approx([-0.01, -0.02])
    assert not findings
    if form != "vLLM":  # which names the sampled token by the column
        (finding,) = read(wrote(tmp_path, [row(FORMS[form], token_ids=[11, 13])]))[1]
        assert (finding.cause, finding.token, finding.number) == ("other ids", 1, 1)
        assert "has 12 where the column of ids has 13" in finding.sentence
        alone = {k: v for k, v in row(FORMS[form]).items() if k != "token_ids"}
        assert read(wrote(tmp_path, [alone]))[0].extra["token"].tolist() == [11, 12]


def test_D027_turns_have_one_side(tmp_path):
    """Turns of an agent: only the assistant's carry log-probs, and the other side is asked for."""
    turn = {"role": "assistant", "output_ids": [11, 12], "output_token_logprobs": FORMS["triples"]}
    tool = {"role": "tool", "content": "3"}
    (tmp_path / "turns.json").write_text(json.dumps([turn, tool, turn]))
    with pytest.raises(ValueError, match="score the same tokens with the trainer"):
        read(tmp_path / "turns.json")
    scored = turn | {"trainer_logprobs": TRAINER}
    (tmp_path / "turns.json").write_text(json.dumps([scored, tool, scored]))
    t, findings = read(tmp_path / "turns.json", "rollout=output_token_logprobs")
    assert (t.trainer - t.rollout).tolist() == pytest.approx([-0.01, -0.02] * 2)
    assert len(t.row) == 2
    assert [x.cause for x in findings] == ["missing"]


def test_C109_an_entry_without_its_id(tmp_path):
    """Two ids beside three log-probs: the row is rejected with both numbers, and a null is missing, not 0."""
    entries = [
        {"token_id": 11, "logprob": -0.3},
        {"logprob": -0.2},
        {"token_id": 12, "logprob": None},
    ]
    good = row(FORMS["triples"])
    bad = {
        "trainer_logprobs": [-0.3, -0.2, -0.1],
        "rollout_logprobs": entries,
        "token_ids": [11, 1, 12],
    }
    t, findings = read(wrote(tmp_path, [good, bad]))
    assert len(t.row) == 1
    assert "3 rollout_logprobs, 2 rollout_logprobs ids entries" in findings[0].sentence
    entries[1]["token_id"] = 1
    t, findings = read(wrote(tmp_path, [good, bad]))
    assert not findings
    assert np.isnan(t.rollout).tolist() == [False] * 4 + [True]


def test_typed_entries(tmp_path):
    """Parquet has structs and lists of lists."""
    structs = [{"logprob": -0.3, "token_id": 11}, {"logprob": -0.4, "token_id": 12}]
    for entries in (structs, [[-0.3, 11.0], [-0.4, 12.0]]):
        pl.DataFrame([row(entries)]).write_parquet(tmp_path / "log.parquet")
        t, findings = read(tmp_path / "log.parquet")
        assert (t.trainer - t.rollout).tolist() == pytest.approx([-0.01, -0.02])
        assert not findings


def test_which_token_was_sampled(tmp_path):
    """vLLM's list of several needs the ids."""
    several = row(FORMS["vLLM"])
    del several["token_ids"]
    with pytest.raises(
        ValueError, match="line 1: rollout_logprobs: entry 1 lists 2 tokens and no column of ids"
    ):
        read(wrote(tmp_path, [several]))
