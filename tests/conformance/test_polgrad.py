"""polgrad's own conformance test, run on our losses as on any foreign ones."""

from __future__ import annotations

from dataclasses import replace

import polgrad
import pytest
import torch
from pairs import HORIZON, SEQ, TOL, Call, Padded, ours
from polgrad.testing import assert_conforms
from torch import Tensor


def for_polgrad(call: Call):
    """Our loss with the keywords that polgrad calls a foreign loss with."""

    def loss(*, logprobs, old_logprobs, advantages, response_mask) -> Tensor:
        A = advantages.unsqueeze(1).expand_as(logprobs)
        order = torch.arange(A.numel())
        return call(
            Padded(logprobs, old_logprobs, old_logprobs, old_logprobs, A, response_mask, order)
        )

    return loss


NORM = replace(polgrad.ALGORITHMS["dr_grpo"].loss, norm_len=HORIZON)
REGISTRY = {
    "ppo": (ours("ppo"), "ppo"),
    "grpo": (ours("ppo", SEQ), "grpo"),
    "dapo": (ours("ppo", eps_high=0.28), "dapo"),
    "dr_grpo": (ours("ppo", "seq_mean_token_sum_norm"), NORM),
    "gspo": (ours("gspo", SEQ), "gspo"),
    "gspo_token": (ours("gspo", SEQ, per_token=True), "gspo_token"),
    "cispo": (ours("cispo"), "cispo"),
    "rloo": (ours("none", "seq_mean_token_sum"), "rloo"),
    "reinforce_pp": (ours("ppo", SEQ), "reinforce_pp"),
}


@pytest.mark.parametrize("name", REGISTRY)
def test_polgrad_certifies(name, rows):
    """polgrad's own test accepts our loss as the algorithm of this name in its registry."""
    call, reference = REGISTRY[name]
    report = assert_conforms(for_polgrad(call), reference)
    assert max(report.max_loss_rel_diff, report.max_grad_rel_diff) < TOL
    rows.add(call.label, f"polgrad `assert_conforms`, {name}", "equal", "both")


def test_polgrad_refuses_a_wrong_loss():
    """The certificate is not given to everyone: another radius fails."""
    with pytest.raises(AssertionError):
        assert_conforms(for_polgrad(ours("ppo", eps_high=0.21)), "ppo")
