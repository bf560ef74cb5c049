"""Log-prob, entropy and Gini index against log_softmax: values, gradients, memory, shards."""

import math

import pytest
import torch
from batches import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from simlab.core import logits as module
from simlab.core.logits import VocabShard, token_log_probs

V = 11


def reference(logits, token, temperature=1.0):
    """log-prob, entropy and Gini index by log_softmax of the whole batch."""
    log_p = torch.log_softmax(logits / temperature, -1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0).sum(-1)
    return log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1), entropy, 1 - p.square().sum(-1)


def draw(*shape, seed=0, dtype=torch.float64, size=2.0):
    """Logits `[*shape]` and one token for each row."""
    g = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(shape, generator=g, dtype=torch.float64)
    return logits.to(dtype), torch.randint(shape[-1], shape[:-1], generator=g)


def gradient(score, logits, token, *, by_entropy=True, seed=1):
    """Values of `score`, and the gradient of a random combination of log-prob and entropy."""
    logits = logits.detach().requires_grad_()
    logp, entropy, gini, *_ = score(logits, token)
    g = torch.randn(2, *logp.shape, generator=torch.Generator().manual_seed(seed)).to(logp.dtype)
    loss = (g[0] * logp).sum() + ((g[1] * entropy).sum() if by_entropy else 0)
    (grad,) = torch.autograd.grad(loss, logits)
    return (logp, entropy, gini), grad


def everything(logits, token, **options):
    return token_log_probs(logits, token, entropy=True, gini=True, **options)[:3]


LAYOUTS = {
    "rows": draw(7, V),
    "one row": draw(V),
    "batch": draw(3, 5, V),
    "shifted": tuple(x[:, 1:] for x in draw(3, 6, V)),
    "time first": tuple(x.transpose(0, 1) for x in draw(5, 3, V)),
    "every other": tuple(x[:, ::2, 0] for x in draw(3, 6, 2, V)),
    "columns apart": (draw(3, 5, 2 * V)[0][..., ::2], draw(3, 5, V)[1]),
    "columns last": (draw(V, 7)[0].T, draw(7, V)[1]),
    "repeated": (draw(1, V)[0].expand(6, V), draw(6, V)[1]),
}


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_log_softmax(layout, rows, monkeypatch):
    """Values and gradients do not depend on strides, nor on where the rows are cut."""
    monkeypatch.setattr(module, "BLOCK_BYTES", rows * 8 * V)
    logits, token = LAYOUTS[layout]
    values, grad = gradient(everything, logits, token)
    wanted, wanted_grad = gradient(reference, logits, token)
    torch.testing.assert_close(values, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-12, atol=1e-12)


def test_blocks_follow_the_byte_budget(monkeypatch):
    """As many rows as fit in the numbers' own width, one at least."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 8 * V * 3 + 1)
    sizes = {torch.float64: 3, torch.float32: 6, torch.bfloat16: 6}
    for dtype, rows in sizes.items():
        assert module._block_rows(torch.empty(9, V, dtype=dtype)) == rows
    assert module._block_rows(torch.empty(9, 1000)) == 1


def test_by_hand():
    """p = (1/2, 1/4, 1/4): H = 1.5 ln 2, Gini 5/8, gradients (-1/2, 3/4, -1/4) and ln 2 (1, -1/2, -1/2)/4."""
    logits = torch.tensor([math.log(0.5), math.log(0.25), math.log(0.25)], dtype=torch.float64)
    logits = (7 + 2 * logits).requires_grad_()
    out = token_log_probs(logits, torch.tensor(1), temperature=2.0, entropy=True, gini=True)
    log2 = math.log(2)
    assert [x.item() for x in out[:3]] == pytest.approx([-2 * log2, 1.5 * log2, 0.625], rel=1e-14)
    (grad,) = torch.autograd.grad(out.logp, logits, retain_graph=True)
    assert grad.tolist() == pytest.approx([-0.25, 0.375, -0.125], rel=1e-14)
    (grad,) = torch.autograd.grad(out.entropy, logits)
    # -p (log p + H) / 2, where log p + H = ln 2 (1/2, -1/2, -1/2)
    assert grad.tolist() == pytest.approx([-log2 / 8, log2 / 16, log2 / 16], rel=1e-14)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
@pytest.mark.parametrize("entropy", [False, True])
def test_gradcheck(temperature, entropy, monkeypatch):
    """Derivatives equal finite differences, at every temperature."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 2 * 8 * V)
    logits, token = draw(5, V)
    options = {"temperature": temperature, "entropy": entropy}

    def score(x):
        out = token_log_probs(x, token, **options)
        return (out.logp, out.entropy) if entropy else out.logp

    assert torch.autograd.gradcheck(score, logits.requires_grad_())


@pytest.mark.parametrize("temperature", [0.3, 2.5])
def test_temperature(temperature):
    """As log_softmax of logits / temperature."""
    logits, token = draw(4, 3, V)
    out = gradient(lambda x, y: everything(x, y, temperature=temperature), logits, token)
    wanted = gradient(lambda x, y: reference(x, y, temperature), logits, token)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


def test_only_what_is_asked_for():
    """None for the rest; the same log-prob and gradient either way; no gradient through Gini."""
    logits, token = draw(6, V)
    plain = token_log_probs(logits, token)
    assert plain.entropy is None
    assert plain.gini is None
    _, alone = gradient(token_log_probs, logits, token, by_entropy=False)
    full, beside = gradient(everything, logits, token, by_entropy=False)
    assert torch.equal(plain.logp, full[0])
    assert torch.equal(alone, beside)
    assert full[1].requires_grad
    assert not full[2].requires_grad
    only = token_log_probs(logits, token, gini=True)
    assert only.entropy is None
    assert torch.equal(only.gini, full[2])


def test_entropy_alone_has_a_gradient():
    """The entropy bonus of a loss that reads no log-prob."""
    logits, token = draw(6, V)
    grads = []
    for score in (everything, reference):
        x = logits.clone().requires_grad_()
        grads += torch.autograd.grad(score(x, token)[1].sum(), x)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, monkeypatch):
    """Widened block by block: float32 numbers, and the float32 gradient rounded once."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 2 * 4 * V)
    logits, token = draw(7, V, dtype=dtype)
    for by_entropy in (False, True):
        values, grad = gradient(everything, logits, token, by_entropy=by_entropy)
        wide, wide_grad = gradient(everything, logits.float(), token, by_entropy=by_entropy)
        assert all(x.dtype == torch.float32 for x in values)
        assert all(torch.equal(x, y) for x, y in zip(values, wide, strict=True))
        assert grad.dtype == dtype
        assert torch.equal(grad, wide_grad.to(dtype))


def test_float32_error():
    """Within 2e-6 nats of float64 on a vocabulary of 50,000."""
    logits, token = draw(16, 50_000, dtype=torch.float32, size=3.0)
    token[:8] = logits[:8].argmax(-1)  # likely tokens too
    values, grad = gradient(everything, logits, token)
    wanted, wanted_grad = gradient(reference, logits.double(), token)
    for x, y in zip(values, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=2e-6)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=2e-5, atol=1e-9)


# ---------------------------------------------------------------- far and forbidden tokens
@pytest.mark.parametrize("gap", [0, 20, 27, 28, 60, 90, 400, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_largest_logit_far_above_the_token(gap, dtype, monkeypatch):
    """Exact whether the given token is a good shift or so far down that exp would overflow."""
    monkeypatch.setattr(module, "FIRST", 3)
    logits, token = draw(5, V, dtype=dtype)
    token.clamp_(max=5)
    logits[1:4, 8] += gap
    values, grad = gradient(everything, logits, token)
    wanted, wanted_grad = gradient(reference, logits.double(), token)
    error = 2e-6 if dtype == torch.float32 else 1e-12
    for x, y in zip((*values, grad), (*wanted, wanted_grad), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=error, atol=error)


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch):
    """Bit for bit the numbers of the row alone, also where some rows need another shift."""
    monkeypatch.setattr(module, "FIRST", 3)
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 3000 * 4)
    logits, token = draw(9, 3000, dtype=torch.float32)
    token.clamp_(max=5)
    logits[4:6, 8] += 40
    together = everything(logits, token)
    for i in range(9):
        for whole, alone in zip(together, everything(logits[i], token[i]), strict=True):
            assert torch.equal(whole[i], alone)


def peaked(monkeypatch):
    """float32 rows ruled by one token, 10 to 60 nats above the given one and the first columns."""
    monkeypatch.setattr(module, "FIRST", 3)
    logits, token = draw(400, V, dtype=torch.float32)
    logits[:, 8] += torch.linspace(10, 60, 400)
    return logits, token.clamp(max=5)


def test_entropy_of_peaked_rows(monkeypatch):
    """Within 5e-6 nats of float64, and within 1e-7 where the largest logit is the shift."""
    logits, token = peaked(monkeypatch)
    entropy = token_log_probs(logits, token, entropy=True).entropy.double()
    wanted = reference(logits.double(), token)[1]
    torch.testing.assert_close(entropy, wanted, rtol=0, atol=5e-6)
    torch.testing.assert_close(entropy[120:], wanted[120:], rtol=0, atol=1e-7)


def test_entropy_is_never_negative(monkeypatch):
    """Not by rounding either, were the shift as low as can be."""
    logits, token = peaked(monkeypatch)
    monkeypatch.setattr(module, "SAFE", 2.0**60)
    assert token_log_probs(logits, token, entropy=True).entropy.min() == 0


@pytest.mark.parametrize("rows", [1, 100])
def test_forbidden_tokens(rows, monkeypatch):
    """Columns of -inf change nothing: the rest is a vocabulary of its own, gradient 0 on them."""
    monkeypatch.setattr(module, "BLOCK_BYTES", rows * 8 * V)
    logits, token = draw(6, V)
    keep = torch.tensor([1, 2, 5, 9])
    masked = torch.full_like(logits, -torch.inf)
    masked[:, keep] = logits[:, keep]
    values, grad = gradient(everything, masked, keep[token % 4])
    wanted, wanted_grad = gradient(reference, logits[:, keep], token % 4)
    torch.testing.assert_close(values, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad[:, keep], wanted_grad, rtol=1e-12, atol=1e-12)
    assert grad.count_nonzero() == grad[:, keep].count_nonzero()


def test_one_token_left():
    """A distribution on one token: log-prob, entropy and Gini index 0, no gradient."""
    logits = torch.full((2, V), -torch.inf)
    logits[:, 4] = 3.0
    values, grad = gradient(everything, logits, torch.tensor([4, 4]))
    assert torch.equal(torch.stack(values), torch.zeros(3, 2))
    assert grad.count_nonzero() == 0


@pytest.mark.parametrize("first", [1, 3, V])
def test_given_token_is_forbidden(first, monkeypatch):
    """logp = -inf; the gradient is 1 - 0 there and -p elsewhere; other rows do not notice."""
    monkeypatch.setattr(module, "FIRST", first)
    logits, token = draw(3, V)
    token[1] = 7
    logits[1, [0, 1, 2, 7]] = -torch.inf
    x = logits.clone().requires_grad_()
    logp, entropy, _ = everything(x, token)
    assert logp[1] == -torch.inf
    torch.testing.assert_close(entropy, reference(logits, token)[1])
    (grad,) = torch.autograd.grad(logp.sum(), x)
    wanted = torch.nn.functional.one_hot(token, V) - logits.softmax(-1)
    torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)


def test_rows_that_are_no_distribution():
    """Only -inf, or a NaN: NaN on that row alone, and gradient 0 there unless it is asked for."""
    logits, token = draw(4, V)
    logits[1] = -torch.inf
    logits[2, 3] = torch.nan
    x = logits.clone().requires_grad_()
    out = everything(x, token)
    for value in out:
        assert value.isnan().tolist() == [False, True, True, False]
    asked = torch.tensor([True, False, False, True])
    for value in out[:2]:
        loss = torch.where(asked, value, 0).sum()
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert grad[~asked].count_nonzero() == 0
        assert grad.isfinite().all()
        assert grad[asked].count_nonzero() == 2 * V
        (grad,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
        assert grad.isnan().any(-1).tolist() == [False, True, True, False]


# ---------------------------------------------------------------- more tokens of a row
HEAD = torch.tensor([[0, 3, -1, 8], [2, 1, 7, 7], [-1, -1, -1, -1], [5, 0, 4, 6]])


def with_head(x, token, head=HEAD, **options):
    """Log-prob, entropy and Gini index, and the log-probs of the head."""
    return token_log_probs(x, token, head=head, entropy=True, gini=True, **options)


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_a_head_is_log_softmax(rows, monkeypatch):
    """Values and gradients of every column, a token twice among them; -1 is -inf without gradient."""
    monkeypatch.setattr(module, "_block_rows", lambda logits: rows)
    logits, token = draw(4, V)
    x, y = (logits.clone().requires_grad_() for _ in range(2))
    out, log_p = with_head(x, token, temperature=0.7), torch.log_softmax(y / 0.7, -1)
    want = log_p.gather(-1, HEAD.clamp(min=0))
    there = HEAD >= 0
    torch.testing.assert_close(out.head[there], want[there], rtol=1e-12, atol=1e-12)
    assert (out.head[~there] == -torch.inf).all()
    weight = torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4)
    loss = out.logp.sum() + out.entropy.sum() + torch.where(there, weight * out.head, 0).sum()
    entropy = -(log_p.exp() * log_p).sum()
    own = log_p.gather(-1, token.unsqueeze(-1)).sum()
    (own + entropy + torch.where(there, weight * want, 0).sum()).backward()
    loss.backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)


def test_a_head_changes_no_other_bit():
    """Log-prob, entropy and Gini index; a gradient on a token of -1 goes nowhere."""
    logits, token = draw(4, V, dtype=torch.float32)
    x = logits.requires_grad_()
    out, plain = with_head(x, token), everything(x, token)
    for got, want in zip(out[:3], plain, strict=True):
        assert torch.equal(got, want)
    (grad,) = torch.autograd.grad(out.head, x, torch.where(HEAD < 0, torch.nan, 0.0))
    assert not grad.any()


@pytest.mark.parametrize("cuts", [[], [4], [1, 5, 8]])
def test_a_head_over_ranks(cuts):
    """Whichever rank holds a token of the head; still one maximum and one sum."""
    logits, token = draw(4, V)
    want = with_head(logits, token)
    bounds = [0, *cuts, V]

    def work(rank, reduce):
        own_sizes = []

        def reduce_max(x):
            own_sizes.append(x.numel())
            each = torch.zeros(len(bounds) - 1, *x.shape, dtype=x.dtype)
            each[rank] = x
            return reduce(each).amax(0)

        shard = VocabShard(bounds[rank], reduce_max, reduce)
        x = logits[..., bounds[rank] : bounds[rank + 1]].clone().requires_grad_()
        out = with_head(x, token, parallel=shard)
        torch.where(HEAD >= 0, out.head, 0).sum().backward()
        assert own_sizes == [4 * (2 + 4)]
        return out.head.detach(), x.grad

    x = logits.clone().requires_grad_()
    torch.where(HEAD >= 0, with_head(x, token).head, 0).sum().backward()
    for rank, (head, grad) in enumerate(on_ranks(len(bounds) - 1, work)):
        torch.testing.assert_close(head, want.head.detach(), rtol=1e-12, atol=1e-12)
        piece = x.grad[:, bounds[rank] : bounds[rank + 1]]
        torch.testing.assert_close(grad, piece, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head", [HEAD[:3], HEAD.int(), HEAD.clone().fill_(V), HEAD - 2])
def test_a_head_that_does_not_fit(head):
    """Shape, dtype and range are named."""
    logits, token = draw(4, V)
    with pytest.raises(ValueError, match="head must"):
        with_head(logits, token, head=head)


# ---------------------------------------------------------------- vocabulary over ranks
def over_ranks(logits, token, cuts, by_entropy=True, **options):
    """Values and gradient of every rank, and the sizes of what it sent in forward and in all."""
    bounds = [0, *cuts, logits.shape[-1]]
    ranks = len(bounds) - 1

    def work(rank, reduce):
        sent = []

        def reduce_sum(x):
            sent.append(x.numel())
            return reduce(x)

        def reduce_max(x):
            sent.append(x.numel())
            own = torch.zeros(ranks, *x.shape, dtype=x.dtype)
            own[rank] = x
            return reduce(own).amax(0)

        shard = VocabShard(bounds[rank], reduce_max, reduce_sum)
        forward = []

        def score(x, y):
            out = everything(x, y, parallel=shard, **options)
            forward.extend(sent)
            return out

        columns = logits[..., bounds[rank] : bounds[rank + 1]]
        values, grad = gradient(score, columns, token, by_entropy=by_entropy)
        return values, grad, forward, sent

    return on_ranks(ranks, work)


@pytest.mark.parametrize("cuts", [[], [4], [1, 5, 8]])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_shards_equal_the_whole(cuts, temperature):
    """Every rank has the numbers of the whole vocabulary and its slice of the gradient."""
    logits, token = draw(3, 5, V)
    logits[0, 0, :5] += 300  # one rank outweighs the others, whichever holds the token
    logits[0, 1, 8:] += 300
    logits[1, :, 4:] = -torch.inf  # nothing to draw on some ranks
    token[1] = 2
    logits[2, 0] = -torch.inf
    logits[2, 0, 5], token[2, 0] = 1.0, 5
    (values, grad) = gradient(lambda x, y: everything(x, y, temperature=temperature), logits, token)
    bounds = [0, *cuts, V]
    found = over_ranks(logits, token, cuts, temperature=temperature)
    assert len(found) == len(bounds) - 1
    for rank, (shard_values, shard_grad, *_) in enumerate(found):
        torch.testing.assert_close(shard_values, values, rtol=1e-12, atol=1e-12)
        piece = grad[..., bounds[rank] : bounds[rank + 1]]
        torch.testing.assert_close(shard_grad, piece, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_in_float32(dtype):
    """Within 1e-6 nats of the unsharded numbers on a vocabulary of 5,000."""
    logits, token = draw(40, 5000, dtype=dtype)
    values, grad = gradient(everything, logits, token)
    bounds = [0, 1250, 2500, 3750, 5000]
    for rank, found in enumerate(over_ranks(logits, token, bounds[1:-1])):
        torch.testing.assert_close(found[0], values, rtol=1e-7, atol=1e-6)
        piece = grad[:, bounds[rank] : bounds[rank + 1]]
        error = {"rtol": 1e-5, "atol": 1e-8} if dtype == torch.float32 else {}
        torch.testing.assert_close(found[1], piece, **error)


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_shards_send_five_numbers_a_row(block, monkeypatch):
    """Two reductions however many blocks there are, and none in the backward."""
    monkeypatch.setattr(module, "BLOCK_BYTES", block)
    logits, token = draw(3, 5, V)
    for _, _, forward, sent in over_ranks(logits, token, [4]):
        assert forward == [2 * 15, 3 * 15]
        assert sent == forward


def test_token_that_no_rank_holds():
    """-inf instead of an error (another rank may hold it) or of a plausible number."""
    logits, token = draw(4, V)
    token[1], token[2] = -100, V
    for values, grad, *_ in over_ranks(logits, token, [4], by_entropy=False):
        assert values[0].isneginf().tolist() == [False, True, True, False]
        assert grad.isfinite().all()


# ---------------------------------------------------------------- memory
class Storages(TorchDispatchMode):
    """Bytes of every storage that an operation returns, by address, but for `known` tensors."""

    def __init__(self, *known):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.made.append((storage.nbytes(), storage.data_ptr()))
        return out


def made(score, logits, token):
    """Storages made by forward and by backward, and the gradient."""
    x = logits.detach().requires_grad_()
    with Storages(x) as forward:
        out = score(x, token)
        loss = sum(value.sum() for value in out if value is not None and value.requires_grad)
    with Storages(x) as backward:
        (grad,) = torch.autograd.grad(loss, x)
    return forward.made, backward.made, grad


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, 1:], lambda x: x.transpose(0, 1)])
@pytest.mark.parametrize("options", [{}, {"entropy": True, "gini": True, "temperature": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_tensor_of_the_size_of_the_logits(dtype, options, view, monkeypatch):
    """But the gradient: nothing larger than two blocks in the forward, nor beside it in the backward."""
    block = 2 * 1000 * 8
    monkeypatch.setattr(module, "BLOCK_BYTES", block)
    logits, token = (view(x) for x in draw(8, 9, 1000, dtype=dtype))
    forward, backward, grad = made(lambda x, y: token_log_probs(x, y, **options), logits, token)
    assert forward
    assert max(forward)[0] <= 2 * block
    own = grad.untyped_storage()
    assert own.nbytes() == logits.numel() * logits.element_size()
    assert (own.nbytes(), own.data_ptr()) in backward
    assert max(n for n, address in backward if address != own.data_ptr()) <= 2 * block


def test_the_memory_hook_sees_log_softmax():
    """The check can fail: the reference makes tensors as large as the logits in both directions."""
    logits, token = draw(8, 9, 1000)
    forward, backward, grad = made(lambda *x: reference(*x)[:1], logits, token)
    size = logits.numel() * logits.element_size()
    own = grad.untyped_storage().data_ptr()
    assert max(forward)[0] == size
    assert max(n for n, address in backward if address != own) == size


def test_logits_are_saved_and_not_copied():
    """What waits for the backward is the logits themselves and a few numbers a row."""
    logits, token = draw(40, 1000)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        everything(logits.requires_grad_(), token)
    large = [x for x in saved if x.numel() > 1000]
    assert [x.data_ptr() for x in large] == [logits.data_ptr()]
    assert sum(x.numel() for x in saved) <= logits.numel() + 6 * 40


def test_change_of_the_logits_before_the_backward_is_caught():
    """As for torch's own functions: an error and not a wrong gradient."""
    logits, token = draw(3, V)
    x = logits.requires_grad_() * 1
    out = token_log_probs(x, token)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.logp.sum().backward()


# ---------------------------------------------------------------- edges
@pytest.mark.parametrize("shape", [(0, V), (0, 3, V), (3, 0, V)])
def test_zero_rows(shape):
    """Empty numbers and an empty gradient, on ranks too."""
    logits, token = draw(*shape)
    values, grad = gradient(everything, logits, token)
    assert [x.shape for x in values] == 3 * [shape[:-1]]
    assert grad.shape == shape
    for values, grad, *_ in over_ranks(logits, token, [4]):
        assert [x.shape for x in values] == 3 * [shape[:-1]]
        assert grad.shape[:-1] == shape[:-1]


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperature_must_be_finite_and_positive(temperature):
    """ValueError that names it."""
    with pytest.raises(ValueError, match=f"temperature must be .* got {temperature}"):
        token_log_probs(*draw(2, V), temperature=temperature)


@pytest.mark.parametrize("wrong", [-1, -100, V])
def test_token_out_of_range(wrong):
    """ValueError that names the range and the token."""
    logits, token = draw(2, 3, V)
    token[1, 2] = wrong
    with pytest.raises(ValueError, match=rf"token must lie in \[0, {V}\), got {wrong}"):
        token_log_probs(logits, token)


def test_shapes_and_dtypes_that_do_not_fit():
    """ValueError that shows both."""
    logits, token = draw(2, 3, V)
    with pytest.raises(ValueError, match=r"got \(2, 3, 11\) and \(2,\)"):
        token_log_probs(logits, token[:, 0])
    with pytest.raises(ValueError, match=r"got \(\) and \(\)"):
        token_log_probs(torch.tensor(1.0), torch.tensor(0))
    with pytest.raises(ValueError, match="float64 and torch"):
        token_log_probs(logits, token.int())
    with pytest.raises(ValueError, match="int64 and torch"):
        token_log_probs(logits.long(), token)


def test_no_second_derivative():
    """An error and not a silent zero."""
    logits, token = draw(2, V)
    x = logits.requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(token_log_probs(x, token).logp.sum(), x, create_graph=True)


def test_inside_a_compiled_model(monkeypatch):
    """The same numbers and gradients, and no block of rows ever enters a graph."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 1)
    logits, token = draw(30, V)
    sizes = []

    def backend(graph, _):
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    def model(x, y):
        logp, entropy, gini = everything(x.sin(), y)
        return logp * 2, entropy, gini

    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(
        gradient(compiled, logits, token), gradient(model, logits, token), rtol=1e-12, atol=1e-12
    )
    assert 0 < sum(sizes) < 20
