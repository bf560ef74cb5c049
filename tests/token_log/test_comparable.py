"""Outside numbers: each fault has its name and its number, and clean logs pass."""

import json
from pathlib import Path

import logs
import numpy as np
import pytest
from logs import rows_of, sentence, small, wrote

from simlab.token_log.faults import absurd
from simlab.token_log.names import Names
from simlab.token_log.pairs import noise_pairs, read_pairs, read_tokens

REAL = Path(__file__).parents[1] / "data" / "smollm2_lag8.jsonl"


# ---------------------------------------------------------------- the cases
def test_D001_the_mask_has_another_name(tmp_path):
    """Never 128 tokens: the column is named, and so is the option that makes it the mask."""
    trainer, rollout = small(tokens=16)
    trainer[:, 7:9], rollout[:, 7:9] = [-4.0, -3.0], 0.0
    rows = rows_of(trainer, rollout, response_mask=[[1] * 7 + [0] * 2 + [1] * 7] * 8)
    says = sentence(tmp_path, rows)
    assert "no loss_mask, but response_mask keeps 112 of 128 tokens" in says
    assert "mask=response_mask" in says
    pairs = read_pairs(wrote(tmp_path, rows), Names(mask="response_mask"))
    assert len(pairs[0]) == 112
    assert np.abs(pairs[0] - pairs[1]).mean() < 0.03
    assert "placeholders" in sentence(tmp_path, rows, Names(mask="none"))


@pytest.mark.parametrize("shift", [1, -1, 2])
@pytest.mark.parametrize("every", [1, 4])
def test_D003_a_column_moved(tmp_path, shift, every):
    """All responses or a quarter of them: the best shift, the gap there and the gap as given."""
    trainer, rollout = small(rows=40)
    trainer[::every] = np.roll(trainer[::every], -shift, axis=1)
    says = sentence(tmp_path, rows_of(trainer, rollout))
    assert f"in {40 // every} of 40 responses: best at {shift:+d}, mean |d| 0.02" in says


def test_D003_a_zero_mean_is_no_alignment(tmp_path):
    """The small input of the case."""
    trainer, rollout = small()
    trainer = np.concatenate([trainer[:, 1:], np.full((8, 1), -0.5)], axis=1)
    assert "best at +1" in sentence(tmp_path, rows_of(trainer, rollout))


def test_D005_appended_end_tokens(tmp_path):
    """The last token of every response is exactly 0.0 where the trainer says -4.6."""
    trainer, rollout = small()
    trainer = np.concatenate([trainer, np.full((8, 1), np.log(0.01))], axis=1)
    rollout = np.concatenate([rollout, np.zeros((8, 1))], axis=1)
    says = sentence(tmp_path, rows_of(trainer, rollout))
    assert "line 1, token 6: rollout_logprobs is exactly 0.0 at 8 sampled tokens" in says
    assert "each the last of its response, where trainer_logprobs says -4.61" in says


def test_D007_exact_zeros_that_are_right(tmp_path):
    """18 % exact zeros on both sides are no alarm; the side that is missing is named."""
    trainer, rollout = small(rows=40)
    sure = np.random.default_rng(1).random(rollout.shape) < 0.18
    trainer[sure], rollout[sure] = -1e-6, 0.0
    assert len(read_pairs(wrote(tmp_path, rows_of(trainer, rollout)))[0]) == 240
    rows = [{"generation_log_probs": x.tolist()} for x in rollout]
    assert "column trainer_logprobs is missing" in sentence(tmp_path, rows)
    assert "columns: generation_log_probs" in sentence(tmp_path, rows)


def drawn(seed, scale, n, noise, trainer_t, drawn_t):
    """D008, D011: (trainer, rollout) `[n / 100, 100]`, 50 words, the engine reports temperature 1."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 50)) * scale
    e = z + rng.normal(size=z.shape) * noise
    a = logs.draw(rng, logs.log_softmax(e / drawn_t))[:, None]
    both = logs.log_softmax(z / trainer_t), logs.log_softmax(e)
    return [np.take_along_axis(x, a, -1).reshape(-1, 100) for x in both]


def test_D008_a_temperature_on_one_side(tmp_path):
    """Slopes 1.36 and 1.29 and their E[e^d], and the control passes."""
    says = sentence(tmp_path, rows_of(*drawn(0, 2.5, 6000, 0.06, 0.7, 1.0)))
    assert "a temperature on one side" in says
    assert 1.33 < float(says.split("slope ")[1].split()[0]) < 1.39
    says = sentence(tmp_path, rows_of(*drawn(0, 2.5, 6000, 0.06, 0.7, 0.7)))
    assert 1.26 < float(says.split("slope ")[1].split()[0]) < 1.32
    assert 1.13 < float(says.split("E[e^d] ")[1].split(":")[0]) < 1.19
    assert (
        len(read_pairs(wrote(tmp_path, rows_of(*drawn(0, 2.5, 6000, 0.06, 1.0, 1.0))))[0]) == 6000
    )


@pytest.mark.parametrize("t", [0.6, 0.7, 0.8, 0.9, 1.1, 1.2])
@pytest.mark.parametrize("side", ["trainer_t", "engine_t"])
def test_a_temperature_of_either_side_is_named(tmp_path, side, t):
    """From 0.6 to 1.2, on peaked and on flat states."""
    assert "temperature on one side" in sentence(
        tmp_path, rows_of(*logs.log(3, 64, 100, **{side: t}))
    )


def test_D011_large_but_honest_noise(tmp_path):
    """Mean d -0.53 and sd 1.0 with E[e^d] = 1 is noise, and is replayed."""
    trainer, rollout = drawn(0, 2.0, 40_000, 1.2, 1.0, 1.0)
    assert (trainer - rollout).mean() == pytest.approx(-0.525, abs=0.05)
    assert len(read_pairs(wrote(tmp_path, rows_of(trainer, rollout)))[0]) == 40_000


def test_gaps_of_other_weights_are_named(tmp_path):
    """D039: eleven nats are other weights, and no temperature or truncation."""
    _, rollout = small(rows=40)
    trainer = rollout - np.abs(np.random.default_rng(0).normal(11, 4.2, size=rollout.shape)) % 19
    assert "other weights" in sentence(tmp_path, rows_of(trainer, rollout))


def test_D013_two_absurd_tokens(tmp_path):
    """They are set aside, counted and placed; the rest keeps its spread."""
    rng = np.random.default_rng(0)
    rollout = rng.uniform(-6, -0.2, size=(200, 100))
    d = rng.normal(-0.01, 0.03, size=rollout.shape)
    d[3, 7], d[150, 0] = -43.9, -20.0
    pairs = noise_pairs(wrote(tmp_path, rows_of(rollout + d, rollout)))
    assert len(pairs.trainer) == 19_998
    assert (pairs.trainer - pairs.rollout).std() == pytest.approx(0.03, rel=0.05)
    (note,) = pairs.notes
    assert note.startswith(
        "line 4, token 7: 2 tokens have a gap of 20 nats or more, 43.9 at most (1.0e-04"
    )


def test_many_absurd_tokens_are_refused(tmp_path):
    """One of 48 is no accident that may be left out."""
    trainer, rollout = small()
    trainer[2, 2] = -1e10
    assert "line 3, token 2: 1 tokens have a gap of 20 nats or more" in sentence(
        tmp_path, rows_of(trainer, rollout)
    )


def test_D014_a_copied_column(tmp_path):
    """All 48 gaps are 0."""
    trainer, _ = small()
    assert "all 48 gaps are exactly 0" in sentence(tmp_path, rows_of(trainer, trainer))


def test_D015_a_column_of_some_rows(tmp_path):
    """The row that lacks the better column is named, wherever it stands."""
    before, rollout = small()
    for lacks in (0, 5):
        rows = rows_of(before + 0.15, rollout, trainer_logprobs_before=before.tolist())
        rows[lacks].pop("trainer_logprobs_before")
        assert f"line {lacks + 1} has no trainer_logprobs_before" in sentence(tmp_path, rows)


@pytest.mark.parametrize("name", ["loss_mask", "weight_versions"])
def test_a_field_missing_in_the_first_row_only(tmp_path, name):
    """A mask or a version that one row lacks."""
    trainer, rollout = small()
    more = {
        "loss_mask": [[1] * 6] * 8,
        "weight_versions": [[3] * 6] * 8,
        "trainer_version": [3] * 8,
    }
    rows = rows_of(trainer, rollout, **more)
    rows[0].pop(name)
    assert f"line 1 has no {name}" in sentence(tmp_path, rows)


def test_D016_versions_are_strings(tmp_path):
    """Digits count, "default" is unknown, one version stands for the whole row."""
    trainer, rollout = small()
    for versions in (["7"] * 6, ["7"], "7", 7):
        more = {"weight_versions": [versions] * 8, "trainer_version": ["7"] * 8}
        assert len(read_pairs(wrote(tmp_path, rows_of(trainer, rollout, **more)))[0]) == 48
    more = {"weight_versions": [["default"] * 6] * 8, "trainer_version": [7] * 8}
    says = sentence(tmp_path, rows_of(trainer, rollout, **more))
    assert "version of the weights is unknown (at 48 of 48 sampled tokens)" in says


def test_C078_placeholder_versions_and_negative_ages(tmp_path):
    """-1 under the mask is ordinary; at a sampled token it is refused, and so is an age below 0."""
    trainer, rollout = small()
    more = {"loss_mask": [[0, 0, 1, 1, 0, 1]] * 8, "trainer_version": [3] * 8}
    fine = rows_of(trainer, rollout, weight_versions=[[-1, -1, 3, 3, -1, 3]] * 8, **more)
    assert len(read_pairs(wrote(tmp_path, fine))[0]) == 24
    wrong = rows_of(trainer, rollout, weight_versions=[[-1, -1, -1, 3, -1, 3]] * 8, **more)
    assert "line 1, token 2: weight_versions is -1 (at 8 of 24 sampled tokens)" in sentence(
        tmp_path, wrong
    )
    ahead = rows_of(trainer, rollout, weight_versions=[[-1, -1, 3, 3, -1, 4]] * 8, **more)
    assert (
        "sampled at version 4 and scored at version 3 (8 of 24 tokens): a negative age"
        in sentence(tmp_path, ahead)
    )
    alone = rows_of(trainer, rollout, weight_versions=[[3] * 6] * 8)
    assert "weight_versions without trainer_version" in sentence(tmp_path, alone)


def test_versions_under_another_name(tmp_path):
    """A column that may hold versions is named; ages of 0 say that there is no lag."""
    trainer, rollout = small()
    rows = rows_of(trainer, rollout, rollout_version=[[0] * 6] * 8, trainer_version=[8] * 8)
    says = sentence(tmp_path, rows)
    assert "rollout_version may say which weights sampled" in says
    assert "version=rollout_version" in says
    says = sentence(tmp_path, rows, Names(version="rollout_version"))
    assert "sampled at version 0 and scored at version 8" in says
    assert len(read_pairs(wrote(tmp_path, rows), Names(version="none"))[0]) == 48
    assert len(read_pairs(wrote(tmp_path, rows_of(trainer, rollout, staleness=[0] * 8)))[0]) == 48
    assert "staleness may say" in sentence(
        tmp_path, rows_of(trainer, rollout, staleness=[0, 1] * 4)
    )


@pytest.mark.parametrize(
    "name",
    ["lossMask", "loss-mask", "ACTION_MASK", "assistant_tokens", "generated", "keep", "loss_weights", "labels_valid"],
)  # fmt: skip
def test_a_mask_in_any_spelling_is_named(tmp_path, name):
    """A list of 0 and 1 that is not all 1 may be the mask; numbers and a list of 1 are none."""
    trainer, rollout = small()
    rows = rows_of(trainer, rollout, **{name: [[0, 1, 1, 1, 1, 1]] * 8})
    says = sentence(tmp_path, rows)
    assert f"no loss_mask, but {name} keeps 40 of 48 tokens" in says
    assert f"mask={name} (or mask=none)" in says
    for x in ([1] * 6, [0.5] * 6, 1):
        rows = rows_of(trainer, rollout, **{name: [x] * 8})
        assert len(read_pairs(wrote(tmp_path, rows))[0]) == 48


@pytest.mark.parametrize(
    "name",
    ["policyVersion", "policy-version", "rollout_step", "weights_step", "step_sampled", "model_checkpoint", "policy_lag"],
)  # fmt: skip
def test_a_version_in_any_spelling_is_named(tmp_path, name):
    """Steps, updates and checkpoints of weights too; versions of anything else are nothing."""
    trainer, rollout = small()
    says = sentence(tmp_path, rows_of(trainer, rollout, **{name: [3, 4] * 4}))
    assert f"no weight_versions, but {name} may say which weights sampled" in says
    other = {x: [3, 4] * 4 for x in ("schemaVersion", "dataset_version", "global_step", "update")}
    assert len(read_pairs(wrote(tmp_path, rows_of(trainer, rollout, **other)))[0]) == 48


def test_C066_rows_that_are_there_twice(tmp_path):
    """Copies are counted once, by their keys, or by their numbers if they are long; the note says so."""
    trainer, rollout = small(tokens=20)
    twice = np.concatenate([trainer, trainer]), np.concatenate([rollout, rollout])
    pairs = noise_pairs(wrote(tmp_path, rows_of(*twice)))
    assert len(pairs.trainer) == 160
    assert pairs.notes == ["line 9, token 0: 8 responses are exact copies of another; counted once"]
    ids = rows_of(*twice, step=[0] * 16, response=list(range(16)))
    assert len(read_pairs(wrote(tmp_path, ids))[0]) == 320
    ranks = tmp_path / "ranks"
    for rank in range(2):
        wrote(
            ranks,
            rows_of(trainer[:, :6], rollout[:, :6], step=[0] * 8, response=list(range(8))),
            f"rank_{rank}.jsonl",
        )
    pairs = noise_pairs(str(ranks))
    assert len(pairs.trainer) == 48
    assert pairs.notes[0].startswith("rank_1.jsonl, line 1, token 0: 8 responses")


def test_C009_C024_C032_C034_small_inputs(tmp_path):
    """Truncation by its kept mass, the other convention by its shift, tool and end tokens by their zeros."""
    rollout = np.log(np.tile([0.625, 0.375, 0.625], (10, 1)))
    says = sentence(tmp_path, rows_of(rollout + np.log(0.8), rollout))
    assert "E[e^d] = 0.800 (1 for noise), mean d -0.223, 100% below 0" in says
    rollout = np.tile([0.0, -1.0, -2.0, -3.0, -1.5], (10, 1))
    trainer = np.tile([-1.0, -2.0, -3.0, -1.5, 0.0], (10, 1))
    rows = rows_of(trainer, rollout, loss_mask=[[0, 1, 1, 1, 1]] * 10)
    assert "in 10 of 10 responses: best at +1, mean |d| 0 there" in sentence(tmp_path, rows)
    trainer, rollout = small()
    trainer[:, 1:3], rollout[:, 1:3] = [-5.0, -7.0], 0.0
    assert "at 16 sampled tokens" in sentence(tmp_path, rows_of(trainer, rollout))
    masked = rows_of(trainer, rollout, loss_mask=[[1, 0, 0, 1, 1, 1]] * 8)
    assert len(read_pairs(wrote(tmp_path, masked))[0]) == 32


def test_prompt_tokens_and_scattered_zeros(tmp_path):
    """Prompt tokens of 0.0, and 5 % zeros anywhere, are placeholders; a constant offset is one."""
    trainer, rollout = small(rows=40, tokens=20)
    prompt = rollout.copy()
    prompt[:, :5] = 0.0
    assert "exactly 0.0" in sentence(tmp_path, rows_of(trainer, prompt))
    some = np.where(np.random.default_rng(0).random(rollout.shape) < 0.05, 0.0, rollout)
    assert "exactly 0.0" in sentence(tmp_path, rows_of(trainer, some))
    assert "one side has an offset" in sentence(
        tmp_path, rows_of(rollout + 0.1, rollout - 0.001 * trainer)
    )


def test_log_probs_above_zero(tmp_path):
    """Rounding is counted and read as 0; more is refused."""
    trainer, rollout = small()
    trainer[1, 1], rollout[1, 1] = 6e-8, -1e-4
    pairs = noise_pairs(wrote(tmp_path, rows_of(trainer, rollout)))
    assert pairs.notes == ["trainer_logprobs is above 0 at 1 tokens, by 6.0e-08 at most: read as 0"]
    assert pairs.trainer.max() == 0
    trainer[1, 1] = 0.5
    assert "line 2, token 1: trainer_logprobs is 0.5, not a log-prob" in sentence(
        tmp_path, rows_of(trainer, rollout)
    )


def test_C011_C013_numbers_that_are_none(tmp_path):
    """-inf at a sampled token is refused and never becomes 0; padding of -1e10 under the mask is nothing."""
    trainer, rollout = small()
    trainer[0, 1] = -np.inf
    says = sentence(tmp_path, rows_of(trainer, rollout))
    assert "line 1, token 1: trainer_logprobs is -inf, not a log-prob (1 such tokens)" in says
    trainer[0, 1], mask = -1e10, np.ones((8, 6), dtype=int)
    mask[0, 1] = 0
    assert (
        len(read_pairs(wrote(tmp_path, rows_of(trainer, rollout, loss_mask=mask.tolist())))[0])
        == 47
    )


def test_C045_overflowing_ratios_are_counted():
    """Log-ratios of 700, -700 and 21: three of four, decided on the log-ratio."""
    d = np.array([700, -700, 21, 0.1])
    finding = absurd(d - 800, np.full(4, -800.0), np.ones(4, dtype=bool))
    assert finding.refuses
    assert finding.number == 0.75
    assert finding.tokens.tolist() == [0, 1, 2]


def test_C107_D029_other_names_and_a_list_in_a_list(tmp_path):
    """Named columns, flat or wrapped once more, with masks of 0.0 and 1.0: mean |d| 0.01, signed 0."""
    names = Names("prev_logprobs", "generation_logprobs", "token_loss_mask")
    flat = {
        "token_loss_mask": [0.0, 1.0, 1.0],
        "generation_logprobs": [0, -0.2, -0.3],
        "prev_logprobs": [0, -0.21, -0.29],
    }
    rows = [flat, {name: [x] for name, x in flat.items()}]
    for some in ([rows[0]], [rows[1]], rows):
        t, _ = read_tokens(wrote(tmp_path, some), names)
        d = (t.trainer - t.rollout)[t.mask]
        assert np.abs(d).mean() == pytest.approx(0.01)
        assert d.mean() == pytest.approx(0, abs=1e-12)
    says = sentence(tmp_path, rows)
    assert "if prev_logprobs is it, say --noise replay:path=FILE,trainer=prev_logprobs" in says
    one = {
        "rollout_logprobs": [-0.30, -0.51, -0.22, -0.42, -0.39, -0.33],
        "trainer_logprobs": [-0.32, -0.49, -0.23, -0.40, -0.37, -0.35],
        "mask": [1] * 6,
    }
    t, _ = read_tokens(wrote(tmp_path, [one]), Names(mask="mask"))
    assert np.abs(t.trainer - t.rollout).mean() == pytest.approx(0.018333, abs=1e-6)
    assert (t.trainer - t.rollout).mean() == pytest.approx(0.001667, abs=1e-6)
    assert "6 unmasked tokens, at least 20 are needed" in sentence(tmp_path, [one])


# ---------------------------------------------------------------- faults put into a real log
def quarter(rows, trainer):
    for row in rows[::4]:
        row[trainer] = [*row[trainer][1:], -1.0]


def all_rows(rows, trainer):
    for row in rows:
        row[trainer] = [-1.0, *row[trainer][:-1]]


def zeros(rows, trainer):
    for i, row in enumerate(rows):
        row["rollout_logprobs"] = [
            0.0 if (7 * i + j) % 20 == 0 else x for j, x in enumerate(row["rollout_logprobs"])
        ]


def copied(rows, trainer):
    for row in rows:
        row["rollout_logprobs"] = row[trainer]


def truncated(rows, trainer):
    for row in rows:
        row["rollout_logprobs"] = [min(x + 0.1, 0.0) for x in row["rollout_logprobs"]]


def flatter(rows, trainer):
    for row in rows:
        row[trainer] = [0.8 * x for x in row[trainer]]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (quarter, "in 5 of 23 responses: best at +1"),
        (all_rows, "in 23 of 23 responses: best at -1"),
        (zeros, "is exactly 0.0 at"),
        (copied, "gaps are exactly 0: one column is a copy"),
        (truncated, "top-p, top-k or min-p"),
        (flatter, "flatter than the rollout: slope 0.80"),
    ],
)
def test_a_fault_in_a_real_log_is_named(tmp_path, fault, says):
    """The log passes, with the fault it does not."""
    rows = [json.loads(line) for line in REAL.read_text().splitlines()]
    assert read_pairs(wrote(tmp_path, rows))[0].size == read_pairs(str(REAL))[0].size
    fault(rows, "trainer_logprobs_before")
    assert says in sentence(tmp_path, rows)


def test_texts_beside_the_numbers_are_nothing(tmp_path):
    """Texts, ids and versions of software are no versions of weights, no masks and no numbers."""
    trainer, rollout = small()
    more = {
        "response": ["42"] * 8,
        "response_id": [f"a-{i}" for i in range(8)],
        "engine_version": ["0.5.23"] * 8,
        "mask_kind": [None, "x", 3, "y"] * 2,
        "trained_on_version_of": [{"a": 1}] * 8,
    }
    path = wrote(tmp_path, rows_of(trainer, rollout, **more))
    assert len(read_pairs(path)[0]) == 48
    short = np.concatenate([trainer[:, :2]] * 2), np.concatenate([rollout[:, :2]] * 2)
    texts = rows_of(*short, response=["42"] * 16, step=[0] * 16)
    assert len(read_pairs(wrote(tmp_path, texts))[0]) == 32


# ---------------------------------------------------------------- clean logs pass
SIZES = [(8, 6), (24, 40), (64, 300)]
NOISES = [
    ("gaussian", 0.02),
    ("gaussian", 0.5),
    ("student_t", 0.05),
    ("student_t", 0.3),
    ("bf16", 0.1),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("noise", NOISES)
def test_clean_logs_pass(tmp_path, noise, size):
    """Seeds of three sizes; docs/token_log.md has the rate over many more."""
    for seed in range(3):
        trainer, rollout = logs.log(seed, *size, *noise)
        read_pairs(wrote(tmp_path, rows_of(trainer, rollout)))
        read_pairs(wrote(tmp_path, rows_of(*logs.measured(seed, *size))))
