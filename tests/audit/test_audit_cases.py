"""The field cases about logs, under their ids, with their right answers."""

import numpy as np
import pytest
from audit.cases import audited, check, first, method, of_gaps, of_rows, rows_of, small, wrote

PPO = [("ppo", "ppo", {})]


def plain(*names):
    return [(name, name, {}) for name in names]


# ---------------------------------------------------------------- gaps
def test_C001_a_steady_and_a_drifting_run(tmp_path):
    """Signed and absolute; a trend on the second only."""
    rollout = [[-1.0, -0.5, -2.0]] * 3
    for sizes, drifts in (((0.011,) * 3, False), ((0.011, 0.022, 0.036), True)):
        trainer = [[-1 - x, -0.5 + x, -2 - x] for x in sizes]
        audit = of_rows(tmp_path, rows_of(trainer, rollout, step=[0, 1, 2]))
        steps = audit.result["by"]["step"]
        assert [x["d_bar"] for x in steps] == pytest.approx(sizes)
        assert [x["d_mean"] for x in steps] == pytest.approx([-x / 3 for x in sizes])
        assert (check(audit, "drift").status == "alarm") is drifts
        assert audit.exit == int(drifts)


def test_C003_outside_a_band_and_clipped(tmp_path):
    """40 % outside of [0.9, 1.1], none clipped by PPO, none by GSPO."""
    audit = of_gaps(
        tmp_path, [[0, 0.05, -0.06, 0.12, -0.11]], plain("ppo", "gspo"), advantages=[[1.0] * 5]
    )
    assert audit.result["mismatch"]["outside"] == pytest.approx(0.4)
    assert method(audit, "ppo")["cut"] == method(audit, "gspo")["cut"] == 0


def test_C005_first_token_and_a_grid(tmp_path):
    """All of the gap at position 0, on a grid of 0.125."""
    audit = of_gaps(tmp_path, [[0.25, 0, 1e-6], [0.125, 0, 1e-6], [-0.125, 0, 0], [0.25, 0, 0]])
    assert audit.result["by"]["position"][0]["share"] > 0.99999
    assert audit.result["mismatch"]["d_bar"] == pytest.approx(0.0625, abs=1e-6)
    assert check(audit, "steps").value == 0.125
    assert {x.metric for x in audit.findings if x.status == "alarm"} == {
        "steps",
        "first_token",
        "mult_prob_error",
    }


def test_C007_two_summaries(tmp_path):
    """Mean e^|d| above 1.05 where mean |d| is 0.05."""
    audit = of_gaps(tmp_path, [[0.0, 0.1]])
    assert check(audit, "mult_prob_error").status == "alarm"
    assert audit.result["mismatch"]["mult_prob_error"] == pytest.approx(1.05259, abs=1e-5)
    assert audit.result["mismatch"]["d_bar"] == pytest.approx(0.05)


def test_C030_documents_that_attend_across(tmp_path):
    """Per response 0, 1.0 and 0.9; TIS at 2 caps four of six."""
    audit = of_gaps(tmp_path, [[0, 0], [0.9, 1.1], [1.0, 0.8]], plain("tis"), proximal_logprobs=[
        [-3.0, -3.5], [-2.1, -2.4], [-2.0, -2.7]
    ])  # fmt: skip
    assert [x["d_bar"] for x in audit.result["worst_responses"]] == pytest.approx([1.0, 0.9, 0.0])
    assert method(audit, "tis")["diagnostics"]["capped"] == pytest.approx(4 / 6)


def test_C045_overflowing_ratios(tmp_path):
    """Three gaps beyond 20 nats are set aside by their log-ratio, and counted."""
    rows = rows_of([[-0.1, -800.0, -0.1, -1.0]], [[-700.1, -100.0, -21.1, -1.1]])
    audit = of_rows(tmp_path, rows)
    assert first(audit) == ("set aside", "absurd")
    assert audit.result["counts"]["measured"] == 1
    assert "3 tokens have a gap of 20 nats or more, 700 at most" in audit.findings[0].sentence
    assert audit.exit == 3


@pytest.mark.parametrize("T", [1000, 9000])
def test_C049_sum_and_mean(tmp_path, T):
    """GSPO's ratio is 0.999 for both lengths: clipped for A < 0, kept for A > 0."""
    for A, cut in ((-1.0, 1.0), (1.0, 0.0)):
        audit = of_gaps(tmp_path, [[-0.001] * T], plain("gspo"), advantages=[[A] * T])
        assert method(audit, "gspo")["cut"] == cut
        assert audit.exit == 0


def test_C053_binding_and_out_of_band(tmp_path):
    """Two of five bind, three of five are out of the band."""
    d = [[float(np.log(r))] * 2 for r in (1.0005, 0.9998, 1.0001, 0.9991, 1.0006)]
    A = [[a] * 2 for a in (1.0, 1.0, -1.0, -1.0, -1.0)]
    row = method(of_gaps(tmp_path, d, plain("gspo"), advantages=A), "gspo")
    assert (row["cut"], row["out_of_band"]) == pytest.approx((0.4, 0.6))


def test_C054_micro_batches_change_nothing(tmp_path):
    """One clipped token of five is 0.2, in one file or in two."""
    rows = rows_of([[-1.0] * 4, [-0.5]], [[-1.0] * 4, [-1.0]])
    for row in rows:
        row["advantages"] = [1.0] * len(row["trainer_logprobs"])
    whole = of_rows(tmp_path, rows, methods=PPO)
    for i, row in enumerate(rows):
        wrote(tmp_path / "parts", [row], f"{i}.jsonl")
    cut = audited(tmp_path / "parts", methods=PPO)
    assert method(whole, "ppo")["cut"] == method(cut, "ppo")["cut"] == pytest.approx(0.2)
    assert whole.result["mismatch"] == cut.result["mismatch"]


def test_C056_which_tokens_bind(tmp_path):
    """Outward tokens 1 and 4, never the pull-back ones."""
    d = [[float(np.log(r)) for r in (1.3, 1.3, 0.7, 0.7)]]
    row = method(of_gaps(tmp_path, d, PPO, advantages=[[1.0, -1.0, 1.0, -1.0]]), "ppo")
    assert (row["cut"], row["out_of_band"]) == (0.5, 1.0)
    assert (row["cut_outward"], row["cut_pull_back"]) == (1.0, 0.0)
    assert row["diagnostics"]["clip_high"] == row["diagnostics"]["clip_low"] == 0.25


def test_C058_effective_sample_size(tmp_path):
    """16/18 with a masked token ignored; the scale changes nothing."""
    for scale in (0.0, np.log(2)):
        d = [[float(np.log(w) + scale) for w in (2, 1, 1, 9)]]
        audit = of_gaps(tmp_path, d, loss_mask=[[1, 1, 1, 0]])
        assert audit.result["mismatch"]["ess"] == pytest.approx(16 / 18)


def test_C089_sawtooth(tmp_path):
    """Up over three steps and back at the fourth."""
    sizes = [0.02, 0.05, 0.09, 0.02]
    d = [[-x, x, -x, x] for x in sizes for _ in range(4)]
    audit = of_gaps(tmp_path, d, step=[i // 4 for i in range(16)])
    found = check(audit, "sawtooth")
    assert (found.status, found.place) == ("alarm", "step 3")


@pytest.mark.parametrize(
    ("A", "cut"), [(1.0, {"ppo", "icepop", "kpop", "dppo"}), (-1.0, {"icepop", "kpop"})]
)
def test_C089_a_ratio_of_1e12(tmp_path, A, cut):
    """A token of 19 nats: with A < 0 PPO and DPPO keep it, and the weight is named."""
    rows = rows_of(
        [[-0.5, -1.0]], [[-19.5, -1.0]], advantages=[[A, A]], proximal_logprobs=[[-0.5, -1.0]]
    )
    audit = of_rows(tmp_path, rows, methods=plain("ppo", "icepop", "kpop", "dppo"))
    assert {x["method"] for x in audit.result["methods"] if x["cut"] == 0.5} == cut
    assert (check(audit, "unbounded_weight").status == "alarm") is (A < 0)


def test_C111_C113_C115_same_name_other_rule(tmp_path):
    """Bands of IcePop, the one-sided mask of DPPO, capped is not cut."""
    ratios = [0.3, 0.5 + 1e-9, 2.5, 5.0 - 1e-9, 5.1]
    d = [[float(np.log(r)) for r in ratios]]
    arms = [(f"{a}-{b}", "icepop", {"low": a, "high": b, "eps_low": 1.0, "eps_high": 1e6})
            for a, b in ((0.5, 5.0), (0.5, 2.0), (0.2, 5.0))]  # fmt: skip
    audit = of_gaps(tmp_path, d, arms, advantages=[[-1.0] * 5])
    assert [x["cut"] for x in audit.result["methods"]] == pytest.approx([0.4, 0.8, 0.2])
    pair = np.log([[0.9, 0.9, 0.02]]), np.log([[0.6, 0.6, 0.001]])
    rows = rows_of(*pair, advantages=[[1.0, -1.0, 1.0]])
    audit = of_rows(tmp_path, rows, methods=plain("dppo", "ppo"))
    assert method(audit, "dppo")["cut"] == pytest.approx(1 / 3)
    assert method(audit, "ppo")["cut"] == pytest.approx(2 / 3)
    audit = of_gaps(
        tmp_path,
        [[float(np.log(1.5))] * 2],
        [("cispo", "cispo", {"eps_high": 0.28}), *PPO],
        advantages=[[1.0] * 2],
    )
    assert (method(audit, "cispo")["cut"], method(audit, "cispo")["capped"]) == (0, 1)
    assert (method(audit, "ppo")["cut"], method(audit, "ppo")["capped"]) == (1, 0)


# ---------------------------------------------------------------- comparability
def test_C009_truncation(tmp_path):
    """Three gaps of ln 0.8 are a constant: the kept mass."""
    rollout = np.log([[0.625, 0.375, 0.625]])
    audit = of_rows(tmp_path, rows_of(rollout + np.log(0.8), rollout))
    assert first(audit) == ("unusable", "truncation")
    assert audit.findings[0].value == pytest.approx(0.8)
    assert audit.exit == 2


def test_C011_a_token_outside_of_the_nucleus(tmp_path):
    """-inf is set aside and listed, and never becomes 0."""
    audit = of_rows(tmp_path, rows_of([[-1, -np.inf, -2]], [[-1, -3, -2.0]]))
    assert first(audit) == ("set aside", "not finite")
    assert audit.findings[0].place == "line 1, token 1"
    assert audit.result["counts"]["measured"] == 2
    assert audit.result["mismatch"]["d_bar"] == 0
    assert audit.exit == 3


def test_C013_padding(tmp_path):
    """What the mask hides is nothing."""
    audit = of_rows(
        tmp_path, rows_of([[-1.2, -0.7, -1e10]], [[-1.0, -0.8, 0.0]], loss_mask=[[1, 1, 0]])
    )
    assert audit.result["mismatch"]["d_bar"] == pytest.approx(0.15)
    assert audit.result["mismatch"]["k3"] == pytest.approx(0.011951, abs=1e-6)


def test_C015_a_temperature_of_two_tokens(tmp_path):
    """PPO clips both at the tempered column."""
    rows = rows_of(
        [np.log([0.880797, 0.119203])], [np.log([0.731059, 0.268941])], advantages=[[1.0, -1.0]]
    )
    assert method(of_rows(tmp_path, rows, methods=PPO), "ppo")["cut"] == 1


def test_C024_the_other_convention(tmp_path):
    """Best at +1, and nothing is measured."""
    audit = of_rows(
        tmp_path, rows_of([[-1, -2, -3, 0]], [[0, -1, -2, -3]], loss_mask=[[0, 1, 1, 1]])
    )
    assert first(audit) == ("set aside", "shift")
    assert audit.findings[0].value == 1
    assert audit.exit == 2


def test_C026_a_row_of_other_lengths(tmp_path):
    """Named with both lengths, never cut; the other rows are measured."""
    rows = rows_of(*small())
    rows[2]["rollout_logprobs"].append(-1.0)
    audit = of_rows(tmp_path, rows)
    assert first(audit) == ("set aside", "lengths")
    assert "line 3 has 6 trainer_logprobs, 7 rollout_logprobs entries" in audit.findings[0].sentence
    assert audit.result["counts"]["measured"] == 42
    assert audit.exit == 3


def test_C028_the_start_of_a_packed_sequence(tmp_path):
    """A dummy of 0.0 against -20 is no measurement."""
    audit = of_rows(
        tmp_path, rows_of([[0, -1, -1, -20, -1]], [[0, -1, -1, 0, -1]], loss_mask=[[0, 1, 1, 1, 1]])
    )
    assert audit.result["counts"]["measured"] == 3
    assert audit.result["mismatch"]["d_bar"] == 0


def test_C032_C034_dummies(tmp_path):
    """Tool tokens under the mask are nothing; an appended end token is named."""
    audit = of_rows(
        tmp_path, rows_of([[-1, -5, -7, -2]], [[-1, 0, 0, -2]], loss_mask=[[1, 0, 0, 1]])
    )
    assert audit.result["mismatch"]["d_bar"] == 0
    audit = of_rows(tmp_path, rows_of([[-0.3, -0.4, -6.0]], [[-0.3, -0.4, 0.0]]))
    assert first(audit) == ("set aside", "placeholder")
    assert audit.result["mismatch"]["d_bar"] == 0


def test_C036_everything_is_masked(tmp_path):
    """Exit 0 with a warning, no NaN."""
    audit = of_rows(tmp_path, rows_of(*small(), loss_mask=[[0] * 6] * 8))
    assert first(audit) == ("note", "empty")
    assert audit.exit == 0
    audit = of_rows(tmp_path, rows_of([[]], [[]]))
    assert first(audit) == ("unusable", "empty")
    assert audit.exit == 2


def test_C066_D014_copies(tmp_path):
    """Rows of two ranks are counted once; a column that is a copy makes every rule idle."""
    trainer, rollout = small()
    rows = rows_of(trainer, rollout, step=0, response=list(range(8)))
    for rank in range(2):
        wrote(tmp_path / "ranks", rows, f"rank_{rank}.jsonl")
    audit = audited(tmp_path / "ranks")
    assert audit.result["counts"]["measured"] == 48
    assert "8 responses are exact copies" in check(audit, "duplicate").sentence
    audit = of_rows(tmp_path, rows_of(trainer, trainer), methods=PPO)
    assert first(audit) == ("alarm", "identical")
    assert not method(audit, "ppo")["acts"]


def test_C078_placeholder_versions(tmp_path):
    """-1 under the mask is ordinary; head 2, tail 3, mixed."""
    more = {
        "weight_versions": [[-1, -1, 2, 2, -1, 3]],
        "loss_mask": [[0, 0, 1, 1, 0, 1]],
        "trainer_version": 4,
    }
    audit = of_rows(tmp_path, rows_of([[-1.0] * 6], [[-1.1] * 5 + [-1.2]], **more))
    assert (
        "1 of 1 responses were sampled by several versions of the weights, 2 to 3"
        in check(audit, "mixed_versions").sentence
    )
    assert [x["from"] for x in audit.result["by"]["age"]] == [1, 2]


def test_D001_tool_tokens_and_turns(tmp_path):
    """The mask under another name is asked for; two rounds of seven tokens a row."""
    trainer, rollout = small(tokens=16)
    trainer[:, 7:9], rollout[:, 7:9] = [-4.0, -3.0], 0.0
    rows = rows_of(trainer, rollout, response_mask=[[1] * 7 + [0] * 2 + [1] * 7] * 8)
    with pytest.raises(ValueError, match="say --map mask=response_mask"):
        of_rows(tmp_path, rows)
    audit = of_rows(tmp_path, rows, "mask=response_mask")
    assert audit.result["counts"]["measured"] == 112
    assert audit.result["mismatch"]["d_bar"] < 0.03
    assert [x["tokens"] for x in audit.result["by"]["turn"]] == [56, 56]


def test_D003_a_quarter_of_the_rows_is_moved(tmp_path):
    """They are set aside with their shift; the rest is measured."""
    trainer, rollout = small(rows=40)
    trainer[::4] = np.roll(trainer[::4], -1, axis=1)
    audit = of_rows(tmp_path, rows_of(trainer, rollout))
    assert first(audit) == ("set aside", "shift")
    assert audit.result["counts"]["measured"] == 180
    assert audit.result["mismatch"]["d_bar"] < 0.03
    assert audit.exit == 3


def test_D005_D013_single_tokens(tmp_path):
    """Appended end tokens and two absurd gaps are counted; the rest keeps its size."""
    trainer, rollout = small()
    ends = (
        np.concatenate([trainer, np.full((8, 1), np.log(0.01))], 1),
        np.concatenate([rollout, np.zeros((8, 1))], 1),
    )
    audit = of_rows(tmp_path, rows_of(*ends))
    assert "each the last of its response" in audit.findings[0].sentence
    assert audit.result["counts"]["measured"] == 48
    rng = np.random.default_rng(0)
    rollout = rng.uniform(-6, -0.2, size=(200, 100))
    d = rng.normal(-0.01, 0.03, size=rollout.shape)
    d[3, 7], d[150, 0] = -43.9, -20.0
    audit = of_rows(tmp_path, rows_of(rollout + d, rollout))
    assert check(audit, "absurd").place == "line 4, token 7"
    assert audit.result["counts"]["measured"] == 19_998
    assert audit.result["mismatch"]["d_max"] < 0.2


def test_D015_D023_columns_and_rows_that_lack(tmp_path):
    """The split needs every row; rows without one side are named."""
    before, rollout = small()
    rows = rows_of(
        before + 0.15 * np.sign(rollout + 3), rollout, trainer_logprobs_before=before.tolist()
    )
    assert of_rows(tmp_path, rows).result["mismatch"]["d_engine"] < 0.03
    rows[0].pop("trainer_logprobs_before")
    assert "d_engine" not in of_rows(tmp_path, rows).result["mismatch"]
    for value, left_out in ((None, 1), ([], 1)):
        rows = rows_of(before, rollout)
        rows[0]["rollout_logprobs"] = value
        audit = of_rows(tmp_path, rows)
        assert check(audit, "missing").value == left_out
        assert audit.result["counts"]["measured"] == 42


def test_D016_versions_are_strings(tmp_path):
    """Digits count; "default" is unknown and said so."""
    more = {"weight_versions": [["7"] * 6] * 8, "trainer_version": "7"}
    audit = of_rows(tmp_path, rows_of(*small(), **more))
    assert audit.result["mismatch"]["age"] == 0
    more["weight_versions"] = [["default"] * 6] * 8
    audit = of_rows(tmp_path, rows_of(*small(), **more))
    assert "age" not in audit.result["mismatch"]
    assert check(audit, "stale_engine").status == "not computable"


def test_D029_one_json_object(tmp_path):
    """Six tokens in a .json file are enough for numbers."""
    rows = rows_of(
        [[-0.32, -0.49, -0.23, -0.40, -0.37, -0.35]],
        [[-0.30, -0.51, -0.22, -0.42, -0.39, -0.33]],
        mask=[[1] * 6],
    )
    audit = audited(wrote(tmp_path, rows, "one.json"), "mask=mask")
    assert audit.result["mismatch"]["d_bar"] == pytest.approx(0.018333, abs=1e-6)
    assert audit.result["mismatch"]["d_mean"] == pytest.approx(0.001667, abs=1e-6)
    assert audit.result["mismatch"]["outside"] == 0


def test_D039_one_push_left_out(tmp_path):
    """Step 1 is other weights, no temperature; the two others are measured."""
    rng = np.random.default_rng(0)
    rollout = rng.uniform(-6, -0.2, size=(24, 40))
    size = np.repeat([0.0097, 10.952, 0.0122], 8)[:, None]
    d = np.where(
        size < 1,
        rng.normal(size=rollout.shape) * size,
        -np.minimum(np.abs(rng.normal(size, 4.2, rollout.shape)), 19),
    )
    audit = of_rows(tmp_path, rows_of(rollout + d, rollout, step=[i // 8 for i in range(24)]))
    assert first(audit) == ("set aside", "other weights")
    assert "step 1: half" in audit.findings[0].sentence
    assert audit.result["counts"]["measured"] == 640


def test_D072_noise_that_averages_out(tmp_path):
    """A bias of whole responses is told from independent noise."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(400, 16)) * 0.1
    quiet = of_gaps(tmp_path, noise.tolist())
    assert check(quiet, "response_bias").status == "quiet"
    biased = noise + np.where(np.arange(400) % 2, 0.05, -0.05)[:, None]
    found = check(of_gaps(tmp_path, biased.tolist()), "response_bias")
    assert found.status == "note"
    assert np.sqrt(found.value) == pytest.approx(0.0559 / (np.sqrt(0.0125) / 4), rel=0.1)


def test_D026_ids_of_prompt_and_response(tmp_path):
    """Longer lists of ids are no error; their end belongs to the response."""
    audit = of_rows(tmp_path, rows_of([[-0.3, -0.4]], [[-0.31, -0.42]], token_ids=[list(range(7))]))
    assert audit.tokens.extra["token"].tolist() == [5, 6]
