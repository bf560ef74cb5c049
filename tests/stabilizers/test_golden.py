"""Hand-made numbers of each method: golden/<name>.json, derived from the formula, not from the code.

A file holds a list of cases, or one. A case has `source`, `arguments`, the batch, and the expected
`S`, `grad` (of the sum of S) and `active`; `grad_topk` (0 where not given), `diagnostics` and `loss`
(minus the token mean) are optional. The batch gives log-probs (`logp`, `logp_mu`, `logp_prox`) or probabilities (`pi`, `mu`,
`prox`), optional fields stand under their own names; without `mask` every token is active, without `response` each token is a response.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import graded_head

from simlab.core.aggregate import mean, reduce_diagnostics, token_mean
from simlab.core.tokens import KINDS, OPTIONAL, TOP, TokenBatch
from simlab.stabilizers import STABILIZERS, bind

FOLDER = Path(__file__).parent / "golden"
RTOL = 1e-7


def cases():
    for path in sorted(FOLDER.glob("*.json")):
        found = json.loads(path.read_text())
        for i, case in enumerate(found if isinstance(found, list) else [found]):
            yield pytest.param(path.stem, case, id=f"{path.stem}-{i}")


def log_prob(case, log_name, name):
    """A field given as log-probs or as probabilities; None where the case has neither."""
    if log_name in case:
        return torch.tensor(case[log_name], dtype=torch.float64)
    return torch.tensor(case[name], dtype=torch.float64).log() if name in case else None


def batch(case):
    n = len(case["advantage"])
    optional = {name: case[name] for name in OPTIONAL.keys() - {"logp_prox"} if name in case}
    for name, x in optional.items():
        if name in TOP:  # JSON has no infinity
            x = [[-math.inf if y is None else y for y in row] for row in x]
        dtype = KINDS.get(name, torch.float64)
        optional[name] = torch.tensor(x, dtype=dtype)
    return TokenBatch(
        logp=log_prob(case, "logp", "pi"),
        logp_mu=log_prob(case, "logp_mu", "mu"),
        logp_prox=log_prob(case, "logp_prox", "prox"),
        advantage=torch.tensor(case["advantage"], dtype=torch.float64),
        mask=torch.tensor(case.get("mask", [1] * n)).bool(),
        response=torch.tensor(case.get("response", list(range(n)))),
        **optional,
    )


@pytest.mark.parametrize("name", STABILIZERS)
def test_every_method_has_golden_numbers(name):
    """A registry entry without a golden file is not finished."""
    assert (FOLDER / f"{name}.json").exists()


@pytest.mark.parametrize(("name", "case"), list(cases()))
def test_golden_numbers(name, case):
    """S, gradient, active, diagnostics and loss are the numbers worked out by hand."""
    b, bound = batch(case), bind(name, **case["arguments"])
    assert case["source"]
    out, grad = graded_head(bound, b)
    np.testing.assert_allclose(out.S.detach(), case["S"], rtol=RTOL, atol=1e-12)
    np.testing.assert_allclose(grad[..., 0], case["grad"], rtol=RTOL, atol=1e-12)
    np.testing.assert_allclose(
        grad[..., 1:], case.get("grad_topk", 0 * grad[..., 1:]), rtol=RTOL, atol=1e-12
    )
    assert out.active.tolist() == [bool(x) for x in case["active"]]
    shown = reduce_diagnostics(b, out.diagnostics)
    for key, value in case.get("diagnostics", {}).items():
        assert float(shown[key]) == pytest.approx(value, rel=RTOL, abs=1e-12), key
    if "loss" in case:
        loss = -mean(*token_mean(out.S.detach(), b))
        assert float(loss) == pytest.approx(case["loss"], rel=1e-8)
