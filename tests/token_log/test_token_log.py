"""The token log: bit-for-bit round trips, sentences for what is wrong, and the simulator's own log."""

import json
import math
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from simlab.contract.batches import cast, ragged
from simlab.core.aggregate import mean, token_mean
from simlab.core.tokens import TokenBatch
from simlab.simulator.config import Config, WorldSpec
from simlab.simulator.token_rows import simulator_rows
from simlab.simulator.train import train
from simlab.stabilizers import bind
from simlab.study.settings import Training
from simlab.token_log.files import read, steps, write_step
from simlab.token_log.pairs import read_pairs
from simlab.token_log.rows import experts_digest, from_batch, to_batch
from simlab.token_log.schema import KINDS, LOGPROB_MODES, SCHEMA, Run

ROOT = Path(__file__).parents[2]
RUN = Run.of(
    bind("sat", alpha=0.8, eps_high=0.28),
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    logprob_mode="scaled",
    aggregation="token_mean",
    code_version="0.1.0 abc",
    notes={"engine": "none"},
)


def in_order(b):
    """The tokens sorted by response and position, as a log returns them."""
    position = torch.zeros_like(b.response) if b.position is None else b.position
    order = (1000 * b.response + position).sort(dim=-1, stable=True).indices

    def pick(x):
        index = order.unsqueeze(-1).expand(*order.shape, 2) if x.dim() > order.dim() else order
        return x.gather(order.dim() - 1, index)

    return replace(b, **{name: pick(x) for name, x in b.held().items()})


DERIVED = ("reward", "group", "position")  # a log has them from columns of its own


def rows_of(b, step=7, **more):
    """Rows of a batch with made-up tokens, groups and rewards."""
    lanes = [5, 3][: b.logp.shape[0]] if b.logp.dim() == 2 else None
    of_response = (*b.logp.shape[:-1], b.n_responses)
    ids = torch.arange(b.logp.numel()).view(b.logp.shape)
    group = torch.arange(b.n_responses).expand(of_response) // 2
    reward = torch.linspace(0, 1, b.n_responses, dtype=torch.float64).expand(of_response)
    wanted = {"step": step, "trainer_version": 9, "token_ids": ids, "group": group}
    return from_batch(b, **wanted | {"reward": reward, "lanes": lanes} | more)


def assert_same(a, b):
    """Every field: dtype, shape and bits."""
    for f in fields(TokenBatch)[:-3]:
        if f.name in DERIVED:
            continue
        x, y = getattr(a, f.name), getattr(b, f.name)
        assert (x is None) == (y is None), f.name
        if x is not None:
            assert x.dtype == y.dtype, f.name
            assert x.shape == y.shape, f.name
            assert x.contiguous().numpy().tobytes() == y.contiguous().numpy().tobytes(), f.name
    assert a.n_responses == b.n_responses


# ---------------------------------------------------------------- the record
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lanes", [(), (2,)])
def test_a_batch_comes_back_bit_for_bit(tmp_path, dtype, lanes):
    """Every field, through a file: masked NaN, infinities, -0 and the order of lanes included."""
    b = ragged(lanes=lanes, dtype=dtype, by_token=True)
    odd = torch.where(b.mask, b.logp_mu, torch.nan)
    odd[..., :3] = torch.tensor([-torch.inf, torch.nan, -0.0])
    b = replace(b, logp_mu=odd)
    path = write_step(tmp_path, 7, rows_of(b), RUN)
    assert_same(to_batch(read(path).rows), in_order(b))


def test_rewards_groups_and_positions_come_back():
    """From the columns of the response and the order in its row, tokens in any order."""
    b = ragged(dtype=torch.float32)
    group = torch.tensor([3, 3, 1, 1, 0, 0, 2])
    reward = torch.tensor([0.5, 1, 0, 0.25, 1, 1, 0])
    back = to_batch(rows_of(b, group=group, reward=reward))
    assert torch.equal(back.group, group[back.response])
    assert torch.equal(back.reward, reward[back.response])
    assert back.reward.dtype == torch.float32
    sizes = back.response.bincount().tolist()
    assert back.position.tolist() == [t for n in sizes for t in range(n)]
    place = back.response * 100 + back.position
    assert torch.equal(back.logp, b.logp[(b.response * 100 + b.position).argsort()])
    assert torch.equal(place, place.sort().values)


def test_a_batch_of_required_fields_comes_back():
    """Fields that the batch lacks are columns that the log lacks."""
    b = ragged(dtype=torch.float32)
    b = TokenBatch(b.logp, b.logp_mu, b.advantage, b.mask, b.response, age=b.age, n_responses=7)
    rows = rows_of(b)
    assert "proximal_logprobs" not in rows.columns
    assert_same(to_batch(rows), in_order(b))


def test_half_precision_is_widened():
    """bf16 becomes the float32 of the same value."""
    b = cast(ragged(), torch.bfloat16)
    assert_same(to_batch(rows_of(b)), in_order(cast(b, torch.float32)))


def test_empty_responses_and_batches_are_kept():
    """Responses without a token, and no token at all, are ordinary; padding is left out."""
    x, none = torch.tensor([-1.0, -2.0, -3.0]), torch.zeros(0)
    mask, response = torch.tensor([True, False, False]), torch.tensor([2, 2, -1])
    b = TokenBatch(x, x, x, mask, response, age=torch.tensor([0, 1, 9]), n_responses=4)
    rows = rows_of(b)
    assert rows["token_ids"].to_list() == [[], [], [0, 1], []]
    assert_same(to_batch(rows), b.take(torch.tensor([0, 1])))
    nothing = TokenBatch(none, none, none, none.bool(), none.long(), age=none.long())
    assert_same(to_batch(rows_of(nothing)), nothing)
    assert to_batch(rows.clear()).logp.shape == (0,)
    assert rows["weight_versions"][2].to_list() == [9, 8]


def test_a_choice_of_rows_is_a_batch():
    """Responses are numbered anew, and the loss is that of the chosen responses."""
    b = in_order(ragged())
    some = to_batch(rows_of(b).filter(pl.col("group") == 2))
    taken = b.take(torch.isin(b.response, torch.tensor([4, 5])).nonzero().squeeze(-1))
    assert torch.equal(some.logp, taken.logp)
    assert torch.equal(some.response, taken.response - 4)
    assert some.n_responses == 2


def test_what_cannot_be_rows_is_one_sentence():
    """No age, no names of lanes, a sampled token of no response, an unknown column, uneven lanes."""
    b = ragged()
    with pytest.raises(ValueError, match="a token log needs age"):
        rows_of(replace(b, age=None))
    with pytest.raises(ValueError, match="name for each of its lanes"):
        rows_of(ragged(lanes=(2,)), lanes=[1])
    with pytest.raises(ValueError, match="n_responses is 7"):
        rows_of(replace(b, response=torch.where(b.mask, 7, b.response)))
    with pytest.raises(ValueError, match="has no column entropies"):
        rows_of(b, entropies=b.logp)
    with pytest.raises(ValueError, match="equally many responses and tokens"):
        to_batch(rows_of(ragged(lanes=(2,)))[:-1])


def test_further_columns_are_kept():
    """Per response and per token, by name; a prompt has a length of its own."""
    b = ragged()
    why, prompt = ["stop"] * 7, [[1, 2]] * 6 + [[]]
    rows = rows_of(b, entropy=b.entropy_mu, finish_reason=why, prompt_ids=prompt)
    assert rows["finish_reason"].to_list() == why
    assert rows["prompt_ids"].to_list() == prompt
    assert rows["entropy"].equals(rows["rollout_entropy"])


def test_the_digest_tells_experts_apart():
    """Another expert or another shape is another digest; the dtype of the input is not."""
    a = torch.arange(12).view(2, 3, 2)
    other = a.clone()
    other[1, 2, 1] += 1
    digests = [experts_digest(x) for x in (a, other, a.view(3, 2, 2))]
    assert len(set(digests)) == 3
    assert experts_digest(a.numpy().astype(np.int32)) == digests[0]
    assert experts_digest(a.transpose(0, 1).contiguous().transpose(0, 1)) == digests[0]


# ---------------------------------------------------------------- files
def test_settings_come_back(tmp_path):
    """Run settings are the metadata; arguments hold the defaults too, and bind again."""
    run = read(write_step(tmp_path, 7, rows_of(ragged()), RUN)).run
    assert run == RUN
    assert run.eps == (0.2, 0.28)
    assert run.arguments["alpha"] == 0.8
    assert bind(run.stabilizer, **run.arguments).name == "sat"
    assert Run.of(bind("none"), **{**SETTINGS, "horizon": 4}).eps is None


SETTINGS = {f.name: getattr(RUN, f.name) for f in fields(Run)}
for name in ("stabilizer", "arguments", "eps"):
    del SETTINGS[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("top_p", 1.5), ("top_k", 0), ("logprob_mode", "?"), ("aggregation", "sum"),
     ("stabilizer", ""), ("eps", (1,)), ("eps", 0.2), ("eps", (math.nan, 0.2)), ("code_version", ""), ("arguments", [1]),
     ("temperature", "1"), ("top_k", True), ("logprob_mode", []), ("horizon", 0), ("notes", 3)],
)  # fmt: skip
def test_impossible_settings_are_refused(tmp_path, name, value):
    """By the constructor, and by the reader with the name of the file."""
    with pytest.raises(ValueError, match=rf"^{name} cannot be "):
        replace(RUN, **{name: value})
    path, held = tmp_path / "x.parquet", RUN.metadata() | {name: json.dumps(value)}
    rows_of(ragged()).write_parquet(path, metadata=held)
    with pytest.raises(ValueError, match=rf"x.parquet: metadata {name} cannot be "):
        read(path)


def test_D037_what_the_sampler_did_can_be_written_down(tmp_path):
    """min_p, penalties, other processors; the engine's own word for what its log-probs are."""
    did = {"min_p": 0.05, "repetition_penalty": 1.1, "bad_words": "two of them"}
    run = replace(RUN, sampling=did, logprob_mode="processed_logprobs")
    back = read(write_step(tmp_path, 7, rows_of(ragged()), run)).run
    assert back == run
    assert (back.sampling, back.logprob_mode) == (did, "support")
    assert replace(RUN, logprob_mode="raw_logprobs").logprob_mode == "raw"
    for wrong in ({"min_p": "0.05"}, {"repetition_penalty": math.nan}, {"bad_words": 2}, []):
        with pytest.raises(ValueError, match="sampling cannot be"):
            replace(RUN, sampling=wrong)
    path, held = tmp_path / "x.parquet", RUN.metadata()
    del held["sampling"]
    rows_of(ragged()).write_parquet(path, metadata=held)
    assert read(path).run == RUN


def test_an_aggregation_comes_with_its_horizon():
    """A loss that was divided by the horizon cannot be computed again without it."""
    with pytest.raises(
        ValueError, match="horizon is needed by aggregation seq_mean_token_sum_norm"
    ):
        replace(RUN, aggregation="seq_mean_token_sum_norm", horizon=None)


def test_steps_are_files(tmp_path):
    """Sorted by step; a step that is written again replaces itself; no part is left or read."""
    for step in (12, 3, 12):
        write_step(tmp_path / "log", step, rows_of(ragged(), step=step), RUN)
    (tmp_path / "log" / "step_00000099.parquet.part").touch()
    found = steps(tmp_path / "log")
    assert [path.name for path in found] == ["step_00000003.parquet", "step_00000012.parquet"]
    assert pl.scan_parquet(tmp_path / "log" / "*.parquet").collect()["step"].n_unique() == 2
    with pytest.raises(ValueError, match="holds rows of step 7"):
        write_step(tmp_path / "log", 8, rows_of(ragged(), step=7), RUN)
    with pytest.raises(ValueError, match="holds no step_"):
        steps(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """A disk that is full half-way: the step that was there stays, whole."""
    path = write_step(tmp_path, 7, rows_of(ragged()), RUN)
    before = path.read_bytes()

    def full(self, file, **_):
        Path(file).write_bytes(before[:100])
        raise OSError("disk full")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    with pytest.raises(OSError, match="disk full"):
        write_step(tmp_path, 7, rows_of(ragged(seed=1)), RUN)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def change(column, row, value):
    """A change of one row of a column."""

    def changed(rows):
        held = rows[column].to_list()
        held[row] = value
        return rows.with_columns(pl.Series(column, held, rows.schema[column], strict=False))

    return changed


LISTS = {"loss_mask": [1, 0, 2, 1, 1, 1, 1], "rollout_logprobs": [-1.0, None] + [-1.0] * 5}
WRONG = {
    "x.parquet: unknown column reward_model;": lambda r: r.with_columns(reward_model=r["reward"]),
    "x.parquet: column advantages is missing": lambda r: r.drop("advantages"),
    "x.parquet: column token_ids is List\\(Float64\\), not a list of integers": lambda r: (
        r.with_columns(r["token_ids"].cast(pl.List(pl.Float64)))
    ),
    "column trainer_logprobs is List\\(Int64\\), not a list of float": lambda r: r.with_columns(
        r["trainer_logprobs"].cast(pl.List(pl.Int64))
    ),
    "column reward is List\\(Float64\\), not a float": lambda r: r.with_columns(
        reward=r["advantages"]
    ),
    "column finish_reason is Int64, not a string": lambda r: r.with_columns(
        finish_reason=r["group"]
    ),
    "column top_logprobs is List\\(Float64\\), not a list of arrays": lambda r: r.with_columns(
        top_logprobs=r["entropy"]
    ),
    "row 2, reward is null": change("reward", 2, None),
    "row 4, entropy is null": change("entropy", 4, None),
    "row 1 has 2 advantages entries for 7 token_ids": change("advantages", 1, [0.5, 0.5]),
    "row 0 has 0 loss_mask entries for 1 token_ids": change("loss_mask", 0, []),
    "row 1, loss_mask\\[2\\] is 2, not 0 or 1": change("loss_mask", 1, LISTS["loss_mask"]),
    "row 0, loss_mask\\[0\\] is null, not 0 or 1": change("loss_mask", 0, [None]),
    "row 1, rollout_logprobs\\[1\\] is null": change("rollout_logprobs", 1, LISTS["rollout_logprobs"]),
    "row 3, top_logprobs\\[0\\] is null": change("top_logprobs", 3, [[-1.0, None]]),
    "row 5, prompt_ids\\[1\\] is null": lambda r: r.with_columns(
        pl.Series("prompt_ids", [[], [1, 2], [], [], [], [1, None], [1]], pl.List(pl.Int64))
    ),
    "row 3, response 3 is there twice": change("response", 5, 3),
}  # fmt: skip


@pytest.mark.parametrize("sentence", WRONG)
def test_what_breaks_the_schema_is_one_sentence(tmp_path, sentence):
    """Reader and writer refuse it alike, naming file, row and column."""
    b = ragged()
    rows = WRONG[sentence](rows_of(b, entropy=b.entropy_mu))
    rows.write_parquet(tmp_path / "x.parquet", metadata=RUN.metadata())
    with pytest.raises(ValueError, match=sentence) as caught:
        read(tmp_path / "x.parquet")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=sentence.removeprefix("x.parquet: ")):
        write_step(tmp_path, 7, rows, RUN)


@pytest.mark.parametrize(
    "name", ["token_log", *(f.name for f in fields(Run) if f.name != "sampling")]
)
def test_missing_metadata_is_one_sentence(tmp_path, name):
    """Every setting must be there, and be JSON."""
    path, held = tmp_path / "x.parquet", RUN.metadata()
    rows = rows_of(ragged())
    rows.write_parquet(path, metadata={k: v for k, v in held.items() if k != name})
    with pytest.raises(ValueError, match=f"x.parquet: metadata {name} is missing"):
        read(path)
    rows.write_parquet(path, metadata=held | {name: "{"})
    with pytest.raises(ValueError, match=f"x.parquet: metadata {name} is '{{', not JSON"):
        read(path)


def test_a_file_of_another_kind_is_one_sentence(tmp_path):
    """No Parquet, no file, a later version."""
    path = tmp_path / "x.parquet"
    with pytest.raises(ValueError, match=r"x\.parquet: cannot be read"):
        read(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"x\.parquet: cannot be read"):
        read(path)
    rows_of(ragged()).write_parquet(path, metadata=RUN.metadata() | {"token_log": "2"})
    with pytest.raises(ValueError, match="version 2, this reads 1"):
        read(path)


# ---------------------------------------------------------------- the simulator
def logged(method="sat", lag="2", steps=6, **settings):
    """(batch, rows, logged row) of every step of a small run, taken by the loop's hook."""
    world = WorldSpec(prompts=3, horizon=5, vocab=4, answers=4)
    how = Training(steps=steps, log_every=1, **settings)
    config = Config(
        world=world,
        training=how,
        methods=(method,),
        reference=method,
        lags=(lag,),
        healthy_lag=lag,
        seeds=2,
    )
    (cell,) = config.cells()
    kept = []

    def log(step, b, answers, logp, logp_rollout):
        tables = {"logp": logp, "logp_rollout": logp_rollout}
        made = partial(simulator_rows, slot=answers.slot, reward=answers.reward, **tables)
        kept.append((b, made(b, step=step, seeds=cell.seeds)))

    found = train(cell, log)
    return [(b, rows, found[2 * i : 2 * i + 2]) for i, (b, rows) in enumerate(kept)]


def test_the_loss_of_the_simulator_is_read_off_its_log(tmp_path):
    """Through files, `to_batch` is the loop's own batch and gives its loss, to the last bit."""
    for step, (b, rows, found) in enumerate(logged()):
        run = Run.of(bind("sat"), **SETTINGS)
        back = to_batch(read(write_step(tmp_path, step, rows, run)).rows)
        assert_same(back, replace(b, logp=b.logp.detach()))
        stabilizer = bind(run.stabilizer, **run.arguments)
        loss = -mean(*token_mean(stabilizer(back).S, back))
        assert loss.tolist() == [row["loss"] for row in found]


def test_the_simulator_knows_lag_apart_from_noise():
    """Ages, groups, rewards, tokens and the three log-probs are those of the world."""
    b, rows, _ = logged(method="estr", proximal="step")[3]
    assert rows["lane"].to_list() == [0] * 12 + [1] * 12
    assert rows["group"].to_list() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2] * 2
    assert rows["weight_versions"].explode().unique().to_list() == [0]
    assert rows["token_ids"].explode().max() == 3
    assert rows["trainer_logprobs_step"].equals(rows["trainer_logprobs"])
    assert not rows["trainer_logprobs_before"].equals(rows["trainer_logprobs"])
    entropy = rows["entropy"].explode()
    assert 0 < entropy.min() < entropy.max() <= np.log(4) + 1e-6
    assert torch.equal(to_batch(rows).entropy_mu, b.entropy_mu)
    flat = rows.group_by("lane", "group").agg(pl.col("reward").n_unique() == 1)
    assert 0 < len(flat.filter(~pl.col("reward")))


def test_noise_is_resampled_from_a_log(tmp_path):
    """`--noise-from` reads the file: the trainer at the rollout's weights, not the lag."""
    b, rows, _ = logged()[3]
    path = write_step(tmp_path, 3, rows, RUN)
    trainer, rollout = read_pairs(str(path))
    assert np.array_equal(rollout, b.logp_mu.double().numpy().ravel())
    assert np.abs(trainer - rollout).mean() < (b.logp - b.logp_mu).abs().mean()
    Config(noise_from=path)
    write_step(tmp_path, 3, rows.drop("trainer_logprobs_before"), RUN)
    with pytest.raises(ValueError, match="sampled at version 0 and scored at version 3"):
        read_pairs(str(path))


# ---------------------------------------------------------------- the page
def test_the_page_lists_the_schema():
    """docs/token_log.md has a row for every column, setting and mode."""
    page = (ROOT / "docs" / "token_log.md").read_text()
    for name, column in SCHEMA.items():
        must = "yes" if column.required else ""
        row = f"| `{name}` | {KINDS[column.kind]} | {must} | {column.meaning} |"
        assert row.replace("|  |", "| |") in page
    for name in ("token_log", *(f.name for f in fields(Run))):
        assert f"| `{name}` |" in page
    for name, meaning in LOGPROB_MODES.items():
        assert f"`{name}`: {meaning}" in page
