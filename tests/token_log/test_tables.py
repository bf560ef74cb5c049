"""Files of a log: every kind, folders and globs, damage in one sentence."""

import gzip
import json
import tracemalloc

import numpy as np
import polars as pl
import pytest
from logs import rows_of, sentence, small, wrote

from simlab.token_log.files import members
from simlab.token_log.names import Names
from simlab.token_log.pairs import noise_pairs, read_pairs


def test_D018_a_list_in_a_list(tmp_path):
    """Read as it is; two lists in a list are one short sentence."""
    trainer, rollout = small(rows=3, tokens=8192)
    rows = rows_of(trainer[:, None], rollout[:, None])
    for name in ("log.jsonl", "log.parquet"):
        path = tmp_path / name
        (pl.DataFrame(rows).write_parquet if name[-1] == "t" else pl.DataFrame(rows).write_ndjson)(
            path
        )
        assert len(read_pairs(str(path))[0]) == 3 * 8192
    pair = rows_of(np.stack([trainer] * 2, 1), rollout[:, None])
    assert "trainer_logprobs" in sentence(tmp_path, pair)


def test_D020_folders_and_globs_are_one_log(tmp_path):
    """A folder named .parquet, a folder of steps, a glob; kinds are not mixed."""
    trainer, rollout = small(rows=8)
    whole = pl.DataFrame(rows_of(trainer, rollout))
    folder = tmp_path / "log.parquet"
    (folder / "step_1").mkdir(parents=True)
    whole[:3].write_parquet(folder / "part-0.parquet")
    whole[3:].write_parquet(folder / "step_1" / "part-1.parquet")
    (folder / "_SUCCESS.parquet").touch()
    (folder / "README.md").touch()
    for path in (folder, f"{tmp_path}/*.parquet", f"{folder}/**/part-*.parquet"):
        assert np.array_equal(read_pairs(str(path))[1], rollout.ravel())
    wrong = whole.with_columns(rollout_logprobs=whole["trainer_logprobs"])
    wrong[3:].write_parquet(folder / "step_1" / "part-1.parquet")
    assert len(read_pairs(str(folder))[0]) == 48
    wrote(folder, rows_of(trainer, rollout))
    with pytest.raises(ValueError, match=r"holds .jsonl and .parquet files; choose by a glob"):
        read_pairs(str(folder))
    with pytest.raises(ValueError, match="no file matches"):
        read_pairs(f"{tmp_path}/*.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no file of a log"):
        read_pairs(str(tmp_path / "empty"))


def test_D022_the_last_line_is_cut_off(tmp_path):
    """The line is named, blank lines counted, and what would read the rest."""
    path = wrote(tmp_path, rows_of(*small()))
    text = (tmp_path / "log.jsonl").read_text()
    for head in ("", "\n\n"):
        (tmp_path / "log.jsonl").write_text(head + text[:-40])
        line = 8 + len(head)
        with pytest.raises(
            ValueError, match=f"line {line} ends inside a row .* head -n {line - 1} keeps"
        ):
            read_pairs(path)


def test_D023_rows_without_rollout_log_probs(tmp_path):
    """Left out, counted and named; a row that is empty on both sides has no tokens."""
    trainer, rollout = small()
    for value in (None, []):
        rows = rows_of(trainer, rollout)
        rows[0]["rollout_logprobs"] = value
        pairs = noise_pairs(wrote(tmp_path, rows))
        assert len(pairs.trainer) == 42
        assert (
            "1 of 8 rows have no log-probs on one side and are left out, line 1 of"
            in pairs.notes[0]
        )
    rows[0]["trainer_logprobs"] = []
    pairs = noise_pairs(wrote(tmp_path, rows))
    assert (len(pairs.trainer), pairs.notes) == (42, [])


def test_every_kind_of_file_is_the_same_log(tmp_path):
    """Parquet, JSON lines and CSV, plain and packed, one row a response and one row a token."""
    trainer, rollout = small(rows=8)
    rows = pl.DataFrame(rows_of(trainer, rollout, response=list(range(8))))
    tokens = rows.explode("trainer_logprobs", "rollout_logprobs")
    texts = rows.with_columns(
        pl.Series(name, [json.dumps(x) for x in rows[name].to_list()])
        for name in ("trainer_logprobs", "rollout_logprobs")
    )
    for kind, table in (("response", rows), ("token", tokens)):
        table.write_parquet(tmp_path / f"{kind}.parquet")
        for end, packing in (("", "uncompressed"), (".gz", "gzip"), (".zst", "zstd")):
            table.write_ndjson(
                tmp_path / f"{kind}.ndjson{end}", compression=packing, check_extension=False
            )
            flat = tokens if kind == "token" else texts
            flat.write_csv(
                tmp_path / f"{kind}.csv{end}", compression=packing, check_extension=False
            )
        packed = tmp_path / f"{kind}.parquet.gz"
        packed.write_bytes(gzip.compress((tmp_path / f"{kind}.parquet").read_bytes()))
    files = sorted(tmp_path.iterdir())
    assert len(files) == 16
    for file in files:
        got = read_pairs(str(file))
        assert np.allclose(got[0], trainer.ravel(), rtol=0, atol=1e-12), file.name
        assert np.allclose(got[1], rollout.ravel(), rtol=0, atol=1e-12), file.name


def test_tokens_that_are_not_in_order_find_their_response(tmp_path):
    """One row a token, responses interleaved: the line of a wrong number is its own."""
    trainer, rollout = small(rows=4, tokens=8)
    rows = [
        {"response": r, "trainer_logprobs": trainer[r, t], "rollout_logprobs": rollout[r, t]}
        for t in range(8)
        for r in range(4)
    ]
    assert np.array_equal(read_pairs(wrote(tmp_path, rows))[1], rollout.ravel())
    rows[9]["rollout_logprobs"] = 3.5
    assert "line 10: rollout_logprobs is 3.5" in sentence(tmp_path, rows)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.parquet", b"", "it is empty"),
        ("x.jsonl", b"", "it is empty"),
        ("x.csv.gz", b"", "it is empty"),
        ("x.parquet", b"not a log", "no Parquet file begins with b'not '"),
        ("x.parquet", b"PAR1 and then nothing", "the end is missing"),
        ("x.parquet", b"PAR1" + bytes(40) + b"PAR1", "cannot be read"),
        ("x.parquet.gz", b"PAR1", "cannot be read"),
        ("x.parquet.zst", b"PAR1", "unpack it first|cannot be read"),
        ("x.jsonl", bytes(range(256)) * 9, "cannot be read"),
        ("x.jsonl.gz", b"\x1f\x8b\x08\x00 damaged", "cannot be read"),
        ("x.jsonl.zst", b"\x28\xb5\x2f\xfd damaged", "cannot be read"),
        ("x.jsonl", b"\n\n\n", "column trainer_logprobs is missing"),
        ("x.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("x.jsonl", b'{"a": 1}\nnot JSON\n{"a": 2}', "line 2 is not JSON"),
        (
            "x.jsonl",
            b'{"rollout_logprobs": [1' + b"0" * 5000 + b'], "trainer_logprobs": [-1]}',
            "line 1",
        ),
        ("x.csv", bytes(range(256)) * 9, "cannot be read|is missing"),
        ("x.csv", b"rollout_logprobs,trainer_logprobs\nhello,-1\n", "'hello', not numbers"),
        ("x.txt", b"hello", "must be a .parquet, .jsonl, .ndjson, .csv"),
        ("x", b"hello", "must be a .parquet"),
    ],
)
def test_damaged_files_are_one_sentence(tmp_path, name, content, says):
    """Empty, binary, cut, of another kind: file and reason, on one line."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says) as caught:
        read_pairs(str(path))
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) - len(str(path)) <= 202


def test_a_long_value_is_cut(tmp_path):
    """No message of 100,000 characters: values, names and lists of columns end in dots."""
    rows = rows_of(*small())
    for value in ("x" * 100_000, {"a": [1] * 50_000}, [["y" * 100_000]]):
        rows[3]["rollout_logprobs"] = value
        assert len(sentence(tmp_path, rows)) < 201
    many = [{f"column_{i}": 1 for i in range(20_000)}]
    assert len(sentence(tmp_path, many)) < 420


def test_D031_shards_without_a_trainer(tmp_path):
    """The file of metadata is no shard, and the side that is missing is named with what there is."""
    shards = tmp_path / "run"
    for i in range(2):
        wrote(shards, [{"step": i, "logprobs": [-0.1, -0.2]}] * 2, f"run_rollouts_00000{i}.jsonl")
    wrote(shards, [{"model": "x"}], "run_metadata.jsonl")
    says = (
        "column trainer_logprobs is missing: the log-probs of the trainer; columns: step, logprobs"
    )
    with pytest.raises(ValueError, match=says):
        read_pairs(str(shards))
    assert [x.name for x in members(shards)] == [
        "run_rollouts_000000.jsonl",
        "run_rollouts_000001.jsonl",
    ]
    with pytest.raises(ValueError, match="logprobs is named as both trainer and rollout"):
        read_pairs(str(shards), Names("logprobs", "logprobs"))


def test_D034_many_tokens_are_flat_columns(tmp_path):
    """Two columns of float32 stay two columns of float32: under 100 bytes a token, and no rows as objects."""
    trainer, rollout = small(rows=200, tokens=2000)
    path = tmp_path / "log.parquet"
    rows = pl.DataFrame({"trainer_logprobs": trainer, "rollout_logprobs": rollout})
    rows.select(pl.all().cast(pl.Array(pl.Float32, 2000)).arr.to_list()).write_parquet(path)
    tracemalloc.start()
    got = read_pairs(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [x.dtype for x in got] == [np.float32] * 2
    assert peak < 100 * trainer.size


def test_a_name_may_look_like_a_glob(tmp_path):
    """A file that exists is that file, whatever is in its name."""
    trainer, rollout = small()
    for name in ("a[1].jsonl", "a[1].parquet"):
        rows = pl.DataFrame(rows_of(trainer, rollout))
        path = tmp_path / name
        (rows.write_ndjson if name[-1] == "l" else rows.write_parquet)(path)
        assert len(read_pairs(str(path))[0]) == 48


def test_files_of_a_log_agree(tmp_path):
    """A file with another trainer column, and a column that only some files have."""
    trainer, rollout = small()
    rows = rows_of(trainer, rollout)
    wrote(tmp_path / "log", rows, "a.jsonl")
    wrote(
        tmp_path / "log",
        rows_of(trainer, rollout - 0.001, trainer_logprobs_before=trainer.tolist()),
        "b.jsonl",
    )
    with pytest.raises(ValueError, match=r"b.jsonl: has another trainer column than a.jsonl"):
        read_pairs(str(tmp_path / "log"))
    more = rows_of(trainer, rollout - 0.001, weight_versions=[[4] * 6] * 8, trainer_version=[4] * 8)
    wrote(tmp_path / "log", more, "b.jsonl")
    with pytest.raises(ValueError, match="the version of the weights is unknown"):
        read_pairs(str(tmp_path / "log"))
