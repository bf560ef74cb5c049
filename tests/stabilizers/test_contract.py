"""What every stabilizer promises, checked on the registry itself; a new entry is tested unasked.

`VARIANTS` adds arguments that open other branches. Methods with a numpy oracle are also compared
with it, value and gradient.
"""

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import by_response, cast, graded, ragged, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ORACLES

from simlab.aggregate import AGGREGATIONS, mean
from simlab.batch_stats import global_counts, reduce_diagnostics, response_lengths
from simlab.stabilizers import STABILIZERS, bind
from simlab.tokens import OPTIONAL, TokenBatch

VARIANTS = [
    ("dppo", {"divergence": "kl"}),
    ("dppo", {"delta_low": 0.02, "delta_high": 0.01, "cap": 1.1}),
    ("gspo", {"per_token": True}),
    ("gspo", {"eps_low": 0.1, "eps_high": 0.2}),
    ("icepop", {"weighted": False}),
    ("icepop", {"band": "total", "low": 0.8, "high": 1.25}),
    ("kpop", {"phi": 1e-3, "direction": "forward"}),
    ("kpop", {"phi": 1e-3, "direction": "reverse"}),
    ("kpop", {"phi": 1e-2, "anchor": "prox"}),
    ("ppo", {"dual_clip": 1.5}),
    ("ppo", {"eps_low": 0.05, "eps_high": 0.28}),
    ("sat", {"level": "sequence", "alpha": 0.6}),
    ("sat", {"factor": 0.3, "alpha": 0.5}),
    ("sat", {"exponent": 4, "eps_low": 0.3}),
    ("tis", {"form": "pg", "cap": 1.2}),
    ("tis", {"cap": 1.05, "eps_high": 0.05}),
]
CASES = [(name, {}) for name in STABILIZERS] + VARIANTS


def label(case):
    name, arguments = case
    return "-".join([name, *(f"{k}={v}" for k, v in arguments.items())])


every = pytest.mark.parametrize("case", CASES, ids=label)
few = settings(max_examples=8, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)


def method(case):
    name, arguments = case
    return bind(name, **arguments)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def aggregate(how, S, b):
    extra = {"horizon": 7} if how == "seq_mean_token_sum_norm" else {}
    return AGGREGATIONS[how](S, b, **extra)


def tensor_fields(b):
    """The field names of b that hold tensors."""
    return [f.name for f in fields(b)[:-1] if getattr(b, f.name) is not None]


# ---------------------------------------------------------------- shapes and lanes
@every
def test_answer_has_the_shape_of_the_batch(case):
    """S and active are [..., N]; both are off under the mask; S is at least float32."""
    b = ragged(lanes=(2, 3), by_token=True)
    out = method(case)(b)
    assert out.S.shape == out.active.shape == b.mask.shape
    assert out.active.dtype == torch.bool
    assert not out.active[~b.mask].any()
    assert (out.S[~b.mask] == 0).all()
    assert (out.S[b.mask] != 0).any()


@every
def test_lanes_do_not_see_each_other(case):
    """A [2, 3, N] batch gives the six answers of its lanes, gradient and diagnostics included."""
    bound, b = method(case), ragged(1, lanes=(2, 3), by_token=True)
    out, grad = graded(bound, b)
    shown = reduce_diagnostics(b, out.diagnostics)
    for i in range(2):
        for j in range(3):
            lane = replace(b, **{name: getattr(b, name)[i, j] for name in tensor_fields(b)})
            alone, alone_grad = graded(bound, lane)
            close(out.S[i, j].detach(), alone.S.detach())
            close(grad[i, j], alone_grad)
            assert torch.equal(out.active[i, j], alone.active)
            for name, value in reduce_diagnostics(lane, alone.diagnostics).items():
                close(shown[name][i, j], value)


@every
def test_diagnostics_are_finite_and_name_a_known_reducer(case):
    """Every diagnostic reduces to one finite number per lane by mean, min or max."""
    b = ragged(2, lanes=(2,))
    diagnostics = method(case)(b).diagnostics
    assert {d.reduce for d in diagnostics.values()} <= {"mean", "min", "max"}
    for value in reduce_diagnostics(b, diagnostics).values():
        assert value.shape == (2,)
        assert torch.isfinite(value).all()


# ---------------------------------------------------------------- what may not matter
@every
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_what_stands_under_the_mask_is_never_read(case, garbage):
    """NaN, infinity or a response of -1 under the mask changes no bit of any answer."""
    bound, clean = method(case), ragged(3, by_token=True)
    dirty = {
        name: torch.where(clean.mask, getattr(clean, name), garbage)
        for name in ("logp", "logp_mu", "advantage", "logp_prox")
    }
    dirty["response"] = torch.where(clean.mask, clean.response, -1)
    dirty = replace(clean, **dirty)
    (want, want_grad), (got, got_grad) = graded(bound, clean), graded(bound, dirty)
    assert torch.equal(got.S, want.S)
    assert torch.equal(got_grad, want_grad)
    assert torch.equal(got.active, want.active)
    shown = reduce_diagnostics(dirty, got.diagnostics)
    assert all(
        torch.equal(shown[k], v) for k, v in reduce_diagnostics(clean, want.diagnostics).items()
    )
    for how in AGGREGATIONS:
        assert torch.equal(aggregate(how, got.S, dirty)[0], aggregate(how, want.S, clean)[0])


@every
@few
@given(seed=seeds)
def test_the_order_of_tokens_does_not_matter(case, seed):
    """Permuting the tokens permutes S, the gradient and active."""
    bound, b = method(case), ragged(seed, by_token=True)
    order = torch.randperm(b.mask.shape[-1], generator=torch.Generator().manual_seed(seed))
    (want, want_grad), (got, got_grad) = graded(bound, b), graded(bound, b.take(order))
    close(got.S.detach(), want.S.detach()[order])
    close(got_grad, want_grad[order])
    assert torch.equal(got.active, want.active[order])


@every
@pytest.mark.parametrize("how", AGGREGATIONS)
def test_loss_and_gradient_do_not_depend_on_the_micro_batch(case, how):
    """With stats over all micro-batches and sum / count added, a split equals the whole batch."""
    bound, b = method(case), ragged(4)
    leaf = b.logp.clone().requires_grad_()
    whole = replace(b, logp=leaf)
    loss = mean(*aggregate(how, bound(whole).S, whole))
    (grad,) = torch.autograd.grad(loss, leaf)

    micros = by_response(whole, [[5], [0, 3], [1, 2, 4, 6], []])
    stats = bound.stats(micros)
    total, count = 0, 0
    for micro in micros:
        part, n = aggregate(how, bound.surrogate(micro, **stats).S, micro)
        total, count = total + part, count + n
    split = mean(total, count)
    (split_grad,) = torch.autograd.grad(split, leaf)
    assert loss != 0
    close(split.detach(), loss.detach())
    close(split_grad, grad)


# ---------------------------------------------------------------- small and empty batches
@every
@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (6,), (2, 6)])
def test_a_batch_without_active_tokens_has_loss_zero(case, how, shape):
    """N = 0 or everything masked (C036): loss 0, gradient 0, count 0, even over NaN."""
    x = torch.full(shape, torch.nan)
    b = TokenBatch(x, x, x, x.bool() & False, torch.zeros(shape).long() - 1, logp_prox=x)
    bound = method(case)
    logp = x.clone().requires_grad_()
    total, count = aggregate(how, bound(replace(b, logp=logp)).S, b)
    loss = mean(total, count)
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    assert loss.shape == shape[:-1]
    assert (loss == 0).all()
    assert (count == 0).all()
    assert (grad == 0).all()
    assert not bound(b).active.any()


@every
@pytest.mark.parametrize("shape", [(0,), (2, 0), (6,), (2, 6)])
def test_diagnostics_without_active_tokens_are_not_nan(case, shape):
    """Shares of nothing are 0; no reducer fails or answers NaN on an empty batch."""
    x = torch.full(shape, torch.nan)
    b = TokenBatch(x, x, x, x.bool() & False, torch.zeros(shape).long(), logp_prox=x)
    diagnostics = method(case)(b).diagnostics
    for name, value in reduce_diagnostics(b, diagnostics).items():
        assert value.shape == shape[:-1]
        assert not value.isnan().any()
        if diagnostics[name].reduce == "mean":
            assert (value == 0).all()


# ---------------------------------------------------------------- extreme numbers and dtypes
EXTREME = [50.0, 50.0, 700.0, 700.0, -700.0, -700.0, -50.0, -50.0, 0.1]
SIGNS = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0]


def extreme(anchor, dtype):
    """Log-ratios up to 700 (C045), each its own response; prox at mu, at pi, or half way."""
    d = torch.tensor(EXTREME, dtype=dtype)
    b = tokens(d, SIGNS, mu=-1 - d.clamp(min=0), dtype=dtype)
    return replace(b, logp_prox=b.logp_mu + {"mu": 0.0, "pi": 1.0, "between": 0.5}[anchor] * d)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("anchor", ["mu", "pi", "between"])
def test_overflow_stays_finite_and_is_counted(case, anchor, dtype):
    """d = 50 and |d| = 700 give finite S and gradient; `overflow` counts d > 70 where reported."""
    b = extreme(anchor, dtype)
    out, grad = graded(method(case), b)
    assert torch.isfinite(out.S).all()
    assert torch.isfinite(out.S.sum())
    assert torch.isfinite(grad).all()
    if "overflow" in out.diagnostics:
        against_prox = case[0] in ("icepop", "tis")
        d = b.logp - (b.logp_prox if against_prox else b.logp_mu)
        want = int((d > 70).sum()) / len(EXTREME)
        assert float(reduce_diagnostics(b, out.diagnostics)["overflow"]) == pytest.approx(want)


@every
@pytest.mark.parametrize("anchor", ["mu", "pi", "between"])
def test_active_is_exact_on_overflow(case, anchor):
    """Beyond the hold of the ratio `active` still names the tokens that get a gradient."""
    out, grad = graded(method(case), extreme(anchor, torch.float64))
    assert torch.equal(out.active, grad != 0)


@every
def test_bf16_is_widened_before_anything_is_computed(case):
    """bf16 input gives the S, active and diagnostics of the same numbers in float32."""
    bound, low = method(case), ragged(5, dtype=torch.bfloat16, by_token=True)
    got, want = bound(low), bound(cast(low, torch.float32))
    assert got.S.dtype == torch.float32
    assert torch.equal(got.S, want.S)
    assert torch.equal(got.active, want.active)
    shown = reduce_diagnostics(low, got.diagnostics)
    assert all(
        torch.equal(shown[k], v) for k, v in reduce_diagnostics(low, want.diagnostics).items()
    )


@every
def test_float32_agrees_with_float64(case):
    """float64 stays float64, and float32 gives the same S, gradient and active to rounding."""
    bound, wide = method(case), ragged(6, by_token=True)
    (want, want_grad), (got, got_grad) = graded(bound, wide), graded(bound, cast(wide, torch.float))
    assert want.S.dtype == torch.float64
    torch.testing.assert_close(got.S.double(), want.S, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(got_grad.double(), want_grad, rtol=2e-5, atol=2e-5)
    assert torch.equal(got.active, want.active)


# ---------------------------------------------------------------- gradients
@every
@pytest.mark.parametrize("by_token", [False, True])
@few
@given(seed=seeds)
def test_active_is_the_support_of_the_gradient(case, by_token, seed):
    """A token is active exactly when the sum of S has a gradient at its log-prob."""
    out, grad = graded(method(case), ragged(seed, by_token=by_token))
    assert torch.equal(out.active, grad != 0)


@every
def test_no_gradient_reaches_the_other_log_probs(case):
    """mu and the proximal policy are constants of the objective: only logp carries a gradient."""
    b = ragged(7)
    bound, stats = method(case), method(case).stats([b])
    prox = b.logp_prox.clone().requires_grad_()
    logp = b.logp.clone().requires_grad_()
    out = bound.surrogate(replace(b, logp=logp, logp_prox=prox), **stats)
    grad_logp, grad_prox = torch.autograd.grad(out.S.sum(), (logp, prox), allow_unused=True)
    assert (grad_logp != 0).any()
    assert grad_prox is None


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
@few
@given(seed=seeds)
def test_value_and_gradient_are_those_of_the_formula(case, make, seed):
    """S and the closed-form gradient weight of the numpy oracle, on active tokens."""
    b = make(seed)
    out, grad = graded(method(case), b)
    only = {
        new: getattr(b, old)[b.mask].numpy()
        for old, new in {
            "logp": "logp",
            "logp_mu": "mu",
            "logp_prox": "prox",
            "advantage": "A",
            "response": "response",
        }.items()
    }
    S, weight = ORACLES[case[0]](SimpleNamespace(**only), **case[1])
    np.testing.assert_allclose(out.S[b.mask].detach(), S, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(grad[b.mask], weight, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- errors
@every
@pytest.mark.parametrize("field", OPTIONAL)
def test_a_missing_field_is_named_with_its_method(case, field):
    """Without an optional field a method works, or says in one line who wanted what."""
    b = replace(ragged(8), entropy_mu=torch.ones(30).double(), version=torch.ones(30).long())
    said = complaint(method(case), replace(b, **{field: None}))
    assert said is None or (case[0] in said and field in said and "\n" not in said)


def complaint(bound, b):
    """The message of the ValueError of bound(b), or None."""
    try:
        bound(b)
    except ValueError as error:
        return str(error)
    return None


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
    ("icepop", {"low": 0}),
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
]  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE, ids=label)
def test_an_impossible_value_is_refused_when_bound(case):
    """One sentence that names the method and the argument, before any batch is seen."""
    name, arguments = case
    with pytest.raises(ValueError, match=name) as error:
        bind(name, **arguments)
    assert next(iter(arguments)) in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- the record
@pytest.mark.parametrize("field", OPTIONAL)
def test_an_optional_field_is_handed_out_or_named(field):
    """`need` returns the field, or says which method wanted what."""
    b = tokens([0.1])
    assert torch.equal(replace(b, **{field: b.response}).need(field, "estr"), b.response)
    with pytest.raises(ValueError, match=f"estr needs {field}, .*, and this batch has none"):
        b.need(field, "estr")


def test_a_masked_response_index_sizes_nothing():
    """The number of responses comes from active tokens: an index under the mask is never read."""
    b = tokens([0.1, 0.2, 0.3], mask=[1, 1, 0], response=[0, 1, 2**40])
    assert b.n_responses == 2
    assert bind("gspo")(b).S.shape == (3,)


@pytest.mark.parametrize("field", ["logp_mu", "advantage", "mask", "response", "logp_prox"])
def test_a_field_of_another_shape_is_named(field):
    """TokenBatch says which field does not fit."""
    b = ragged()
    with pytest.raises(ValueError, match=rf"TokenBatch\.{field} has shape"):
        replace(b, **{field: getattr(b, field)[:-1]})


@pytest.mark.parametrize(("field", "dtype"), [("mask", torch.float32), ("response", torch.int32)])
def test_a_field_of_another_dtype_is_named(field, dtype):
    """A float mask or a short index is refused, not reinterpreted."""
    b = ragged()
    with pytest.raises(ValueError, match=rf"TokenBatch\.{field} must be"):
        replace(b, **{field: getattr(b, field).to(dtype)})


def test_taking_every_response_once_loses_nothing():
    """Micro-batches made with `take` hold all tokens and responses of the batch."""
    b = ragged(9)
    micros = by_response(b, [[0, 1], [2, 3, 4, 5, 6]])
    counts = global_counts(micros)
    assert counts["tokens"] == b.mask.sum()
    assert counts["responses"] == (response_lengths(b) > 0).sum()
