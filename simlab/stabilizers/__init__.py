"""The registry: one stabilizer per file, one line per stabilizer.

A stabilizer is a module with `surrogate(b, *, hyper-parameters) -> Surrogate` and, if it reads a
number of the whole optimizer batch, `whole_batch(batches, *, ..., reduce=None) -> {name: number}`.
`bind` joins a module and its arguments into the one callable that the simulator, the audit and the
cluster share.

What an argument may be stands in its annotation, and `bind` holds every value against it, `load` the
defaults of a user's file. A direct call of a module's function checks nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import cleandoc, signature
from pathlib import Path
from types import ModuleType
from typing import Literal

from simlab.core.arguments import check_arguments, check_name, required, settable
from simlab.core.tokens import nothing
from simlab.core.user_files import module_of, problem
from simlab.stabilizers import (
    asympo,
    asymre,
    centering,
    cispo,
    clip_cov,
    ctpo,
    decoupled,
    dis,
    dppo,
    drpo,
    estr,
    flash_reinforce,
    gepo,
    gmpo,
    gspo,
    icepop,
    ipo,
    kl_cov,
    kpop,
    luspo,
    m2po,
    minirl,
    minpro,
    mis,
    mu_grpo,
    none,
    oapl,
    obrs,
    opmd,
    opsm,
    oracle,
    pg,
    ppo,
    regression,
    sapo,
    sat,
    sat_open,
    seqclip,
    sis,
    spo,
    spo_scaled,
    tis,
    topr,
    trm,
    troll,
    two_factor,
    vaco,
    vcpo,
    vespo,
)
from simlab.stabilizers.algebra.compose import Contract, Denominator, mean_of
from simlab.stabilizers.algebra.corrections import TERMS
from simlab.stabilizers.algebra.laws import Added, composed
from simlab.stabilizers.contraction import factor_of_radius, quantile
from simlab.stabilizers.stabilizer import Stabilizer, check_average, needs

__all__ = [
    "NAMES",
    "STABILIZERS",
    "Stabilizer",
    "bind",
    "check_average",
    "load",
    "needs",
    "parts",
    "required",
    "term_keys",
    "terms",
]
Proximal = Literal["mu", "batch", "rollout", "step", "ewma"]

STABILIZERS: dict[str, ModuleType] = {
    "asympo": asympo,
    "asymre": asymre,
    "centering": centering,
    "cispo": cispo,
    "clip_cov": clip_cov,
    "ctpo": ctpo,
    "decoupled": decoupled,
    "dis": dis,
    "dppo": dppo,
    "drpo": drpo,
    "estr": estr,
    "flash_reinforce": flash_reinforce,
    "gepo": gepo,
    "gmpo": gmpo,
    "gspo": gspo,
    "icepop": icepop,
    "ipo": ipo,
    "kl_cov": kl_cov,
    "kpop": kpop,
    "luspo": luspo,
    "m2po": m2po,
    "minirl": minirl,
    "minpro": minpro,
    "mis": mis,
    "mu_grpo": mu_grpo,
    "none": none,
    "oapl": oapl,
    "obrs": obrs,
    "opmd": opmd,
    "opsm": opsm,
    "oracle": oracle,
    "pg": pg,
    "ppo": ppo,
    "regression": regression,
    "sapo": sapo,
    "sat": sat,
    "sat_open": sat_open,
    "seqclip": seqclip,
    "sis": sis,
    "spo": spo,
    "spo_scaled": spo_scaled,
    "tis": tis,
    "topr": topr,
    "trm": trm,
    "troll": troll,
    "two_factor": two_factor,
    "vaco": vaco,
    "vcpo": vcpo,
    "vespo": vespo,
}
NAMES = tuple(STABILIZERS)  # without a user's own


def parts(name: str) -> dict[str, Callable]:
    """`surrogate` and, if it has one, `whole_batch` of a method. ValueError for an unknown name."""
    check_name("stabilizer", name, STABILIZERS)
    found = {part: getattr(STABILIZERS[name], part, None) for part in ("surrogate", "whole_batch")}
    return {part: function for part, function in found.items() if function}


def bind(name: str, **arguments) -> Stabilizer:
    """A stabilizer by name with hyper-parameters.

    A composition is `base+term+...`: a method, and corrections of corrections.py or of the methods that have
    one. An argument of a term is `term.argument`; the second `keep` is `keep2`. `proximal` chooses the
    denominator of a method's ratio: mu, or the `logp_prox` that the caller hands in (batch, rollout, step, ewma).
    Raises ValueError in one sentence for an unknown name, an unknown argument or an impossible value.
    """
    base, *written = name.split("+")
    own = [settable(f) for f in parts(base).values()]
    if written or ("proximal" in arguments and not any("proximal" in x for x in own)):
        return _composition(name, base, written, arguments)
    functions = parts(name)
    known = {part: settable(function) for part, function in functions.items()}
    arguments = check_arguments(name, known["surrogate"] | known.get("whole_batch", {}), arguments)
    if missing := {x for f in functions.values() for x in required(f)} - arguments.keys():
        raise ValueError(f"{name} needs {', '.join(sorted(missing))}, which has no published value")
    split = {
        part: partial(functions[part], **{k: v for k, v in arguments.items() if k in names})
        for part, names in known.items()
    }
    settings = {}
    for part in reversed(split):  # whole_batch first
        defaults = signature(split[part]).parameters
        settings |= {key: defaults[key].default for key in known[part]}
    bound = Stabilizer(
        name,
        arguments,
        split["surrogate"],
        split.get("whole_batch"),
        cleandoc(STABILIZERS[name].__doc__ or ""),
        settings,
    )
    try:
        bound(nothing(0))  # what two arguments must keep together, the modules check
    except ValueError:
        raise
    except Exception as error:  # whatever a user's code may raise
        raise ValueError(f"{name}: {problem(error)}") from error
    return bound


def term_keys(terms: list[str]) -> list[str]:
    """What the terms of a composition are called in its arguments: their names, the second keep keep2."""
    return [x + (str(n) if (n := terms[: i + 1].count(x)) > 1 else "") for i, x in enumerate(terms)]


def _composition(name: str, base: str, written: list[str], arguments: dict) -> Stabilizer:
    """`bind` of a composition."""
    keys = term_keys(written)
    split: dict[str, dict] = {"": {}} | {key: {} for key in keys}
    for full, value in arguments.items():
        key, _, argument = full.rpartition(".")
        if key not in split:
            raise ValueError(
                f"{name}: {full} belongs to no term; there are {', '.join(keys) or 'none'}"
            )
        split[key][argument] = value
    proximal = split[""].get("proximal")
    if "proximal" not in {x for f in parts(base).values() for x in settable(f)}:
        check_arguments(name, settable(_written), {"proximal": split[""].pop("proximal", None)})
    added, words, terms_known = [], {}, terms()
    for key, term in zip(keys, written, strict=True):
        if term in words:
            raise ValueError(f"{name}: {term} is written twice; write it once")
        if term in WORDS:
            words[term] = _word(f"{name}: {key}", WORDS[term], split[key])
            continue
        check_name("correction", term, sorted([*terms_known, *WORDS]))
        function = terms_known[term]
        denominator = split[key].pop("denominator", "keep")
        check_arguments(f"{name}: {key}", settable(_written), {"denominator": denominator})
        split[key] = check_arguments(f"{name}: {key}", settable(function), split[key])
        if missing := required(function) - split[key].keys():
            raise ValueError(f"{name}: {key} needs {', '.join(sorted(missing))}")
        added.append(Added(key, function, split[key], denominator))
    return composed(name, arguments, bind(base, **split[""]), added, proximal, **words)


# words of a composition that are no terms: what they are made of, from their arguments
WORDS = {
    "norm": (lambda f: f, mean_of),
    "contract": (Contract, quantile, factor_of_radius),
    "support": (lambda: True,),
}


def _word(who: str, word: tuple[Callable, ...], arguments: dict):
    """What a word is made of; each of its functions takes the arguments that it knows."""
    make, *functions = word
    known = [settable(f) for f in functions]
    arguments = check_arguments(who, {k: x for each in known for k, x in each.items()}, arguments)
    own = [{k: x for k, x in arguments.items() if k in each} for each in known]
    return make(*(partial(f, **x) for f, x in zip(functions, own, strict=True)))


def _written(*, proximal: Proximal | None = None, denominator: Denominator = "keep") -> None:
    """What every base and every correction of a composition takes besides its own arguments."""


def terms() -> dict[str, Callable]:
    """The terms of compositions: those of corrections.py, and `correction` or `extra` of methods."""
    known = dict(TERMS)
    for name, module in STABILIZERS.items():
        own = getattr(module, "correction", None) or getattr(module, "extra", None)
        known |= {name: own} if own else {}
    return dict(sorted(known.items()))


def load(path: Path, anew: bool = False) -> str:
    """Register the stabilizer of a user's file under the name of the file, and return the name.

    A file that was edited since replaces what it registered; `anew` runs it in any case. Raises
    ValueError in one sentence for a file that cannot be imported, has no `surrogate`, or has the name
    of another method. The file is code and runs.
    """
    name = path.stem
    registered = STABILIZERS.get(name)
    if registered and getattr(registered, "__file__", None) != str(path.resolve()):
        raise ValueError(f"{path}: there is a stabilizer {name} already, rename the file")
    if registered and name in NAMES:
        return name
    module = module_of(path, __name__, anew)
    if module is registered:
        return name
    if not callable(getattr(module, "surrogate", None)):
        raise ValueError(f"{path}: has no function surrogate(b, *, ...)")
    whole_batch = getattr(module, "whole_batch", None)
    if whole_batch is not None and not callable(whole_batch):
        raise ValueError(
            f"{path}: whole_batch must be a function of the micro-batches, got {whole_batch!r}"
        )
    for function in filter(None, (module.surrogate, whole_batch)):
        known, given = settable(function), signature(function).parameters
        defaults = {key: given[key].default for key in known.keys() - required(function)}
        check_arguments(f"{path}: {name}", known, defaults)
    STABILIZERS[name] = module
    return name
