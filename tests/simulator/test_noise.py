"""Declared size and shape of every noise model, measured on tables; the real log as input of replay."""

import json
from pathlib import Path
from statistics import NormalDist

import numpy as np
import polars as pl
import pytest
import torch

from simlab.simulator.config import Config
from simlab.simulator.noise import NOISES, Noise, behaviour, grid, router
from simlab.simulator.noise.replay import gaps, logit, notes
from simlab.simulator.policies import moe, tabular
from simlab.simulator.rng import NOISE, Generators
from simlab.token_log.names import Names
from simlab.token_log.pairs import read_pairs

LOG = Path(__file__).parents[1] / "data" / "smollm2_lag8.jsonl"
SHAPE = (10, 20, 5, 8)  # 1,000 states


def tables(noise: Noise, seed=0, peak=1.5):
    """log pi and log mu `[1, P, T, M, V]` in float64 of a random tabular policy."""
    rng = Generators([seed], 1)
    z = peak * rng.normal(1000, 8)
    mu = behaviour(tabular, {"z": z}, None, SHAPE, (noise,), Generators([seed], 2))
    return torch.log_softmax(z.double(), -1).view(1, *SHAPE), mu.double()


def second_moment(logp, logp_mu):
    """E_mu (log pi - log mu)^2, averaged over states."""
    return (logp_mu.exp() * (logp - logp_mu) ** 2).sum(-1).mean().item()


@pytest.mark.parametrize(
    ("noise", "variance"),
    [
        (Noise("gaussian", {"scale": 0.02}), 0.02**2),
        (Noise("gaussian", {"scale": 0.05}), 0.05**2),
        (Noise("student_t", {"scale": 0.02, "df": 8.0}), 0.02**2 * 8 / 6),
    ],
)
def test_logit_noise_has_its_declared_size(noise, variance):
    """E d^2 = variance of a logit times (1 - sum p^2), to first order."""
    logp, logp_mu = tables(noise)
    declared = variance * (1 - logp.exp().pow(2).sum(-1)).mean().item()
    assert second_moment(logp, logp_mu) == pytest.approx(declared, rel=0.08)


def kurtosis(x):
    x = x - x.mean()
    return ((x**4).mean() / (x**2).mean() ** 2).item()


def test_tails_are_ordered():
    """Student-t logits have heavier tails than Gaussian ones; router flips heavier still."""
    gaussian, t = (
        kurtosis((lambda p, m: p - m)(*tables(Noise(n)))) for n in ("gaussian", "student_t")
    )
    rng = Generators([0], 1)
    w = {
        k: torch.from_numpy(v).float().unsqueeze(0)
        for k, v in moe.init(rng.generators[0], states=1000, features=24, vocab=8).items()
    }
    X = rng.normal(1000, 24)
    logp = torch.log_softmax(moe.logits(w, X), -1).view(1, *SHAPE)
    flipped = kurtosis(logp - behaviour(moe, w, X, SHAPE, (Noise("router"),), Generators([0], 2)))
    assert gaussian < 6 < t
    assert flipped > 30


@pytest.mark.parametrize(("dtype", "step"), [("bf16", 2**-8), ("fp8", 2**-4)])
def test_grid_moves_a_number_by_its_declared_step(dtype, step):
    """Relative rounding error: never above the declared step, and it comes close."""
    x = Generators([0], 3).normal(100_000)
    x = torch.where(x.abs() < 0.1, 1.0, x)  # stay above the subnormals of e4m3
    error = ((grid.cast(x, dtype) - x) / x).abs().max().item()
    assert 0.8 * step < error <= step * (1 + 1e-6)


def test_one_sided_precision_is_worse_than_both_low():
    """Case C018: bf16 gives 10.03 -> 10.0, so a gap of 0.03 appears only when one side rounds."""
    z = torch.tensor([10.03, 10.0]).log_softmax(-1).view(1, 1, 1, 1, 2) + 10.03

    def first(trainer, engine):
        """d of the first token when each side holds its logits on the grid or not."""
        sides = [grid.cast(z, "bf16") if low else z for low in (trainer, engine)]
        return (torch.log_softmax(sides[0], -1) - torch.log_softmax(sides[1], -1))[..., 0].item()

    assert abs(first(False, True)) > 1e-3
    assert first(True, True) == first(False, False) == 0


@pytest.mark.parametrize(
    ("q", "layers", "tokens"), [(0.1, 27, 0.942), (0.1, 48, 0.994), (0.057, 48, 0.94)]
)
def test_c093_routers_that_disagree_and_tokens_that_do(q, layers, tokens):
    """Router noise that flips a share q of the routers of a pass reaches 1 - (1 - q)^L of the tokens."""
    assert 1 - (1 - q) ** layers == pytest.approx(tokens, abs=1e-3)
    n, scale = 4000, 0.05
    margin = -NormalDist(0, scale * 2**0.5).inv_cdf(
        q
    )  # of the chosen expert's logit over the other's
    g = torch.tensor([margin, 0.0]).expand(1, n * layers, 2)
    flipped = (router.router(g, Generators([0], NOISE), scale=scale).argmax(-1) == 1).view(
        n, layers
    )
    assert flipped.double().mean().item() == pytest.approx(q, abs=0.005)
    assert flipped.any(1).double().mean().item() == pytest.approx(tokens, abs=0.015)


def test_grid_rounds_weights_or_logits_and_is_deterministic():
    """`on` picks the stage; the same weights give the same engine."""
    weights, logits = tables(Noise("grid")), tables(Noise("grid", {"on": "logits"}))
    again = tables(Noise("grid"), seed=0)
    assert torch.equal(weights[1], again[1])
    assert (weights[0] - logits[1]).abs().max() > 0
    w = {"z": torch.tensor([[[1.001, 0.0]]])}
    assert torch.equal(Noise("grid", {"on": "logits"}).at("weights", w, None)["z"], w["z"])


def test_temperature_is_a_power():
    """mu is proportional to pi ** (1 / tau)."""
    logp, logp_mu = tables(Noise("temperature", {"tau": 2.0}))
    assert torch.allclose(logp_mu, torch.log_softmax(logp / 2, -1), atol=1e-6)


def test_truncation_multiplies_every_ratio_by_the_kept_mass():
    """Case C009: p = 0.5, 0.3, 0.2 and a nucleus of two keep S = 0.8; every ratio is 0.8."""
    z = torch.tensor([0.5, 0.3, 0.2]).log().view(1, 1, 1, 1, 3)
    for arguments in ({"top_p": 0.75}, {"top_k": 2}):
        kept = torch.log_softmax(Noise("truncate", arguments).at("logits", z, None), -1)
        r = (z - kept)[..., :2].exp()
        assert torch.allclose(r, torch.full_like(r, 0.8))
        assert kept[..., 2].item() == -torch.inf
    whole = Noise("truncate").at("logits", z, None)
    assert torch.equal(whole, z)


def test_shift_answers_with_the_neighbour():
    """mu at position t is pi at position t - 1, and at position 0 itself."""
    logp, logp_mu = tables(Noise("shift"))
    assert torch.allclose(logp_mu[:, :, 0], logp[:, :, 0], atol=1e-6)
    assert torch.allclose(logp_mu[:, :, 1:], logp[:, :, :-1], atol=1e-6)


def test_replay_keeps_spread_and_tail_of_the_log():
    """Log-odds gaps of sampled tokens have the log's standard deviation and 99 % quantile."""
    trainer, rollout = read_pairs(str(LOG))
    e = logit(trainer) - logit(rollout)
    logp, logp_mu = tables(Noise("replay", {"path": str(LOG)}))
    weight = logp_mu.exp().flatten()
    found = (logit(logp.numpy()) - logit(logp_mu.numpy())).ravel()
    spread = np.sqrt((weight.numpy() * found**2).sum() / weight.sum().item())
    assert spread == pytest.approx(e.std(), rel=0.15)
    pick = (
        Generators([0], 4)
        .generators[0]
        .choice(len(found), 20_000, p=weight.numpy() / weight.sum().item())
    )
    assert np.quantile(abs(found[pick]), 0.99) == pytest.approx(np.quantile(abs(e), 0.99), rel=0.25)


def test_replay_prefers_scores_at_the_rollouts_weights():
    """The log was trained on for 8 steps; the replayed noise is the implementation part alone."""
    rows = [json.loads(line) for line in LOG.read_text().splitlines()]
    before = np.concatenate([r["trainer_logprobs_before"] for r in rows])
    assert np.array_equal(read_pairs(str(LOG))[0], before)


def edited(tmp_path, change):
    rows = [json.loads(line) for line in LOG.read_text().splitlines()]
    change(rows)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def drop(name):
    return lambda rows: [r.pop(name) for r in rows]


def put(row, name, index, value):
    return lambda rows: rows[row][name].__setitem__(index, value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop("rollout_logprobs"), "column rollout_logprobs is missing"),
        (
            lambda rows: rows[5].update(rollout_logprobs=-1.0),
            "line 6: rollout_logprobs is -1.0, not a list",
        ),
        (lambda rows: rows[5].update(loss_mask=1), "line 6: loss_mask is 1, not a list"),
        (put(6, "rollout_logprobs", 0, "a"), "line 7: rollout_logprobs holds 'a', not a number"),
        (put(6, "rollout_logprobs", 0, None), "line 7, token 0: rollout_logprobs is nan"),
        (lambda rows: rows.__setitem__(7, [1, 2]), "line 8 is not an object"),
        (
            drop("trainer_logprobs_before"),
            "line 1, token 0, was sampled at version 0 and scored at version 8",
        ),
        (put(3, "rollout_logprobs", 2, float("nan")), "line 4, token 2: rollout_logprobs is nan"),
        (
            put(1, "trainer_logprobs_before", 0, 0.5),
            "line 2, token 0: trainer_logprobs_before is 0.5",
        ),
        (
            lambda rows: rows[2]["rollout_logprobs"].append(-1.0),
            "line 3 has 9 trainer_logprobs_before, 10 rollout_logprobs",
        ),
        (
            lambda rows: [
                r.pop("trainer_logprobs_before") and r["weight_versions"].pop() for r in rows
            ],
            "line 1 has 48 trainer_logprobs, 48 rollout_logprobs, 48 loss_mask, 47 weight_versions",
        ),
        (put(4, "loss_mask", 1, 0.5), "line 5: loss_mask must hold 0 and 1 only"),
        (lambda rows: rows.clear(), "is empty: 0 bytes"),
        (
            lambda rows: rows.__delitem__(slice(1, None)) or rows[0].update(loss_mask=[0] * 48),
            "0 unmasked",
        ),
    ],
)
def test_a_bad_log_is_one_sentence_with_file_and_row(tmp_path, change, says):
    """ValueError that names the file and what is wrong with which row."""
    path = edited(tmp_path, change)
    with pytest.raises(ValueError, match=says) as caught:
        read_pairs(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_integers_and_booleans_are_numbers_and_masks(tmp_path):
    """Case C101: log-probs written as integers and masks as 0/1, 0.0/1.0 or true/false are read."""

    def change(rows):
        rows[0]["rollout_logprobs"] = [-int(i % 3) for i in range(48)]
        rows[0]["trainer_logprobs_before"] = rows[0]["rollout_logprobs"]
        rows[1]["loss_mask"] = [True] * len(rows[1]["loss_mask"])
        rows[2]["loss_mask"] = [1.0] * len(rows[2]["loss_mask"])

    assert read_pairs(edited(tmp_path, change))[1][:3].tolist() == [0.0, -1.0, -2.0]


def test_one_new_token_is_lag_too(tmp_path):
    """A response whose last token alone has the trainer's version was not scored at equal weights."""

    def change(rows):
        for row in rows:
            row.pop("trainer_logprobs_before")
            row["weight_versions"] = [0] * (len(row["weight_versions"]) - 1) + [8]

    with pytest.raises(
        ValueError, match="line 1, token 0, was sampled at version 0 and scored at version 8"
    ):
        read_pairs(edited(tmp_path, change))


def test_a_constant_gap_is_not_noise(tmp_path):
    """The same gap at every token has no spread to compare with, and is refused all the more."""

    def change(rows):
        for row in rows:
            row["rollout_logprobs"] = [-2.0] * len(row["loss_mask"])
            row["trainer_logprobs_before"] = [-2.25] * len(row["loss_mask"])

    with pytest.raises(ValueError, match=r"E\[e\^d\] = 0\.779 .*mean d -0\.250, 100% below 0"):
        read_pairs(edited(tmp_path, change))


def test_a_text_may_hold_any_line_separator(tmp_path):
    """JSON lines end with a line feed; U+2028 inside of a string ends nothing."""
    path = Path(edited(tmp_path, lambda rows: None))
    rows = [json.loads(line) | {"text": "a\u2028b"} for line in path.read_text().split("\n")[:-1]]
    want = read_pairs(str(path))
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8")
    assert np.array_equal(read_pairs(str(path)), want)


def test_a_truncation_mismatch_is_not_noise(tmp_path):
    """Case C009: every gap is log 0.8; resampling it as noise would be wrong, so it is refused."""

    def change(rows):
        for row in rows:
            row["rollout_logprobs"] = [min(x + 0.223, 0.0) for x in row["trainer_logprobs_before"]]

    with pytest.raises(ValueError, match=r"E\[e\^d\] = 0\.818 .*top-p, top-k or min-p"):
        read_pairs(edited(tmp_path, change))


def test_masked_nan_in_a_log_is_not_read(tmp_path):
    """A non-finite number under loss_mask = 0 is ordinary."""

    def change(rows):
        rows[0]["rollout_logprobs"][5] = float("nan")
        rows[0]["loss_mask"][5] = 0

    assert np.isfinite(read_pairs(edited(tmp_path, change))[1]).all()


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("gausian", {}, "no noise 'gausian'; there are gaussian"),
        ("gaussian", {"sigma": 1}, "noise gaussian has no argument sigma; it takes scale"),
        ("gaussian", {"scale": -1}, "scale must be at least 0"),
        ("gaussian", {"scale": float("nan")}, "scale must be at least 0"),
        ("router", {"scale": "a"}, "scale must be float, got 'a'"),
        ("truncate", {"top_k": 2.5}, "top_k must be int"),
        ("shift", {"by": -1}, "by must be at least 0"),
        ("temperature", {"tau": 0}, "tau must be above 0"),
        ("temperature", {"tau": -1}, "tau must be above 0"),
        ("temperature", {"tau": float("nan")}, "tau must be above 0"),
        ("truncate", {"top_p": 0}, "0 < top_p <= 1"),
        ("grid", {"dtype": "int8"}, "dtype must be bf16 or fp8"),
        ("grid", {"on": "keys"}, "on must be weights or logits"),
        ("student_t", {"df": 0}, "df > 0, got 0.05, 0"),
        ("replay", {}, "path of a .parquet"),
        ("replay", {"path": 3}, "path must be str"),
        ("replay", {"path": "no/such.parquet"}, "no/such.parquet: cannot be read"),
        ("replay", {"path": "log.txt"}, "a log must be a .parquet, .jsonl, .ndjson, .csv"),
    ],
)
def test_impossible_noise_is_one_sentence(name, arguments, says):
    """Unknown names, arguments and values are caught when the noise is named (case C017)."""
    with pytest.raises(ValueError, match=says):
        Noise(name, arguments)


def test_same_seed_same_field_and_lanes_do_not_depend_on_each_other():
    """A field is a function of seed and moment; another lane in the program changes nothing."""
    for name in NOISES:
        noise = Noise(name, {"path": str(LOG)} if name == "replay" else {})
        z = Generators([5], 1).normal(*SHAPE)
        alone = noise.at("logits", z, Generators([5], 2))
        pair = noise.at("logits", z.expand(2, *SHAPE), Generators([5, 6], 2))
        assert torch.equal(alone[0], pair[0]), name


def test_probability_1_has_no_log_odds(tmp_path):
    """A log-prob of exactly 0.0 is left out and counted: it is not -1e-6, 14 log-odds away."""
    rng = np.random.default_rng(0)
    rollout = rng.uniform(-3, -0.01, size=(20, 50))
    trainer = np.minimum(rollout + 0.03 * rng.normal(size=rollout.shape), -0.001)
    rollout[:, ::10], trainer[:, ::10] = 0.0, -0.003
    rows = pl.DataFrame(
        {"rollout_logprobs": rollout.tolist(), "trainer_logprobs": trainer.tolist()}
    )
    path = tmp_path / "log.parquet"
    rows.select(pl.all().cast(pl.List(pl.Float32))).write_parquet(path)
    kept = gaps(str(path), Names())
    assert kept.rows.shape == (20, 45)
    assert np.abs(kept.rows).max() < 4
    (note,) = notes(str(path))
    assert note == f"{path}: 100 tokens have probability 1 to rounding: no log-odds, left out"
    Noise("replay", {"path": str(path)})
    sure = rows.with_columns(pl.all().list.eval(pl.element() * 1e-7))
    sure.write_parquet(tmp_path / "sure.parquet")
    with pytest.raises(ValueError, match="0 tokens have a probability below 1 on both sides"):
        gaps(str(tmp_path / "sure.parquet"), Names())


def test_a_name_of_a_column_is_an_argument(tmp_path):
    """replay:path=FILE,mask=NAME reads another column; the log's content is in the key of a cell."""

    def change(rows):
        for row in rows:
            row["response_mask"] = [0] + [1] * (len(row.pop("loss_mask")) - 1)

    path = edited(tmp_path, change)
    with pytest.raises(ValueError, match="mask=response_mask"):
        Noise("replay", {"path": path})
    some = gaps(path, Names(mask="response_mask")).rows.size
    assert some < gaps(path, Names(mask="none")).rows.size
    config = Config(noise=(f"replay:path={path},mask=response_mask",))
    assert config.notes == []


@pytest.mark.parametrize("form", ["folder", "glob"])
def test_a_cell_has_the_content_of_all_files_of_its_log(tmp_path, form):
    """Folder and glob: another number in any file is another key, another name of a file is not."""
    lines = LOG.read_text().splitlines(keepends=True)
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "step_1.jsonl").write_text("".join(lines[:12]))
    (folder / "step_2.jsonl").write_text("".join(lines[12:]))
    path = folder if form == "folder" else folder / "step_*.jsonl"

    def key():
        return Config(noise_from=path).cells()[0].key("code")

    first = key()
    assert len(gaps(str(path), Names()).rows) == len(gaps(str(LOG), Names()).rows)
    (folder / "step_2.jsonl").rename(folder / "step_3.jsonl")
    assert key() == first
    (folder / "step_3.jsonl").write_text("".join(lines[13:]))
    assert key() != first
