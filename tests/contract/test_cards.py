"""Cards of the methods, the generated table, and a user's own stabilizer from a file."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch
from batches import graded, ragged
from broken import BROKEN, soft

from simlab.__main__ import main
from simlab.contract.cards import card, markdown, page
from simlab.stabilizers import NAMES, STABILIZERS, bind, load

ROOT = Path(__file__).parents[2]
TINY = ["compare", "--methods", "ppo", "--lags", "1", "--seeds", "2", "--steps", "3"]
SOFT = soft()


def test_the_table_in_the_docs_is_current():
    """docs/methods.md is what `simlab methods --markdown` prints."""
    assert (ROOT / "docs/methods.md").read_text() == markdown()


@pytest.mark.parametrize("name", STABILIZERS)
def test_every_card_is_complete(name):
    """The docstring of every method gives a formula and a source."""
    shown = card(name)
    assert shown.formula.startswith("S = ")
    assert shown.source != "not given"


@pytest.mark.parametrize(
    ("name", "inputs", "cut", "reweighted"),
    [
        ("pg", "-", "-", "-"),
        ("ppo", "-", "outward", "-"),
        ("sat", "-", "outward", "-"),
        ("dppo", "-", "outward", "-"),
        ("cispo", "-", "-", "both"),
        ("sapo", "-", "-", "both"),
        ("kpop", "-", "both", "-"),
        ("icepop", "logp_prox", "both", "-"),
        ("vaco", "-", "outward", "-"),
        ("oracle", "tv", "outward", "-"),
        ("estr", "entropy_mu", "both", "-"),
        ("none", "-", "-", "both"),
    ],
)
def test_what_probing_shows(name, inputs, cut, reweighted):
    """The measured inputs and sides are those of the formulas."""
    shown = card(name)
    assert (shown.inputs, shown.cut, shown.reweighted) == (inputs, cut, reweighted)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("none", "-"),
        ("ppo", "-"),
        ("gspo", "-"),
        ("drpo", "-"),
        ("kpop", "-"),
        ("sat", "some"),
        ("cispo", "all but log pi"),
        ("asympo", "all but log pi"),
        ("vcpo", "all but log pi"),
        ("minirl", "all but log pi"),
    ],
)
def test_which_factors_are_constants(name, want):
    """By finite differences: SAT's kernel is one, a clip has none, sg[w] log pi has all but log pi."""
    assert card(name).constants == want


@pytest.mark.parametrize(("name", "arguments"), [("asympo", {}), ("spo_scaled", {"alpha": 0.3})])
def test_current_policy_methods_read_no_rollout_log_prob(name, arguments):
    """NaN for every rollout log-prob changes no bit."""
    b = ragged(1, by_token=True)
    blind = replace(b, logp_mu=torch.full_like(b.logp_mu, torch.nan))
    (want, want_grad), (got, got_grad) = (graded(bind(name, **arguments), x) for x in (b, blind))
    assert torch.equal(got.S, want.S)
    assert torch.equal(got_grad, want_grad)


def test_commands_print(capsys):
    """`simlab methods`, one page, and an unknown name in one sentence."""
    main(["methods"])
    listed = "\n" + capsys.readouterr().out
    assert all(f"\n{name} " in listed for name in NAMES)
    main(["methods", "sat"])
    out = capsys.readouterr().out
    assert "alpha=0.9" in out
    assert "(13)-(20)" in out
    with pytest.raises(SystemExit) as stop:
        main(["methods", "satt"])
    assert stop.value.code == 2
    assert "no stabilizer 'satt'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_joins_the_comparison(own, tmp_path, capsys, monkeypatch):
    """Under its name, with arguments or without, in worker processes too; a changed file runs anew."""
    monkeypatch.setattr("simlab.simulator.compare.write_report", lambda *_: None)
    path, out = own("soft", SOFT), tmp_path / "run"
    words = [*TINY, "--out", str(out), "--method-file", str(path)]
    main([*words, "--workers", "2"])
    assert set(pl.read_parquet(out / "results.parquet")["arm"]) == {"ppo", "ppo@1", "ppo@2", "soft"}
    first = set((out / "cells").iterdir())
    own("soft", SOFT.replace("= 1.0", "= 2.0"))  # edited, in the same process
    words.insert(words.index("ppo") + 1, "soft:power=3")
    main([*words, "--workers", "1"])
    assert set(pl.read_parquet(out / "results.parquet")["arm"]) == {
        "ppo", "ppo@1", "ppo@2", "soft:power=3"
    }  # fmt: skip
    assert len(set((out / "cells").iterdir()) - first) == 1
    capsys.readouterr()
    main(["methods", str(path)])
    assert "power=2.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("ppo", SOFT, "there is a stabilizer ppo already"),
        ("my-rule", SOFT, "must be a word"),
        ("cut", SOFT[:-20], "cannot be loaded (SyntaxError"),
        ("raising", "1 / 0", "cannot be loaded (ZeroDivisionError"),
        ("nothing", "x = 1", "has no function surrogate"),
        (
            "number",
            SOFT + "\nwhole_batch = 3\n",
            "whole_batch must be a function of the micro-batches, got 3",
        ),
        ("wild", BROKEN["multiplied"][-1], "wild breaks the promise masked"),
        ("_soft", SOFT, "must be a word"),
        ("leaving", "import sys; sys.exit(3)", "cannot be loaded (SystemExit: 3)"),
        (
            "naming",
            SOFT.replace("log_ratio(b), ", "log_ratios(b), "),
            "naming: NameError: name 'log_r",
        ),
        (
            "two",
            SOFT.replace("b: TokenBatch, *", "b: TokenBatch, c, *"),
            "two: TypeError: surrogate()",
        ),
        ("slow", SOFT.replace("power: float", "power: Power"), "has no argument power"),
    ],
)
def test_a_bad_file_is_one_sentence_and_writes_nothing(own, tmp_path, capsys, name, text, says):
    """Exit 2, one line on stderr that names file or promise, no run folder."""
    path, out = own(name, text), tmp_path / "run"
    words = [*TINY, "--out", str(out), "--method-file", str(path)]
    if name == "slow":
        words[words.index("ppo")] = "slow:power=2"
        words += ["--reference", "slow:power=2"]
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_annotations_may_be_types(own):
    """Without `from __future__ import annotations` the arguments of a file are the same."""
    plain = SOFT.replace("from __future__ import annotations\n", "")
    name = load(own("plain", plain.replace("float = 1.0", "float | None = 1.0")))
    assert bind(name, power=2).arguments == {"power": 2}
    assert "power=1.0" in page(name)


def test_a_file_must_be_python(tmp_path):
    """A text or a folder is named."""
    for path in (tmp_path / "rule.txt", tmp_path):
        with pytest.raises(ValueError, match=r"is not a \.py file"):
            load(path)


def test_a_missing_file_is_one_sentence(tmp_path, capsys):
    """A path that is not there."""
    with pytest.raises(SystemExit):
        main([*TINY, "--out", str(tmp_path / "run"), "--method-file", str(tmp_path / "gone.py")])
    assert "gone.py: cannot be loaded (FileNotFoundError" in capsys.readouterr().err
