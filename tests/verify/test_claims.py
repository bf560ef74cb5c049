"""The claims hold, a planted wrong constant is caught, and two independent codes agree."""

import json

import numpy as np
import polars as pl
import pytest
import torch
from markupsafe import escape

import simlab.verify.bias
import simlab.verify.run
from simlab.__main__ import main
from simlab.simulator.exact import evaluate
from simlab.simulator.tasks.world import World
from simlab.stabilizers import STABILIZERS
from simlab.verify.bias import BIASED_ON_POLICY, PARTS, sides, study
from simlab.verify.claims import CLAIMS, c10_sat_is_a_radius
from simlab.verify.claims.c11_divergence_masks import kpop_band
from simlab.verify.figures import HORIZONS, at_horizon
from simlab.verify.formulas import mathml
from simlab.verify.mutants import MAX, MUTANTS, scaled, tampered
from theory.claims import c03_average_form, c04_max_form, c06_support
from theory.claims.c05_sharper_forms import tail_bound
from theory.claims.c07_envelope import tight as two_point_law
from theory.claims.c08_sampled_action import tight as hidden
from theory.instances import decode, size, two_token_example
from theory.search import Side, as_json, attack, read_instance
from theory.tables import Pair, tv


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda c: c.TITLE)
@pytest.mark.slow
def test_a_claim_survives_a_short_attack(claim):
    """No violation, the declared tight example is tight, and the same seed finds the same."""
    found = attack(claim, 40)
    assert found.violations == 0
    assert found.tried >= 40
    assert found == attack(claim, 40)
    for instance, name, ratio in claim.tight():
        own = {s.name: s for s in claim.sides(instance)}
        assert own[name].ratio == pytest.approx(ratio, abs=1e-3)
        assert not any(side.violated for side in own.values())
    assert claim.STATEMENT
    assert len(claim.__doc__.splitlines()) > 5


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.claim} {m.what}")
def test_a_false_mutant_is_caught_and_a_true_one_is_not(mutant, tmp_path):
    """With the known examples; by search alone where that is promised. The counterexample shows it again."""
    record = attack(tampered(mutant), 40, first=True)
    assert (record.violations > 0) == mutant.false
    if mutant.search:
        record = attack(tampered(mutant, tight=False), mutant.search, first=True)
        assert record.violations == 1
        path = tmp_path / "x.json"
        path.write_text(json.dumps(record.counterexample))
        assert any(side.violated for side in mutant.sides(read_instance(path)))


def test_a_constant_wrong_at_longer_horizons_only_is_found_by_search():
    """Every shape has its own search, not only the one where the side is tightest."""
    claim = tampered(scaled(4, MAX, 0.25, T=3), tight=False)
    assert attack(claim, 400, first=True).violations


def test_missing_support_and_nan_are_not_success():
    """Outside its assumptions a claim refuses; a NaN on a side is a violation."""
    mu, pi = [np.array([[1.0, 0.0]])], [np.array([[0.7, 0.3]])]
    for number in (1, 3, 4, 5):
        with pytest.raises(ValueError, match="needs pi << mu"):
            CLAIMS[number].sides({"mu": mu, "pi": pi, "R": np.array([0.0, 1.0])})
    with pytest.raises(ValueError, match="needs pi << mu"):
        CLAIMS[7].sides({"mu": mu[0][0], "p": pi[0][0], "low": np.ones(2), "high": np.ones(2)})
    with pytest.raises(ValueError, match="low and high are no envelope"):
        CLAIMS[7].sides(CLAIMS[7].tight()[0][0] | {"low": np.full(2, 0.19)})
    assert Side("x", float("nan"), 1.0).violated
    assert not Side("x", float("inf"), float("inf")).violated
    assert Side("x", float("inf"), 1.0).violated
    assert Side("x", 1.0, float("nan"), True).violated


def test_larger_rewards_scale_the_bounds():
    """xi is the largest |R| of the instance, not 1."""
    pair = two_token_example() | {"R": 5 * two_token_example()["R"]}
    assert not any(side.violated for n in (1, 3, 4, 5) for side in CLAIMS[n].sides(pair))


def test_tables_agree_with_the_dynamic_program():
    """theory.tables by enumeration and simlab.simulator.exact on the same tree: two codes, one set of numbers."""
    V, T = 3, 3
    rng = np.random.default_rng(0)
    x = decode({"V": V, "T": T, "reward": "free"}, rng.standard_normal(size({"V": V, "T": T})))
    R = (x["R"] + 1) / 2
    pair = Pair(x["mu"], x["pi"], R)
    M = V**T
    table = np.full((2, 1, 1, T, M, V), -np.log(V))
    for i, p in enumerate((x["pi"], x["mu"])):
        for t in range(T):
            table[i, 0, 0, t, : V**t] = np.log(p[t])
    child = (np.arange(M)[:, None] * V + np.arange(V)) % M
    world = World(
        torch.from_numpy(np.broadcast_to(child, (1, 1, T, M, V)).copy()),
        torch.from_numpy(R).view(1, 1, M),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(1, 1, T, M, V, dtype=torch.float64),
    )
    found = {k: v.item() for k, v in evaluate(world, *torch.from_numpy(table)).items()}
    assert found["J"] - found["J_mu"] == pytest.approx(pair.dJ, abs=1e-12)
    assert found["L_prime"] == pytest.approx(pair.L, abs=1e-12)
    assert found["remainder"] == pytest.approx(pair.Delta, abs=1e-12)
    assert found["tv_sum"] == pytest.approx(pair.S, abs=1e-12)
    assert found["tv_max"] == pytest.approx(pair.tv_max, abs=1e-12)


def test_worked_numbers():
    """The examples of the docstrings: T = 2, support, envelope, hidden TV, KPop's bands."""
    pair = Pair(**two_token_example(0.2))
    assert pair.Delta == pytest.approx(4 * 0.2**2)
    assert pair.S == pytest.approx(0.4)
    assert tail_bound(pair) == pytest.approx(pair.Delta)
    p, mu = np.array([0.7, 0.3]), np.array([1.0, 0.0])
    assert c06_support.half_expectation(p, mu) == pytest.approx(0.15)
    assert tv(p, mu) == pytest.approx(0.30)
    law = two_point_law()[0][0]
    assert tv(law["mu"], law["p"]) == pytest.approx(0.116667, abs=1e-6)
    assert tv(hidden()[0][0]["mu"], hidden()[0][0]["p"]) == pytest.approx(0.992)
    for m, low, high in ((0.5, 0.574, 1.43), (0.1, 0.166, 2.57), (0.01, 1.7e-5, 8.05)):
        band = np.array(kpop_band(m, 0.1)) / m
        assert band == pytest.approx([low, high], rel=0.03)


@pytest.mark.parametrize(
    ("q", "u"),
    [(1e-4, 0.00126), (1e-3, 0.00579), (0.01, 0.02580), (0.02, 0.03969), (0.05, 0.06793)],
)
def test_crossing_of_sat(q, u):
    """u* at eps = 0.2, and the two regimes of the equivalent radius."""
    assert c10_sat_is_a_radius.crossing(q, 0.2) == pytest.approx(u, abs=6e-6)
    assert c10_sat_is_a_radius.equivalent_radius(q, 0.2) < 0.2
    assert c10_sat_is_a_radius.equivalent_radius(0.2, 0.2) == pytest.approx(0.2)


def test_bias_study_is_exact():
    """The parts add up; methods are the registry's; on-policy and without noise only the methods
    that drop or rescale something are biased; a sequence weight below its cap is unbiased at a lag."""
    rows = study(lags=(0, 2), seeds=2)
    assert {row["method"] for row in rows} == {*STABILIZERS, "sat-gspo"}
    assert max(row["sum_error"] for row in rows) < 1e-12
    assert set(PARTS) <= set(rows[0])
    for row in study(lags=(0,), seeds=2, noise=0.0):
        if row["method"] in BIASED_ON_POLICY:
            assert row["bias"] > 1e-3
        else:
            assert row["bias"] < 1e-12, row["method"]
            assert row["cosine"] == pytest.approx(1.0)
    vcpo = [row["bias"] for row in study(lags=(4,), seeds=2) if row["method"] == "vcpo"]
    assert max(vcpo) < 1e-3
    pg = [row for row in rows if row["method"] == "pg"]
    assert all(row[part] == 0 for row in pg for part in PARTS[1:])
    assert [row["bias"] == row["prefix and continuation"] for row in pg] == [True, True]


@pytest.fixture(scope="module")
def rows():
    return study(lags=(0, 4), seeds=2)


def violated(rows):
    return [side.name for side in sides(rows) if side.violated]


def test_claim_12_holds(rows):
    """Every side of it: grad Delta, no bias on policy, nothing outward at d = 0, who cuts what."""
    assert violated(rows) == []
    assert "ppo: no bias on policy" in [side.name for side in sides(rows)]


def test_claim_12_notices_a_wrong_truth(monkeypatch):
    """-grad J in place of grad J adds up all the same, and is neither grad Delta nor unbiased."""
    own = simlab.verify.bias.exact_gradient
    monkeypatch.setattr(simlab.verify.bias, "exact_gradient", lambda *x: -own(*x))
    broken = violated(study(lags=(0, 4), seeds=1))
    assert {"bias of pg = grad Delta", "pg: no bias on policy", "sat: no bias on policy"} <= {
        *broken
    }
    assert "the parts add up" not in broken


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 3), (2, 4), (1, 2), (3, 4), (0, 1)],
    ids=lambda i: PARTS[i],
)
@pytest.mark.slow
def test_claim_12_notices_parts_swapped(one, other, monkeypatch):
    """Outward for pull-back, cut for reweighted, and the prefix part for a cut: they still add up."""
    own, a, b = simlab.verify.bias.parts_of, PARTS[one], PARTS[other]

    def swapped(*x):
        parts = own(*x)
        return parts | {a: parts[b], b: parts[a]}

    monkeypatch.setattr(simlab.verify.bias, "parts_of", swapped)
    broken = violated(study(lags=(0, 4), seeds=1))
    assert broken
    assert "the parts add up" not in broken


def test_the_tightness_figure_shows_the_suprema():
    """At every horizon: 1 for the max form, one half for the average form."""
    for T in HORIZONS:
        half = attack(at_horizon(c03_average_form, T), 1).largest["Delta <= 4 xi S"]
        assert half == pytest.approx(0.5, abs=1e-3)
        assert attack(at_horizon(c04_max_form, T), 1).largest[MAX] > 0.99


@pytest.mark.slow
def test_verify_writes_its_folder(tmp_path, capsys):
    """claims.json, figures and a page with every claim; exit 0; the same seed, the same bytes."""
    for name in ("one", "two"):
        with pytest.raises(SystemExit) as stop:
            main(["verify", "--budget", "0.002", "--out", str(tmp_path / name)])
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.count("0 violations") == 2 * (len(CLAIMS) + 1)
    data = json.loads((tmp_path / "one" / "claims.json").read_text())
    assert [c["claim"] for c in data["claims"]] == sorted([*CLAIMS, 12])
    page = (tmp_path / "one" / "report.html").read_text()
    assert all(str(mathml(claim.STATEMENT)) in page for claim in CLAIMS.values())
    assert {(row["false"], row["caught"]) for row in data["mutants"]} == {(True,) * 2, (False,) * 2}
    assert all(str(escape(row["change"])) in page for row in data["mutants"])
    for path in sorted((tmp_path / "one").rglob("*.*")):
        other = tmp_path / "two" / path.relative_to(tmp_path / "one")
        assert path.read_bytes() == other.read_bytes(), path.name


@pytest.mark.slow
def test_a_violated_claim_exits_non_zero_and_leaves_its_instance(tmp_path, monkeypatch, capsys):
    """The counterexample is written, and re-running it alone shows the violated side."""
    bad = tampered(scaled(4, MAX, 0.9))
    bad.STATEMENT, bad.__doc__ = "wrong", "wrong\nwrong"
    monkeypatch.setattr(simlab.verify.run, "CLAIMS", {4: bad})
    monkeypatch.setattr(simlab.verify.run, "table", lambda *_: [])  # tampers with all claims
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--budget", "0.02", "--out", str(tmp_path)])
    assert stop.value.code == 1
    assert "claim 4 is violated: simlab verify --claim 4" in capsys.readouterr().out
    file = tmp_path / "counterexample-4.json"
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--claim", "4", "--instance", str(file)])
    assert stop.value.code == 1
    assert "VIOLATED" in capsys.readouterr().out
    monkeypatch.setattr(simlab.verify.run, "CLAIMS", CLAIMS)
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--claim", "4", "--instance", str(file)])
    assert stop.value.code == 0


@pytest.mark.parametrize("number", CLAIMS)
def test_every_instance_survives_its_file(number, tmp_path):
    """An instance written to JSON and read back gives the same sides."""
    claim = CLAIMS[number]
    instance = claim.tight()[0][0]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(as_json(instance)))
    lines = simlab.verify.run.check(number, path)
    assert len(lines) == len(claim.sides(instance))
    assert all(line.startswith("holds") for line in lines)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--claim", "4"], "--claim and --instance go together"),
        (["--claim", "4", "--instance", "absent.json"], "absent.json: is not an instance"),
        (["--claim", "40", "--instance", "{file}"], "no claim 40 takes an instance"),
        (["--claim", "4", "--instance", "{file}"], "is not an instance of claim 4"),
        (["--budget", "0"], "budget: Input should be greater than 0"),
        (["--runs", "absent"], "absent/results.parquet: cannot be read"),
        (["--runs", "{runs}"], "results.parquet: cannot be read"),
        (
            ["--claim", "7", "--instance", "{odd}"],
            "of claim 7 (p has a row that is no distribution",
        ),
        (["--out", "{runs}"], "holds odd.json, which no run wrote; choose another --out"),
    ],
)
def test_mistakes_are_one_sentence(words, says, tmp_path, capsys):
    """Exit 2, file or option named."""
    file = tmp_path / "x.json"
    file.write_text('{"a": [1, 2]}')
    odd = tmp_path / "odd.json"
    odd.write_text('{"mu": [0.5, 0.5], "p": [5, 0.5], "low": [1, 1], "high": [9, 9]}')
    pl.DataFrame({"J": [0.5]}).write_parquet(tmp_path / "results.parquet")
    words = [w.format(file=file, odd=odd, runs=tmp_path) for w in words]
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--out", str(tmp_path / "out"), *words])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


PAIR = {"mu": [[[0.5, 0.5]]], "pi": [[[0.6, 0.4]]], "R": [0, 1]}
TWO = {"mu": [0.5, 0.5], "p": [0.6, 0.4], "low": [0.2, 0.2], "high": [0.2, 0.2]}


@pytest.mark.parametrize(
    ("number", "instance", "says"),
    [
        (1, PAIR | {"R": [0, 1, 1]}, "R has the shape (3,), not (2,)"),
        (1, PAIR | {"pi": [[[0.6, 0.4], [0.5, 0.5]]]}, "pi has the shapes [(2, 2)], not [(1, 2)]"),
        (1, PAIR | {"mu": [[[0.5, 0.5]]] * 2}, "mu has the shapes [(1, 2), (1, 2)], not"),
        (1, PAIR | {"mu": [0.5, 0.5]}, "mu is an array of 1 dimensions, not a list of matrices"),
        (1, PAIR | {"R": [0, float("nan")]}, "R holds a number that is not finite"),
        (7, TWO | {"p": [0.2, 0.3, 0.5]}, "p has 3 entries, not 2 as mu"),
        (7, {key: [] for key in TWO}, "mu has 0 entries, not 1"),
        (7, TWO | {"p": "half"}, "p is 'half', not an array of 1 dimensions"),
        (7, TWO | {"p": [0.5, "x"]}, "p is no array of numbers"),
        (7, {"mu": [0.5, 0.5]}, "it has mu, not mu, p, low, high"),
        (8, {"mu": [0.5, 0.5], "p": [0.6, 0.4], "eps": True}, "eps is True, not a number"),
        (8, [1, 2], "it must be an object of named numbers and arrays"),
    ],
)
def test_an_instance_of_other_shapes_is_one_sentence(number, instance, says, tmp_path):
    """The field and both shapes are named."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps(instance))
    with pytest.raises(ValueError, match=r"x\.json: is not an instance") as error:
        simlab.verify.run.check(number, path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
