"""Adapters of trainers that do not run on a CPU, against harnesses of the signatures that those document.

A harness calls the adapter as the trainer does, in pieces as the trainer cuts them, and adds the results up
as the trainer does. The loss must be PPO's written out here, or the method on the whole batch.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from simlab import TokenBatch, bind
from simlab.adapters import openrlhf, prime_rl, skyrl, slime, tinker
from simlab.contract.batches import on_ranks

ROOT = Path(__file__).parents[2]
LENGTHS = (6, 3, 1, 4)


def rollouts(seed=0):
    """One dict a response: logp (of the trainer, no gradient), logp_mu, logp_prox, advantage, mask, in float64."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for i, n in enumerate(LENGTHS):
        mu = -2 * torch.rand(n, generator=g, dtype=torch.float64)
        step = 0.4 * torch.randn(2, n, generator=g, dtype=torch.float64)
        mask = torch.ones(n, dtype=torch.bool)
        mask[:1] = n < 4  # tokens of a tool
        out.append({
            "logp": (mu + step[0]).clamp(max=0), "logp_mu": mu, "logp_prox": (mu + 0.5 * step[1]).clamp(max=0),
            "advantage": torch.full((n,), (1.0, -0.5, 2.0, -1.5)[i]).double(), "mask": mask,
        })  # fmt: skip
    return out


def ppo(logp: Tensor, row: dict, high: float = 0.2) -> Tensor:
    """PPO's loss of one response, summed over its mask: written out."""
    r = (logp - row["logp_mu"]).exp()
    each = torch.max(-r * row["advantage"], -r.clamp(0.8, 1 + high) * row["advantage"])
    return each[row["mask"]].sum()


def padded(rows, name):
    """`[B, T]`; what pads is never read, so it is NaN."""
    fill = False if name == "mask" else torch.nan
    out = torch.full((len(rows), max(LENGTHS)), fill, dtype=rows[0][name].dtype)
    for i, row in enumerate(rows):
        out[i, : len(row[name])] = row[name]
    return out


def whole(spec, rows):
    """(minus the sum of S, gradient by response) of a method on the whole batch."""
    leaves = [row["logp"].clone().requires_grad_() for row in rows]
    joined = {k: torch.cat([row[k] for row in rows]) for k in rows[0] if k != "logp"}
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    b = TokenBatch.from_packed(torch.cat(leaves), cu_seqlens=starts, **joined)
    loss = -bind(spec)(b).S.sum()
    loss.backward()
    return loss.item(), [x.grad for x in leaves]


def test_skyrl_sums_over_micro_batches():
    """Two micro-batches of two rows; loss_mask of numbers; PPO with DAPO's radius, against its formula."""
    rows = rollouts()
    loss_fn = skyrl.policy_loss("dapo=ppo:eps_high=0.28")
    total, seen = 0.0, []
    for part in (rows[:2], rows[2:]):
        logp = padded(part, "logp").requires_grad_()
        mask = padded(part, "mask").long()
        loss, metrics = loss_fn(
            log_probs=logp, old_log_probs=padded(part, "logp_prox"), advantages=padded(part, "advantage"),
            config=None, loss_mask=mask, rollout_logprobs=padded(part, "logp_mu"),
        )  # fmt: skip
        loss.backward()
        total += loss.item()
        assert {type(x) for x in metrics.values()} == {float}
        seen += list(logp.grad)
    leaves = [row["logp"].clone().requires_grad_() for row in rows]
    want = sum(ppo(x, row, 0.28) for x, row in zip(leaves, rows, strict=True))
    want.backward()
    assert total == pytest.approx(want.item())
    for got, leaf in zip(seen, leaves, strict=True):
        torch.testing.assert_close(got[: len(leaf)], leaf.grad)


def test_skyrl_registers_under_the_label(monkeypatch):
    """In SkyRL's registry, by (name, function)."""
    known = {}
    registry = SimpleNamespace(register=known.__setitem__)
    module = SimpleNamespace(PolicyLossRegistry=registry)
    for name in (
        "skyrl",
        "skyrl.backends",
        "skyrl.backends.skyrl_train",
        "skyrl.backends.skyrl_train.utils",
    ):
        monkeypatch.setitem(__import__("sys").modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(
        __import__("sys").modules, "skyrl.backends.skyrl_train.utils.ppo_utils", module
    )
    assert skyrl.register("mine=gspo+tis") == "mine"
    assert list(known) == ["mine"]


@pytest.mark.parametrize(
    "counts", [{}, {"dp_size": 2, "batch_num_tokens": 20, "global_batch_size": 8}]
)
def test_openrlhf_averages_over_tokens(counts):
    """PolicyLoss's call with keyword arguments; the mean over this call's tokens, or by the global count."""
    rows = rollouts(1)
    module = openrlhf.StabilizedPolicyLoss("ppo")
    logp = padded(rows, "logp").requires_grad_()
    loss, cut, moved, engine = module(
        logp, padded(rows, "logp_prox"), padded(rows, "advantage"), action_mask=padded(rows, "mask"),
        rollout_log_probs=padded(rows, "logp_mu"), **counts,
    )  # fmt: skip
    want = sum(ppo(row["logp"], row) for row in rows).item()
    own = sum(int(row["mask"].sum()) for row in rows)
    assert loss.item() == pytest.approx(want / (10 if counts else own))
    means = [
        sum((row[x] - row[y])[row["mask"]].sum().item() for row in rows) / own
        for x, y in (("logp_prox", "logp"), ("logp_mu", "logp_prox"))
    ]
    assert [moved.item(), engine.item()] == pytest.approx(means)
    assert 0 <= cut.item() < 1
    assert module.diagnostics["clip_high"] >= 0
    loss.backward()
    assert logp.grad.isfinite().all()


@pytest.mark.parametrize("spec", ["ppo", "gspo", "icepop:proximal=mu"])
def test_prime_rl_adds_sequences_up(spec):
    """LossInputs of one sequence at a time, loss as a sum; sequence methods have the whole response."""
    rows = rollouts(2)
    if spec.startswith("icepop"):
        with pytest.raises(ValueError, match="prime-rl hands a loss no logp_prox"):
            prime_rl.loss_of("icepop")
        return
    loss_fn, total = prime_rl.loss_of(spec), 0.0
    want, grads = whole(spec, rows)
    for row, grad in zip(rows, grads, strict=True):
        logp = row["logp"].clone().requires_grad_()
        inputs = SimpleNamespace(
            trainer_logprobs=logp, inference_logprobs=row["logp_mu"], ref_logprobs=None,
            advantages=row["advantage"], loss_mask=row["mask"], loss_weights=None,
        )  # fmt: skip
        out = loss_fn(inputs)
        out.loss.backward()
        total += out.loss.item()
        assert all(x.dim() == 0 for x in out.metrics.values())
        torch.testing.assert_close(logp.grad, grad)
    assert total == pytest.approx(want)


def test_tinker_sends_q_along():
    """One call has the exact q; two calls have it by stats_of; without it each would take its own."""
    rows = rollouts(3)
    given = [{k: x for k, x in row.items() if k not in ("logp", "logp_prox")} for row in rows]
    want, grads = whole("sat", rows)
    leaves = [row["logp"].clone().requires_grad_() for row in rows]
    loss, metrics = tinker.loss_of("sat", given)([None] * 4, leaves)
    loss.backward()
    assert loss.item() == pytest.approx(want)
    assert {type(x) for x in metrics.values()} == {float}
    for leaf, grad in zip(leaves, grads, strict=True):
        torch.testing.assert_close(leaf.grad, grad)
    stats = tinker.stats_of("sat", [x.detach() for x in leaves], given)
    parts = [
        tinker.loss_of("sat", given[i:j], stats=stats, count=2.0)([None] * 2, leaves[i:j])[0].item()
        for i, j in ((0, 2), (2, 4))
    ]
    assert 2 * sum(parts) == pytest.approx(want)


class Slime:
    """slime's side: a rank's rollout data, its sum_of_sample_mean, and log-probs straight from the logits."""

    def __init__(self, rows):
        self.rows = rows

    def data(self):
        """The keys that the hook and the loss receive, lists of a tensor a response."""
        names = {
            "log_probs": "logp_prox",
            "rollout_log_probs": "logp_mu",
            "advantages": "advantage",
        }
        found = {key: [row[name] for row in self.rows] for key, name in names.items()}
        return found | {"loss_masks": [row["mask"].int() for row in self.rows]}

    def mean(self, x: Tensor) -> Tensor:
        """Sum over responses of the mean over their mask."""
        lengths = [len(row["mask"]) for row in self.rows]
        pairs = zip(x.split(lengths), self.rows, strict=True)
        return sum(
            (part * row["mask"]).sum() / row["mask"].sum().clamp(min=1) for part, row in pairs
        )


def test_slime_has_q_of_all_ranks():
    """Two ranks, a hook each, then a micro-batch a response: SAT with the q of the whole rollout."""
    rows = [row | {"logp_prox": row["logp"]} for row in rollouts(4)]  # one step a rollout
    ranks = [Slime(rows[:2]), Slime(rows[2:])]

    def log_probs(logits, args, data):
        return [logits]

    def hook(i, reduce):
        method = slime.Method("sat", log_probs, reduce)
        method.before_training(None, 0, ranks[i].data())
        return method

    one, two = on_ranks(2, hook)
    alone = slime.Method("sat", log_probs, lambda x: x)
    alone.before_training(None, 0, Slime(rows).data())
    assert one.stats["q"] == two.stats["q"] == alone.stats["q"]
    total = 0.0
    for row, method in zip(rows, (one, one, two, two), strict=True):
        logits = row["logp"].clone().requires_grad_()
        part = Slime([row])
        loss, logged = method.loss(None, part.data(), logits, part.mean)
        loss.backward()
        total += loss.item()
        assert not any(x.requires_grad for x in logged.values())
    b = slime.batch([row["logp"] for row in rows], Slime(rows).data())
    assert total == pytest.approx(-Slime(rows).mean(bind("sat")(b).S).item())
    with pytest.raises(ValueError, match="--rollout-data-postprocess-path"):
        slime.Method("sat", log_probs).loss(None, ranks[0].data(), torch.zeros(1), ranks[0].mean)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: skyrl.policy_loss("sat"), 'SkyRL hands a loss a part of it; whole_batch="micro"'),
        (
            lambda: prime_rl.loss_of("m2po"),
            'prime-rl hands a loss a part of it; whole_batch="micro"',
        ),
        (lambda: openrlhf.StabilizedPolicyLoss("estr"), "OpenRLHF hands a loss no entropy_mu"),
        (lambda: slime.Method("estr"), "slime hands a loss no entropy_mu"),
        (lambda: tinker.loss_of("ppo+icepop:denominator=drop", []), "cannot leave its denominator"),
        (lambda: tinker.loss_of("ppo", [{}])([], []), "0 data and 1 rollouts"),
        (
            lambda: skyrl.policy_loss("ppo")(torch.zeros(1, 1), None, torch.zeros(1, 1)),
            "no rollout_logprobs",
        ),
        (
            lambda: slime.batch([torch.zeros(2)], {"loss_masks": [torch.ones(3)]}),
            "context parallelism must be 1",
        ),
    ],
)
def test_what_a_trainer_lacks_is_a_sentence(make, says):
    """And names the cure where there is one."""
    with pytest.raises(ValueError, match=says):
        make()


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/plug_in.md").read_text(), re.DOTALL)
LIGHT = [x for x in BLOCKS if re.search(r"adapters\.(slime|prime_rl|openrlhf|tinker)", x)]


@pytest.mark.parametrize("code", LIGHT)
def test_the_snippets_of_the_page_run(code):
    """Those of trainers that need not be installed for it."""
    exec(code, {})


def test_there_is_a_snippet_for_each():
    """slime, prime-rl, OpenRLHF, Tinker."""
    assert len(LIGHT) == 4
