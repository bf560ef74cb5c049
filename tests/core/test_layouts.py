"""Padded and packed tensors become one list of tokens; axes that would be lanes by accident are refused."""

import pytest
import torch

from simlab import TokenBatch, bind, token_mean
from simlab.core.aggregate import AGGREGATIONS

B, T = 3, 4
draws = torch.Generator().manual_seed(0)
LOGP_MU = -torch.rand(B, T, generator=draws) - 0.1
LOGP = LOGP_MU + 0.5 * torch.randn(B, T, generator=draws)
ADVANTAGE = torch.tensor([1.0, -0.5, 0.25])
LENGTHS = torch.tensor([4, 0, 2])  # one empty response
MASK = torch.arange(T) < LENGTHS[:, None]


def flat():
    """The list of tokens that padding and packing stand for."""
    index = torch.arange(B).repeat_interleave(T)[MASK.flatten()]
    return TokenBatch(LOGP[MASK], LOGP_MU[MASK], ADVANTAGE[index], MASK[MASK], index, n_responses=B)


def padded(logp=LOGP, advantage=ADVANTAGE, mask=MASK, **fields):
    return TokenBatch.from_padded(logp, LOGP_MU, advantage, mask, **fields)


@pytest.mark.parametrize("name", ["sat", "gspo", "ppo"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_padded_and_packed_are_the_list(name, aggregation):
    """Loss, gradient and whole-batch numbers are those of the flat list, whatever stands in the padding."""
    method, cu_seqlens = bind(name), torch.tensor([0, 4, 4, 6], dtype=torch.int32)
    garbage = torch.where(MASK, LOGP, torch.nan)
    results = []
    for make in (
        lambda x: TokenBatch(x[MASK], *list(flat().held().values())[1:], n_responses=B),
        lambda x: TokenBatch.from_padded(x, LOGP_MU, ADVANTAGE, MASK.float()),
        lambda x: TokenBatch.from_padded(x, LOGP_MU, ADVANTAGE[:, None].expand(B, T), MASK.int()),
        lambda x: TokenBatch.from_packed(x[MASK], LOGP_MU[MASK], ADVANTAGE, MASK[MASK], cu_seqlens),
        lambda x: TokenBatch.from_packed(
            x[MASK][None], LOGP_MU[MASK][None], ADVANTAGE, MASK[MASK][None], cu_seqlens
        ),
    ):
        x = garbage.clone().requires_grad_()
        b = make(x)
        total, count = AGGREGATIONS[aggregation](method(b).S, b)
        (total / count).backward()
        results.append(torch.cat([(total / count).detach()[None], x.grad[MASK]]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-6, atol=0)


def test_a_number_a_response_and_a_last_axis():
    """Rewards `[B]` are spread over the tokens; the top-k fields keep their columns; positions are counted."""
    top = torch.randn(B, T, 2, generator=draws)
    b = padded(reward=torch.tensor([1.0, 0.0, 2.0]), topk=top, topk_mu=top)
    assert b.need("reward", "x").view(B, T)[2].tolist() == [2.0] * T
    assert b.need("topk", "x").shape == (B * T, 2)
    assert b.need("position", "x").tolist() == [0, 1, 2, 3] * B
    c = TokenBatch.from_packed(
        LOGP[0],
        LOGP_MU[0],
        ADVANTAGE[:2],
        MASK[0],
        torch.tensor([0, 1, 4]),
        group=torch.tensor([5, 7]),
    )
    assert c.need("group", "x").tolist() == [5, 7, 7, 7]
    assert c.need("position", "x").tolist() == [0, 0, 1, 2]
    assert c.response.tolist() == [0, 1, 1, 1]
    assert token_mean(torch.zeros(0), TokenBatch.from_padded(*[torch.zeros(0, 4)] * 4))[0] == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TokenBatch(LOGP, LOGP_MU, LOGP, MASK, MASK.long()), r"\(3, 4\).*from_padded"),
        (lambda: padded(logp=LOGP[0]), r"logp has shape \(4,\), it must be \[B, T\]"),
        (lambda: padded(advantage=ADVANTAGE[:2]), r"advantage has shape \(2,\).*\(3,\)"),
        (lambda: padded(mask=MASK.T), r"mask has shape \(4, 3\)"),
        (
            lambda: TokenBatch.from_packed(*[LOGP[0]] * 3, MASK[0], torch.tensor([0, 3])),
            "from 0 to the 4 tokens.*2 numbers from 0 to 3",
        ),
        (
            lambda: TokenBatch.from_packed(*[LOGP[0]] * 3, MASK[0], torch.tensor([0, 5, 4])),
            "must rise",
        ),
    ],
    ids=["lanes", "dims", "advantage", "transposed", "short", "falling"],
)
def test_what_does_not_fit_is_one_sentence(make, says):
    """Shapes and lengths are named with what they should be."""
    with pytest.raises(ValueError, match=says) as error:
        make()
    assert "\n" not in str(error.value)


def test_repr_is_one_short_line():
    """Sizes and names, no numbers."""
    text = repr(padded(reward=ADVANTAGE))
    assert text == "TokenBatch((12,), 6 active, 3 responses, float32, reward, position)"
