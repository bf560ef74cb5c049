"""Arms: what a clip can do, and errors of a user's code in one line."""

import pytest

from simlab.study.arms import Arm, cannot_act, user_code
from simlab.study.settings import Comparison, Training
from simlab.study.strict import ConfigError

STEP = Training(proximal="step")


@pytest.mark.parametrize(
    "spec", ["decoupled", "icepop", "minirl", "mis", "tis", "two_factor", "decoupled:proximal=step"]
)
def test_a_clip_on_the_policy_just_before_the_step_cannot_act(spec):
    """One step a batch: pi / pi_old is 1. With another pi_old, it can."""
    said = cannot_act(Arm.parse(spec), STEP)
    assert said.startswith(f'{spec}: its clip cannot act, because proximal = "step"')
    other = cannot_act(Arm.parse(spec), Training())
    assert (other is None) == ("step" not in spec)


@pytest.mark.parametrize(
    "spec", ["gspo+tis", "ppo:proximal=step", "sat:proximal=step", "dppo+icepop"]
)
def test_a_clip_of_a_composition_is_probed_too(spec):
    """Of pi / pi_old, whatever method clips it."""
    said = cannot_act(Arm.parse(spec), STEP)
    assert said.startswith(f"{spec}: its clip cannot act")
    assert cannot_act(Arm.parse(spec.replace("step", "ewma")), Training()) is None


@pytest.mark.parametrize("spec", ["tis", "gspo+tis", "decoupled"])
def test_a_correction_of_the_engine_cannot_act_where_prox_is_mu(spec):
    """k = mu/mu is 1; a method that reads no prox says nothing."""
    said = cannot_act(Arm.parse(spec), Training(proximal="mu"))
    assert said.startswith(f"{spec}: what it does with k = prox/mu cannot act")
    assert cannot_act(Arm.parse("ppo"), Training(proximal="mu")) is None


@pytest.mark.parametrize(
    "spec", ["ppo", "sat", "tis:form=pg", "kpop:anchor=prox", "decoupled:proximal=ewma"]
)
def test_other_clips_can(spec):
    """They read no pi_old, or clip on pi / mu, or choose another."""
    assert cannot_act(Arm.parse(spec), STEP) is None


TABLES = [
    ({"name": "gspo"}, "gspo"),
    ({"name": "ppo", "terms": [{"name": "tis"}]}, "ppo+tis"),
    ({"name": "ppo", "label": "x", "stream": 1, "eps_low": 0.1, "dual_clip": 3,
      "terms": [{"name": "icepop", "weighted": False}, {"name": "kl", "coef": 1e-05, "kind": "k3"}]},
     "x=ppo@1:eps_low=0.1,dual_clip=3+icepop:weighted=false+kl:coef=1e-05,kind=k3"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "spec"), TABLES)
def test_a_table_is_a_spec(table, spec):
    """The same arm, apart from a label that is the text of the spec; and it is compared with others."""
    one, two = (Comparison(methods=("ppo", x)).arms[1] for x in (table, spec))
    assert one.rule == two.rule
    assert (one.name, one.arguments, one.stream) == (two.name, two.arguments, two.stream)
    assert one.label == two.label or "label" not in table


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"name": "ppo+tis"}, "needs a name, without terms in it"),
        ({"label": "x"}, "needs a name"),
        ({"name": "ppo", "terms": ["tis"]}, "terms must be a list of tables"),
        ({"name": "ppo", "eps_low": [1]}, "eps_low must be a number, true, false or one word"),
        ({"name": "ppo", "eps_low": "0.1,eps_high=2"}, "eps_low must be a number"),
        ({"name": "ppo", "eps": 1}, "ppo has no argument eps"),
    ],
)
def test_a_table_that_is_none(table, says):
    """One sentence that names the entry."""
    with pytest.raises(ConfigError, match=says) as error:
        Comparison(methods=("ppo", table))
    assert "\n" not in str(error.value)


def test_errors_of_a_user_s_code(tmp_path):
    """One line with file and line; a sentence of our own stays as it is."""
    file = tmp_path / "x.py"
    file.write_text("def f(kind):\n    raise kind('a\\nb')\n")
    names = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    for kind in (RuntimeError, SystemExit, ValueError, GeneratorExit):
        with pytest.raises(ValueError, match=r"x\.py, line 2\)$"), user_code(file):
            names["f"](kind)
    with pytest.raises(ValueError, match=r"^as it is$"), user_code(file):
        raise ValueError("as it is")
    with pytest.raises(KeyboardInterrupt), user_code(file):
        names["f"](KeyboardInterrupt)
    with pytest.raises(ZeroDivisionError), user_code(None):
        raise ZeroDivisionError
