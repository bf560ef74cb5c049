"""What every stabilizer promises (simlab/contract), checked on the registry; a new entry is tested
unasked, with the arguments of its golden cases. Methods are also compared with a numpy oracle.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from batches import graded_head, ragged
from oracles import ORACLES

from simlab.contract.promises import check
from simlab.core.arguments import required
from simlab.stabilizers import STABILIZERS, bind

GOLDEN = Path(__file__).parents[1] / "stabilizers" / "golden"
# Arguments that open branches on these batches and stand in no golden file.
MORE = [
    ("centering", {"placebo": True}),
    ("centering", {"mode": "cap"}),
    ("centering", {"mode": "clamp", "columns": 1}),
    ("centering", {"mode": "ipo", "eps": 0.02, "cap": 1.5}),
    ("gspo", {"eps_low": 0.1, "eps_high": 0.2}),
    ("clip_cov", {"rate": 0.2, "low": 0.1}),
    ("kl_cov", {"rate": 0.3, "coef": 0.1}),
    ("luspo", {"eps_low": 0.1, "eps_high": 0.2}),
    ("sis", {"lam": 1.5}),
    ("trm", {"reduce": "max", "anchor": "current"}),
    ("icepop", {"band": "total", "low": 0.8, "high": 1.25}),
    ("kpop", {"phi": 1e-3, "direction": "forward"}),
    ("kpop", {"phi": 1e-2, "anchor": "prox"}),
    ("mis", {"level": "geometric", "low": 0.8, "high": 1.25}),
    ("ppo", {"dual_clip": 1.5}),
    ("ppo", {"eps_low": 0.05, "eps_high": 0.28}),
    ("dppo", {"dual_clip": 1.1}),
    ("dppo", {"dual_clip": 1.1, "form": "ppo"}),
    ("gspo", {"dual_clip": 1.01, "eps_high": 0.2}),
    ("icepop", {"dual_clip": 1.1}),
    ("kpop", {"dual_clip": 1.1}),
    ("sat", {"dual_clip": 1.1}),
    ("sat", {"level": "sequence", "alpha": 0.6, "dual_clip": 1.01}),
    ("sat", {"shape": "exponential", "alpha": 0.5}),
    ("sat", {"shape": "linear", "alpha": 0.5}),
    ("sat_open", {"gate": "tv", "alpha": 0.5}),
    ("sat_open", {"gate": "group", "strata": 2, "alpha": 0.5}),
    ("sat", {"factor": 0.3, "alpha": 0.5}),
    ("sat", {"exponent": 4, "eps_low": 0.3}),
]


def cases():
    """(name, arguments): every set of arguments that a golden file of the method uses."""
    for name in STABILIZERS:
        path = GOLDEN / f"{name}.json"
        found = json.loads(path.read_text()) if path.exists() else []
        sets = [case["arguments"] for case in (found if isinstance(found, list) else [found])]
        if not required(STABILIZERS[name].surrogate):
            sets.insert(0, {})
        yield from ((name, x) for i, x in enumerate(sets) if x not in sets[:i])


CASES = [*cases(), *MORE]


def label(case):
    name, arguments = case
    return "-".join([name, *(f"{k}={v}" for k, v in arguments.items())])


every = pytest.mark.parametrize("case", CASES, ids=label)


def method(case):
    name, arguments = case
    return bind(name, **arguments)


# ---------------------------------------------------------------- the promises
@every
def test_promises(case):
    """Every promise of simlab/contract holds for every method and every set of arguments."""
    check(method(case))


def test_every_method_is_tested():
    """No registry entry is without a case."""
    assert {name for name, _ in CASES} == set(STABILIZERS)


@pytest.mark.parametrize("case", [c for c in CASES if c[0] in ORACLES], ids=label)
@pytest.mark.parametrize(
    "make",
    [
        lambda seed: ragged(seed),
        lambda seed: ragged(seed, by_token=True),
        lambda seed: ragged(seed, sizes=(1,) * 20),
        lambda seed: ragged(seed, sizes=(40,)),
    ],
    ids=["response", "token", "one-token", "one-response"],
)
def test_value_and_gradient_are_those_of_the_formula(case, make):
    """S and the gradient weights of the numpy oracle, of the tokens and of their heads."""
    for seed in (1, 2):
        b = make(seed)
        out, grad = graded_head(method(case), b)
        short = {"logp_mu": "mu", "logp_prox": "prox", "advantage": "A"}
        only = {short.get(name, name): x[b.mask].numpy() for name, x in b.held().items()}
        S, weight, *columns = ORACLES[case[0]](SimpleNamespace(**only), **case[1])
        np.testing.assert_allclose(out.S[b.mask].detach(), S, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(grad[b.mask][:, 0], weight, rtol=1e-10, atol=1e-12)
        columns = columns[0] if columns else np.zeros_like(only["topk"])
        np.testing.assert_allclose(grad[b.mask][:, 1:], columns, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize("name", ["icepop", "tis"])
def test_methods_with_a_proximal_policy_ask_for_it(name):
    """IcePop and TIS refuse a batch without `logp_prox`, naming themselves and the field."""
    with pytest.raises(ValueError, match=f"{name} needs logp_prox"):
        bind(name)(replace(ragged(), logp_prox=None))
    with pytest.raises(ValueError, match="kpop needs logp_prox"):
        bind("kpop", anchor="prox")(replace(ragged(), logp_prox=None))


@pytest.mark.parametrize("name", STABILIZERS)
def test_an_unknown_argument_is_refused_by_name(name):
    """`bind` names the method and the argument it does not have."""
    with pytest.raises(ValueError, match=f"{name} has no argument epsilon_typo") as error:
        bind(name, epsilon_typo=1)
    assert "\n" not in str(error.value)


def test_an_unknown_method_is_refused_with_the_list():
    """`bind` names what was asked for and what there is."""
    with pytest.raises(ValueError, match="no stabilizer 'grpo'") as error:
        bind("grpo")
    assert all(name in str(error.value) for name in STABILIZERS)


@pytest.mark.parametrize("argument", ["b", "q", "reduce", "batches"])
def test_what_the_caller_supplies_is_no_hyper_parameter(argument):
    """The batch, the whole-batch numbers and the reducer cannot be bound."""
    with pytest.raises(ValueError, match=f"sat has no argument {argument}"):
        bind("sat", **{argument: 0.1})


IMPOSSIBLE = [
    *((m, {e: x}) for m in ("ppo", "sat", "gspo", "icepop", "kpop", "tis")
      for e, x in (("eps_low", -0.1), ("eps_low", 1.1), ("eps_low", float("nan")),
                   ("eps_high", -0.1), ("eps_high", float("inf")), ("eps_high", float("nan")))),
    ("ppo", {"eps_high": "wide"}),
    ("ppo", {"dual_clip": 1.0}),
    ("ppo", {"dual_clip": 0.5}),
    ("ppo", {"dual_clip": float("nan")}),
    ("sat", {"exponent": 0}),
    ("sat", {"exponent": float("nan")}),
    ("sat", {"factor": 1.5}),
    ("sat", {"factor": -0.1}),
    ("sat", {"level": "turn"}),
    ("sat", {"alpha": 0}),
    ("sat", {"alpha": 1.5}),
    ("sat", {"alpha": float("nan")}),
    ("sat", {"alpha": "most"}),
    ("dppo", {"divergence": "js"}),
    ("dppo", {"delta_low": -0.1}),
    ("dppo", {"delta_high": -0.1}),
    ("dppo", {"delta_low": float("nan")}),
    ("dppo", {"delta_high": float("nan")}),
    ("dppo", {"cap": 0}),
    ("dppo", {"cap": float("nan")}),
    ("icepop", {"low": 6}),
    ("icepop", {"high": 0.4}),
    ("icepop", {"high": float("nan")}),
    ("icepop", {"band": "both"}),
    ("kpop", {"phi": -0.1}),
    ("kpop", {"phi": float("nan")}),
    ("kpop", {"direction": "backward"}),
    ("kpop", {"anchor": "old"}),
    ("tis", {"cap": 0}),
    ("tis", {"cap": float("nan")}),
    ("tis", {"form": "grpo"}),
    ("tis", {"level": "turn"}),
    ("asympo", {"floor": 0}),
    ("cispo", {"eps_low": 1.5}),
    ("cispo", {"eps_high": -0.1}),
    ("decoupled", {"proximal": "old"}),
    ("decoupled", {"mix": 1.5}),
    ("decoupled", {"weight": "clip"}),
    ("decoupled", {"low": 6.0}),
    ("decoupled", {"dual_clip": 1.0}),
    ("dppo", {"form": "grpo"}),
    ("drpo", {"delta": 0}),
    ("estr", {"tau": -1.0}),
    ("estr", {"rate": 1.0}),
    ("estr", {"scale": "gamma"}),
    ("estr", {"eps": 0}),
    ("gmpo", {"eps_low": -0.1}),
    ("gmpo", {"eps_high": float("nan")}),
    ("m2po", {"budget": 0}),
    ("m2po", {"low": 1.5}),
    ("minirl", {"cap": 0}),
    ("minirl", {"eps_low": 1.5}),
    ("mis", {"level": "turn"}),
    ("mis", {"low": 3.0}),
    ("mis", {"veto": 1.0}),
    ("opsm", {"delta": -1.0}),
    ("oracle", {"delta": float("nan")}),
    ("sapo", {"tau_pos": 0}),
    ("sapo", {"tau_pos": math.inf}),
    ("sapo", {"tau_neg": -1.0}),
    ("sat", {"ema": 1.0}),
    ("sat_open", {"gate": "top"}),
    ("sat_open", {"alpha": 0}),
    ("sat_open", {"strata": 0}),
    ("sat_open", {"threshold": -1.0, "gate": "fixed"}),
    ("sat_open", {"rate": 1.5}),
    ("sat_open", {"factor": 2.0}),
    ("seqclip", {"low": 2.0}),
    ("spo", {"eps": 0}),
    ("spo_scaled", {"alpha": 0}),
    ("spo_scaled", {"alpha": 1.5}),
    ("two_factor", {"c": 0.5}),
    ("two_factor", {"repair": "cut"}),
    ("vaco", {"delta": -0.1}),
    ("vaco", {"scope": "token"}),
    ("vcpo", {"cap": 0}),
    ("vcpo", {"base": 0}),
    ("vcpo", {"rule": "cube"}),
    ("clip_cov", {"rate": 1.5}),
    ("kl_cov", {"coef": -0.1}),
    ("luspo", {"eps_low": 1.5}),
    ("obrs", {"lam": 0}),
    ("obrs", {"cap": 0}),
    ("opmd", {"tau": -1.0}),
    ("regression", {"tau": -0.1}),
    ("regression", {"level": "turn"}),
    ("sis", {"lam": 0}),
    ("sis", {"rejected": "keep"}),
    ("trm", {"delta": -1.0}),
    ("trm", {"reduce": "sum"}),
    ("asymre", {"delta": math.nan}),
    ("asymre", {"alone": "drop"}),
    ("ctpo", {"e_low": -0.1}),
    ("ctpo", {"dual": 0}),
    ("minpro", {"eps_low": 1.5}),
    ("mu_grpo", {"threshold": 1.0}),
    ("oapl", {"beta1": 0}),
    ("oapl", {"beta2": 0}),
    ("topr", {"sign": "return"}),
    ("vespo", {"k_pos": 0}),
    ("vespo", {"lam_neg": math.inf}),
]  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE, ids=label)
def test_an_impossible_value_is_refused_when_bound(case):
    """One sentence that names the method and the argument, before any batch is seen."""
    name, arguments = case
    with pytest.raises(ValueError, match=name) as error:
        bind(name, **arguments)
    assert next(iter(arguments)) in str(error.value)
    assert "\n" not in str(error.value)


def test_whole_batch_numbers_need_a_micro_batch():
    """For every method that has some; an empty micro-batch is one."""
    for case in CASES:
        bound = method(case)
        if bound.whole_batch:
            with pytest.raises(
                ValueError, match=f"{bound.name}: whole-batch numbers need at least"
            ):
                bound.stats([])
