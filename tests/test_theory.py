"""The claims hold, a planted wrong constant is caught, and two independent codes agree."""

import json
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from markupsafe import escape

import simlab.verify
from simlab.__main__ import main
from simlab.bias import PARTS, gradients, log_probs, study
from simlab.exact import evaluate
from simlab.stabilizers import STABILIZERS
from simlab.tasks.world import World
from theory.claims import CLAIMS, c06_support, c10_sat_is_a_radius
from theory.claims.c05_sharper_forms import tail_bound
from theory.claims.c07_envelope import tight as two_point_law
from theory.claims.c08_sampled_action import tight as hidden
from theory.claims.c11_divergence_masks import kpop_band
from theory.instances import decode, size, two_token_example
from theory.search import Side, as_json, attack, read_instance
from theory.tables import Pair, policy, tv


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda c: c.TITLE)
def test_a_claim_survives_a_short_attack(claim):
    """No violation, the declared tight example is tight, and the same seed finds the same."""
    found = attack(claim, 40)
    assert found.violations == 0
    assert found.tried >= 40
    assert found == attack(claim, 40)
    instance, name, ratio = claim.tight()
    assert {s.name: s for s in claim.sides(instance)}[name].ratio == pytest.approx(ratio)
    assert claim.STATEMENT
    assert len(claim.__doc__.splitlines()) > 5


def weakened(number, change, tight=True):
    """A claim whose sides were tampered with; without `tight` its known example is left out."""
    claim = CLAIMS[number]
    shape = claim.SHAPES[0]
    harmless = (claim.decode(shape, np.zeros(claim.size(shape))), "", 0.0)
    return SimpleNamespace(
        NUMBER=number,
        TITLE=claim.TITLE,
        SHAPES=claim.SHAPES,
        size=claim.size,
        decode=claim.decode,
        tight=claim.tight if tight else lambda: harmless,
        sides=lambda instance: [change(side, instance) for side in claim.sides(instance)],
    )


def scaled(name, factor, shift=0.0, when=lambda x: True):
    """Replace rhs by factor * rhs + shift on the side with this name, where `when` holds."""

    def change(side, instance):
        hit = side.name == name and when(instance)
        return side._replace(rhs=factor * side.rhs + shift) if hit else side

    return change


PLANTS = [
    (1, "|J(pi) - J(mu)| <= 2 xi TV(answers)", 0.95, 0.0),
    (2, "TV(answers) <= S", 0.99, 0.0),
    (3, "|Delta| <= 2 xi S", 0.8, 0.0),
    (4, "Delta <= 2 xi T(T-1) D_max^2", 0.8, 0.0),
    (5, "|Delta| <= tail bound", 0.95, 0.0),
    (5, "Delta <= (D-a)", 0.9, 0.0),
    (6, "(1/2) E|r-1| + outside/2 = TV", 1.01, 0.0),
    (7, "TV <= max(el, eh)/2", 1.0, -1e-3),
    (7, "TV <= el eh/(el+eh)", 0.99, 0.0),
    (8, "TV <= 1 - mu(a)(1-eps)", 0.95, 0.0),
    (10, "share cut beyond PPO <= 1 - alpha", 0.9, 0.0),
    (11, "2 TV^2 <= KL", 0.95, 0.0),
]


@pytest.mark.parametrize(("number", "name", "factor", "shift"), PLANTS)
def test_a_planted_wrong_constant_is_caught(number, name, factor, shift, tmp_path):
    """The search alone, its tight example left out, finds it; the counterexample shows it again."""
    claim = weakened(number, scaled(name, factor, shift), tight=False)
    found = attack(claim, 400 if number == 4 else 160)
    assert found.violations > 0
    path = tmp_path / "x.json"
    path.write_text(json.dumps(found.counterexample))
    assert any(side.violated for side in claim.sides(read_instance(path)))


def test_a_constant_wrong_by_a_fortieth_is_caught_at_the_tight_example():
    """3.9 xi S / 2 instead of 4 xi S / 2, and 1.95 T(T-1) instead of 2: attained, hence noticed."""
    for number, name in ((3, "|Delta| <= 2 xi S"), (4, "Delta <= 2 xi T(T-1) D_max^2")):
        assert attack(weakened(number, scaled(name, 1.95 / 2)), 20).violations > 0


def test_a_constant_wrong_at_longer_horizons_only_is_caught():
    """Every shape has its own search, not only the one where the side is tightest."""
    wrong = scaled("Delta <= 2 xi T(T-1) D_max^2", 0.25, when=lambda x: len(x["mu"]) >= 3)
    assert attack(weakened(4, wrong, tight=False), 400).violations > 0


def test_missing_support_and_nan_are_not_success():
    """Outside its assumptions a claim refuses; a NaN on a side is a violation."""
    mu, pi = [np.array([[1.0, 0.0]])], [np.array([[0.7, 0.3]])]
    for number in (1, 3, 4, 5):
        with pytest.raises(ValueError, match="needs pi << mu"):
            CLAIMS[number].sides({"mu": mu, "pi": pi, "R": np.array([0.0, 1.0])})
    with pytest.raises(ValueError, match="needs pi << mu"):
        CLAIMS[7].sides({"mu": mu[0][0], "p": pi[0][0]})
    assert Side("x", float("nan"), 1.0).violated
    assert not Side("x", float("inf"), float("inf")).violated
    assert Side("x", float("inf"), 1.0).violated
    assert Side("x", 1.0, float("nan"), True).violated


def test_larger_rewards_scale_the_bounds():
    """xi is the largest |R| of the instance, not 1."""
    pair = two_token_example() | {"R": 5 * two_token_example()["R"]}
    assert not any(side.violated for n in (1, 3, 4, 5) for side in CLAIMS[n].sides(pair))


def test_tables_agree_with_the_dynamic_program():
    """theory.tables by enumeration and simlab.exact on the same tree: two codes, one set of numbers."""
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
    assert found["S"] == pytest.approx(pair.S, abs=1e-12)
    assert found["D_max"] == pytest.approx(pair.tv_max, abs=1e-12)


def test_worked_numbers():
    """The examples of the docstrings: T = 2, support, envelope, hidden TV, KPop's bands."""
    pair = Pair(**two_token_example(0.2))
    assert pair.Delta == pytest.approx(4 * 0.2**2)
    assert pair.S == pytest.approx(0.4)
    assert tail_bound(pair) == pytest.approx(pair.Delta)
    p, mu = np.array([0.7, 0.3]), np.array([1.0, 0.0])
    assert c06_support.half_expectation(p, mu) == pytest.approx(0.15)
    assert tv(p, mu) == pytest.approx(0.30)
    law = two_point_law()[0]
    assert tv(law["mu"], law["p"]) == pytest.approx(0.116667, abs=1e-6)
    assert tv(hidden()[0]["mu"], hidden()[0]["p"]) == pytest.approx(0.992)
    for m, low, high in ((0.5, 0.574, 1.43), (0.1, 0.166, 2.57), (0.01, 1.7e-5, 8.05)):
        band = np.array(kpop_band(m, 0.1)) / m
        assert band == pytest.approx([low, high], rel=0.03)


@pytest.mark.parametrize(
    ("q", "u"),
    [(1e-4, 0.00126), (1e-3, 0.00579), (0.01, 0.02580), (0.02, 0.03969), (0.05, 0.06793)],
)
def test_crossing_of_sat(q, u):
    """u* at eps = .2, and the two regimes of the equivalent radius."""
    assert c10_sat_is_a_radius.crossing(q, 0.2) == pytest.approx(u, abs=6e-6)
    assert c10_sat_is_a_radius.equivalent_radius(q, 0.2) < 0.2
    assert c10_sat_is_a_radius.equivalent_radius(0.2, 0.2) == pytest.approx(0.2)


def test_bias_study_is_exact():
    """The parts add up; methods are the registry's; on-policy and without noise only the two methods
    that rescale responses or signs are biased; a sequence weight below its cap is unbiased at a lag."""
    rows = study(lags=(0, 2), seeds=2)
    assert {row["method"] for row in rows} == {*STABILIZERS, "sat-gspo"}
    assert max(row["sum_error"] for row in rows) < 1e-12
    assert set(PARTS) <= set(rows[0])
    for row in study(lags=(0,), seeds=2, noise=0.0):
        if row["method"] in ("asympo", "spo_scaled"):
            assert row["bias"] > 0.1
        else:
            assert row["bias"] < 1e-12, row["method"]
            assert row["cosine"] == pytest.approx(1.0)
    vcpo = [row["bias"] for row in study(lags=(4,), seeds=2) if row["method"] == "vcpo"]
    assert max(vcpo) < 1e-3
    pg = [row for row in rows if row["method"] == "pg"]
    assert all(row[part] == 0 for row in pg for part in PARTS[1:])
    assert [row["bias"] == row["prefix and continuation"] for row in pg] == [True, True]


def test_gradient_of_pg_is_that_of_the_surrogate():
    """g(pg) = grad L' of SAT (3), by finite differences of the numpy tables: its bias is grad Delta."""
    rng = np.random.default_rng(5)
    start, change, R = rng.standard_normal(39), 0.3 * rng.standard_normal(39), rng.random(27)

    def L(z):
        return Pair(policy(3, 3, start), policy(3, 3, z), R).L

    z = start + change
    numeric = [(L(z + 1e-6 * e) - L(z - 1e-6 * e)) / 2e-6 for e in np.eye(39)]
    mu = log_probs(torch.from_numpy(start))
    found = gradients("pg", torch.from_numpy(z), torch.from_numpy(start), mu, torch.from_numpy(R))
    assert found["g"].numpy() == pytest.approx(np.array(numeric), abs=1e-8)


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
    assert all(str(escape(claim.STATEMENT)) in page for claim in CLAIMS.values())
    for path in sorted((tmp_path / "one").rglob("*.*")):
        other = tmp_path / "two" / path.relative_to(tmp_path / "one")
        assert path.read_bytes() == other.read_bytes(), path.name


def test_a_violated_claim_exits_non_zero_and_leaves_its_instance(tmp_path, monkeypatch, capsys):
    """The counterexample is written, and re-running it alone shows the violated side."""
    bad = weakened(4, scaled("Delta <= 2 xi T(T-1) D_max^2", 0.9))
    bad.STATEMENT, bad.__doc__ = "wrong", "wrong\nwrong"
    monkeypatch.setattr(simlab.verify, "CLAIMS", {4: bad})
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--budget", "0.02", "--out", str(tmp_path)])
    assert stop.value.code == 1
    assert "claim 4 is violated: simlab verify --claim 4" in capsys.readouterr().out
    file = tmp_path / "counterexample-4.json"
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--claim", "4", "--instance", str(file)])
    assert stop.value.code == 1
    assert "VIOLATED" in capsys.readouterr().out
    monkeypatch.setattr(simlab.verify, "CLAIMS", CLAIMS)
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--claim", "4", "--instance", str(file)])
    assert stop.value.code == 0


@pytest.mark.parametrize("number", CLAIMS)
def test_every_instance_survives_its_file(number, tmp_path):
    """An instance written to JSON and read back gives the same sides."""
    claim = CLAIMS[number]
    instance = claim.tight()[0]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(as_json(instance)))
    lines = simlab.verify.check(number, path)
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
        (["--claim", "7", "--instance", "{odd}"], "odd.json: p has a row that is no distribution"),
    ],
)
def test_mistakes_are_one_sentence(words, says, tmp_path, capsys):
    """Exit 2, file or option named."""
    file = tmp_path / "x.json"
    file.write_text('{"a": [1, 2]}')
    odd = tmp_path / "odd.json"
    odd.write_text('{"mu": [0.5, 0.5], "p": [5, 0.5]}')
    pl.DataFrame({"J": [0.5]}).write_parquet(tmp_path / "results.parquet")
    words = [w.format(file=file, odd=odd, runs=tmp_path) for w in words]
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--out", str(tmp_path / "out"), *words])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err
