"""Further cases of logs, under their ids, with their right answers."""

import numpy as np
import pytest
from audit.cases import check, method, of_gaps, of_rows, rows_of, small

from simlab.audit.alarms import flat_share

PPO = [("ppo", "ppo", {})]


def test_C020_a_threshold_that_rounding_crosses(tmp_path):
    """1.1995 is kept and 1.2005 cut at eps 0.2; in bfloat16 both are 1.203125."""
    d = [[float(np.log(1.1995)), float(np.log(1.2005))]]
    row = method(of_gaps(tmp_path, d, PPO, advantages=[[1.0, 1.0]]), "ppo")
    assert row["cut"] == 0.5


@pytest.mark.parametrize(("G", "share"), [(2, 0.7024), (4, 0.4490), (8, 0.2007), (16, 0.0403)])
def test_C042_groups_that_teach_nothing(tmp_path, G, share):
    """What chance gives stands beside the share that the log has, of groups and of tokens."""
    assert flat_share(0.1819, G) == pytest.approx(share, abs=6e-5)
    rng = np.random.default_rng(0)
    reward = (rng.random((400, G)) < 0.1819).astype(float)
    A = reward - reward.mean(1, keepdims=True)
    trainer, rollout = small(rows=400 * G, tokens=2)
    more = {"advantages": [[a] * 2 for a in A.ravel()], "reward": reward.ravel().tolist(),
            "group": np.repeat(np.arange(400), G).tolist()}  # fmt: skip
    found = check(of_rows(tmp_path, rows_of(trainer, rollout, **more)), "flat_groups")
    flat = (reward == reward[:, :1]).all(1).mean()
    assert found.status == "note"
    assert found.value == pytest.approx(flat)
    assert found.value == pytest.approx(share, abs=0.05)
    assert f"{flat:.0%} of the tokens" in found.sentence
    assert f"p^G + (1 - p)^G is {flat_share(reward.mean(), G):.1%}" in found.sentence


def test_C076_C080_ages_are_of_tokens(tmp_path):
    """The histogram of ages, and tokens of one response that are too old and that are not."""
    more = {"weight_versions": [[3], [4], [5], [7]], "trainer_version": 7}
    rows = rows_of(np.full((4, 1), -1.0), [[-1.1], [-1.2], [-0.9], [-1.0]], **more)
    by_age = of_rows(tmp_path, rows).result["by"]["age"]
    assert {x["from"]: x["tokens"] for x in by_age} == {4: 1, 3: 1, 2: 1, 0: 1}
    assert sum(x["tokens"] for x in by_age if x["to"] <= 2) == 2
    more = {"weight_versions": [[1, 1, 2, 3], [1, 1]], "trainer_version": 4}
    rows = rows_of([[-1.0] * 4, [-1.0] * 2], [[-1.1, -1.2, -0.9, -1.0], [-1.2, -1.1]], **more)
    by_age = of_rows(tmp_path, rows).result["by"]["age"]
    assert {x["from"]: x["tokens"] for x in by_age} == {1: 1, 2: 1, 3: 4}


SCORES = {"none": (0.0098, 0.0092, 0.0093), "decode": (0.1008, 0.0093, 0.1028), "trainer": (0.0081, 0.1022, 0.1024)}  # fmt: skip


@pytest.mark.parametrize("odd", SCORES)
def test_D038_three_scores(tmp_path, odd):
    """1,024 tokens with these mean gaps A-B, B-C, A-C: none, A, C is apart."""
    ab, bc, ac = SCORES[odd]
    rng = np.random.default_rng(0)
    B = rng.uniform(-6, -0.3, size=(64, 16))
    # variances of three independent errors from the three gaps
    a, b, c = (ab**2 + ac**2 - bc**2, ab**2 + bc**2 - ac**2, ac**2 + bc**2 - ab**2)
    noise = [rng.normal(size=B.shape) * np.sqrt(max(x, 0) / 2 * np.pi / 2) for x in (a, b, c)]
    A, B, C = (B + x for x in noise)
    audit = of_rows(tmp_path, rows_of(C, A, rollout_logprobs_prefill=B.tolist()))
    found = check(audit, "third_score")
    assert found.status == ("quiet" if odd == "none" else "alarm")
    assert odd == "none" or found.sentence.startswith(f"{odd} stands apart")
    assert check(audit, "repeats").status == "not computable"


def test_D038_an_engine_that_does_not_repeat_itself(tmp_path):
    """B0 and B1 differ by 0.4437; the trainer repeats itself and agrees with B1."""
    rows = rows_of(
        [[-1.136922]], [[-0.676086]], rollout_logprobs_prefill=[[-0.693185]],
        rollout_logprobs_prefill_again=[[-1.136922]], trainer_logprobs_again=[[-1.136922]],
    )  # fmt: skip
    found = check(of_rows(tmp_path, rows), "repeats")
    assert found.status == "alarm"
    assert found.value == pytest.approx(0.4437, abs=1e-4)
    assert found.sentence.startswith("the engine does not repeat itself")
    assert "the second against the trainer: 0)" in found.sentence


def test_C109_in_an_audit(tmp_path):
    """The row without an id is set aside, a missing log-prob too, and the rest is measured."""
    trainer, rollout = small(tokens=3)
    rows = rows_of(trainer, rollout)
    for i, row in enumerate(rows):
        row["rollout_logprobs"] = [{"token_id": j, "logprob": x} for j, x in enumerate(rollout[i])]
    del rows[3]["rollout_logprobs"][1]["token_id"]
    rows[5]["rollout_logprobs"][2]["logprob"] = None
    audit = of_rows(tmp_path, rows)
    assert audit.exit == 3
    assert check(audit, "lengths").status == check(audit, "not finite").status == "set aside"
    assert audit.result["counts"]["measured"] == 20
