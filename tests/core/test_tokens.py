"""The record of tokens: what it refuses, what it finds, and closed forms that end at the first derivative."""

from dataclasses import replace

import pytest
import torch
from batches import by_response, ragged, tokens

from simlab.core.kl import KL
from simlab.core.per_response import global_counts, response_lengths
from simlab.core.tokens import OPTIONAL, TOP, on_mask
from simlab.stabilizers import STABILIZERS, bind

OPEN = {  # arguments without a default
    "seqclip": {"low": 0.5, "high": 2.0},
    "spo_scaled": {"alpha": 0.5},
    "ppo+kl": {"kl.coef": 0.1},
}


@pytest.mark.parametrize("field", OPTIONAL)
def test_an_optional_field_is_handed_out_or_named(field):
    """`need` returns the field, or says which method wanted what."""
    b = tokens([0.1])
    x = b.response.unsqueeze(-1) if field in TOP else b.response
    assert torch.equal(replace(b, **{field: x}).need(field, "estr"), x)
    with pytest.raises(ValueError, match=f"estr needs {field}, .*, and this batch has none"):
        b.need(field, "estr")


def test_a_masked_response_index_sizes_nothing():
    """The number of responses comes from active tokens: an index under the mask is never read."""
    b = tokens([0.1, 0.2, 0.3], mask=[1, 1, 0], response=[0, 1, 2**40])
    assert b.n_responses == 2
    assert bind("gspo")(b).S.shape == (3,)


def test_a_response_without_a_number_is_named():
    """-1 pads; on a token of the mask it would index from the end."""
    with pytest.raises(ValueError, match=r"TokenBatch\.response is -1 on a token of the mask"):
        tokens([0.1, 0.2], response=[0, -1])


@pytest.mark.parametrize("field", ["logp_mu", "advantage", "mask", "response", "logp_prox"])
def test_a_field_of_another_shape_is_named(field):
    """TokenBatch says which field does not fit."""
    b = ragged()
    with pytest.raises(ValueError, match=rf"TokenBatch\.{field} has shape"):
        replace(b, **{field: getattr(b, field)[:-1]})


@pytest.mark.parametrize(
    ("field", "dtype"),
    [
        ("mask", torch.float32),
        ("response", torch.int32),
        ("stratum", torch.float64),
        ("age", torch.int32),
    ],
)
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


def test_replaced_responses_are_counted_anew():
    """A number that was found grows with other responses; one that was given is held to."""
    b = tokens([0.1, 0.2, 0.3])
    assert replace(b, logp=b.logp + 1).n_responses == 3
    other = replace(b, response=torch.tensor([0, 6, 6]))
    assert other.n_responses == 7
    assert bind("gspo")(other).S.shape == (3,)
    wider = replace(tokens([0.1, 0.2], mask=[1, 0], response=[0, 5]), mask=torch.ones(2).bool())
    assert wider.n_responses == 6
    with pytest.raises(ValueError, match=r"response is 6 on a token of the mask, n_responses is 4"):
        replace(replace(b, n_responses=4), response=other.response)


def test_an_age_is_at_least_0():
    """The placeholder of an unknown version is named on the mask, and not read under it."""
    b = tokens([0.1, 0.2], mask=[1, 0])
    assert replace(b, age=torch.tensor([3, -1])).age.tolist() == [3, -1]
    with pytest.raises(ValueError, match=r"TokenBatch\.age is -1 on a token of the mask") as error:
        replace(b, age=torch.tensor([-1, 3]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("beside_a_kl_term", [False, True])
@pytest.mark.parametrize("name", [*STABILIZERS, "pg+tis", "gspo+icepop", "ppo+kl"])
def test_second_derivatives_are_refused(name, beside_a_kl_term):
    """A weight is no constant of the objective; a KL term beside it must not answer for both."""
    b = ragged(1, by_token=True)
    logp = b.logp.clone().requires_grad_()
    S = bind(name, **OPEN.get(name, {}))(replace(b, logp=logp)).S
    if beside_a_kl_term:
        S = S - 0.1 * KL["k3"](on_mask(b, logp), on_mask(b, b.logp_ref))
    with pytest.raises(RuntimeError, match="first derivatives only: leave create_graph out"):
        torch.autograd.grad(S.sum(), logp, create_graph=True)
