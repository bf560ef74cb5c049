"""The adapters inside the trainers they are for: the trainer's own call, and its own loss beside ours."""

import pytest
import torch
import verl.trainer.ppo.core_algos as core
from datasets import Dataset
from pairs import HORIZON
from peers import actor
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from simlab import bind
from simlab.adapters.trl import StabilizedGRPOTrainer
from simlab.adapters.verl import policy_loss, register

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    """What is registered here is not verl's own, which test_suite.py reads."""
    monkeypatch.setattr(core, "POLICY_LOSS_REGISTRY", dict(core.POLICY_LOSS_REGISTRY))


def tensors(seed=0, rows=4, columns=6):
    """(old, new with gradient, advantages, mask) `[B, T]` in float64, the mask ragged and of whole numbers."""
    g = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(rows, columns, generator=g, dtype=torch.float64)
    new = (old + 0.4 * torch.randn(rows, columns, generator=g, dtype=torch.float64)).clamp(max=0)
    advantages = torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, columns)
    mask = (torch.arange(columns) < torch.tensor([[6], [3], [1], [4]])).long()
    return old, new.requires_grad_(), advantages, mask


def called(name, mode, weights=None, counts=None):
    """(loss, gradient, metrics) of verl's registered loss, called as its worker calls it."""
    old, new, advantages, mask = tensors()
    config = actor()
    config.global_batch_info.update({"loss_scale_factor": HORIZON} | (counts or {}))
    loss, metrics = core.get_policy_loss_fn(name)(
        old_log_prob=old,
        log_prob=new,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    return loss.item(), new.grad, metrics


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "counts", [None, {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 9}]
)
def test_verl_vanilla_is_ppo_with_its_dual_clip(mode, counts):
    """Value and gradient of verl's own loss, in each of its aggregations, with its global counts."""
    name = register("ppo:dual_clip=3")
    loss, grad, _ = called(name, mode, counts=counts)
    expected, slope, _ = called("vanilla", mode, counts=counts)
    assert loss == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(grad, slope, rtol=1e-9, atol=1e-12)


def test_verl_hands_over_mu_in_the_weights():
    """ppo+tis with weights exp(old - mu) that nothing has truncated is verl's loss with truncated ones."""
    ratio = torch.linspace(-1, 2, 24, dtype=torch.float64).view(4, 6).exp()
    name = register("ours=ppo:dual_clip=3,proximal=batch+tis:cap=2", mu="weights")
    loss, grad, metrics = called(name, "token-mean", ratio)
    expected, slope, _ = called("vanilla", "token-mean", ratio.clamp(max=2))
    assert loss == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(grad, slope, rtol=1e-9, atol=1e-12)
    assert 0 < metrics["actor/clip_high"] < 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: policy_loss(bind("estr")), "hands a loss no entropy_mu"),
        (lambda: policy_loss(bind("icepop")), 'logp_prox; mu="weights" has the proximal'),
        (lambda: policy_loss(bind("sat")), 'whole_batch="micro"'),
        (lambda: called(register("plain=ppo"), "token-mean", torch.ones(4, 6)), "mu='weights'"),
        (lambda: called(register("w=ppo", mu="weights"), "token-mean"), "rollout_is=token"),
    ],
)
def test_what_verl_cannot_do_is_refused(make, says):
    """One sentence with the cure, at registration where it can be known there."""
    with pytest.raises(ValueError, match=says) as error:
        make()
    assert "\n" not in str(error.value)


def test_verl_with_a_number_of_the_micro_batch():
    """SAT, asked for: q of the micro-batch is among the metrics."""
    _, grad, metrics = called(register("sat", whole_batch="micro"), "token-mean")
    old, new, _, mask = tensors()
    size = (new - old).detach().abs()[mask.bool()].sort().values
    assert metrics["actor/q"] == pytest.approx(size[-2].item())  # the 13th of 14
    assert grad[mask == 0].abs().sum() == 0


# ---------------------------------------------------------------- TRL
@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder, tokenizer, prompts): a Llama of two layers over twenty words."""
    words = {f"w{i}": i for i in range(18)} | {"[PAD]": 18, "[EOS]": 19}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        pad_token="[PAD]",
        eos_token="[EOS]",
    )
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=18,
        eos_token_id=19,
        bos_token_id=None,
    )

    folder = str(tmp_path_factory.mktemp("tiny"))
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer, Dataset.from_list([{"prompt": f"w{i} w{i + 1}"} for i in range(8)])


def trained(trainer, tiny, folder, loss_type="dapo", beta=0.0, **own):
    """(weights, log) after six steps on CPU, two updates a batch, two micro-batches an update."""
    start, tokenizer, prompts = tiny
    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        num_iterations=2,
        max_completion_length=6,
        max_steps=6,
        learning_rate=0.02,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        loss_type=loss_type,
        beta=beta,
        disable_tqdm=True,
    )
    result = trainer(
        model=start,
        reward_funcs=lambda completions, **_: [float(c.count("w1")) for c in completions],
        args=args,
        train_dataset=prompts,
        processing_class=tokenizer,
        **own,
    )
    result.train()
    return {
        k: v.detach().clone() for k, v in result.model.state_dict().items()
    }, result.state.log_history


@pytest.mark.parametrize(("loss_type", "beta"), [("dapo", 0.0), ("grpo", 0.1), ("dr_grpo", 0.0)])
def test_trl_trains_as_with_its_own_loss(tiny, tmp_path, loss_type, beta):
    """Weights after six steps under ppo are those of GRPOTrainer's loss, whose clip has acted."""
    own, _ = trained(GRPOTrainer, tiny, tmp_path / "own", loss_type, beta)
    ours, log = trained(
        StabilizedGRPOTrainer, tiny, tmp_path / "ours", loss_type, beta, stabilizer="ppo"
    )
    for name, x in own.items():
        torch.testing.assert_close(ours[name], x, rtol=1e-5, atol=1e-6)
    assert any(row.get("clip_high", 0) + row.get("clip_low", 0) > 0 for row in log)
    start = LlamaForCausalLM.from_pretrained(tiny[0]).state_dict()
    assert any(not torch.equal(x, ours[k]) for k, x in start.items())


def test_trl_with_sat_and_with_what_is_refused(tiny, tmp_path):
    """SAT trains when asked for; a second correction, or a field that TRL lacks, is one sentence."""
    _, log = trained(StabilizedGRPOTrainer, tiny, tmp_path, stabilizer="sat", whole_batch="micro")
    assert any(row.get("gate_rate", 0) > 0 for row in log)
    for own, says in (
        ({"stabilizer": "sat"}, 'whole_batch="micro"'),
        ({"stabilizer": "estr"}, "no entropy_mu"),
        ({"stabilizer": "ppo", "loss_type": "cispo"}, "loss_type is an option of TRL's own loss"),
    ):
        with pytest.raises(ValueError, match=says):
            trained(StabilizedGRPOTrainer, tiny, tmp_path, **own)
