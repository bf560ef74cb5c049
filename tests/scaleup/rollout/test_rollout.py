"""The SGLang adapter on a real engine: log-probs, versions, experts, pauses, pushes."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
import torch

from scaleup import cpu
from scaleup.models import tiny
from scaleup.rollout import local, push
from scaleup.rollout.checksums import expected_checksums
from scaleup.rollout.sample import parse
from scaleup.rollout.server import serve

TOLERANCE = 3e-5  # nats, rounding of float32: see test_agreement.py
PROMPTS = [[1, 2, 3], [7, 8, 9, 10, 11], [500]]


def wait_for_tokens(engine, n=30):
    """Return when the answers in flight have about n more tokens: those of a short one beside them."""
    engine.generate([[1, 2]], max_new_tokens=n, ignore_eos=True)


def span_gaps(sample, references):
    """Largest gap between the log-probs of each version's tokens and that version's own weights."""
    v = sample.version
    return {k: references[k].gap(sample, v == k) for k in v.unique().tolist()}


def same_experts(sample, reference):
    """Whether a sample's experts are those of these weights, up to the first tie."""
    ids = sample.prompt + sample.output
    decided = reference.decided(ids)[:-1]
    found = sample.experts.long().sort().values
    return torch.equal(found[decided], reference.experts(ids)[:-1][decided])


def test_log_probs_are_those_of_transformers(engine, old):
    """In float32 the rollout log-probs equal an independent recompute to rounding."""
    samples = engine.generate(PROMPTS, n=3, max_new_tokens=24)
    assert [s.prompt for s in samples] == [p for p in PROMPTS for _ in range(3)]
    for s in samples:
        assert s.finish == "length"
        assert len(s.output) == len(s.logp_mu) == len(s.version) == 24
        assert s.logp_mu.dtype == torch.float32
        assert (s.version == engine.version()).all()
        assert old.gap(s) < TOLERANCE
    assert len({tuple(s.output) for s in samples}) == len(samples)  # n answers are n draws


def test_log_probs_are_at_the_temperature_drawn_with(engine, old):
    """At temperature 1/2 the log-prob is that of the softmax of twice the logits."""
    for s in engine.generate(PROMPTS, max_new_tokens=12, temperature=0.5):
        assert old.gap(s, temperature=0.5) < TOLERANCE
        assert old.gap(s, ties=True) > 0.01


def test_tokens_are_drawn_from_the_log_probs(engine, old):
    """First tokens of 1000 answers fit the exact softmax: chi-square within 5 sigma."""
    n = 1000
    samples = engine.generate([[1, 2, 3]], n=n, max_new_tokens=1)
    p = old.logits([1, 2, 3])[-1].softmax(-1)
    counts = torch.bincount(torch.tensor([s.output[0] for s in samples]), minlength=len(p))
    common = n * p >= 2  # the rest is one cell
    seen = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    mean = n * torch.cat([p[common], p[~common].sum()[None]]).double()
    k = len(seen) - 1
    assert k > 50
    assert abs(((seen - mean) ** 2 / mean).sum().item() - k) < 5 * (2 * k) ** 0.5


def test_experts_are_those_of_transformers(engine, old):
    """Routed experts are [P + T - 1, layers, K] and equal the top-k of an independent recompute."""
    for s in engine.generate(PROMPTS, n=2, max_new_tokens=20):
        assert s.experts.shape == (len(s.prompt) + len(s.output) - 1, 2, 2)
        assert s.experts.dtype == torch.int32
        assert same_experts(s, old)


def test_stop_token_ends_an_answer_and_is_part_of_it(engine):
    """With half the vocabulary as stop tokens an answer soon ends on one, counted as its last."""
    stop = list(range(256))
    for s in engine.generate([[1, 2, 3]], n=8, max_new_tokens=60, stop_token_ids=stop):
        assert s.finish == "stop"
        assert s.output[-1] in stop
        assert not set(s.output[:-1]) & set(stop)


def test_futures_can_be_awaited(engine):
    """The asynchronous form works in somebody else's event loop."""

    async def run():
        return await asyncio.gather(
            *map(asyncio.wrap_future, engine.submit([[1, 2]], n=3, max_new_tokens=4))
        )

    assert [len(s.output) for s in asyncio.run(run())] == [4, 4, 4]


def test_each_span_of_a_retracted_answer_is_of_its_own_version(engine, old, new, new_version):
    """C074: pushes while answers are in flight; every token's log-prob is exact under its own version."""
    references = {engine.version(): old}
    futures = engine.submit(PROMPTS, n=3, max_new_tokens=300)
    for model in (new, old):
        wait_for_tokens(engine)
        references[version := new_version()] = model
        engine.push(model.tensors, version)
    samples = [f.result() for f in futures]
    assert any(len(s.version.unique()) == 3 for s in samples)
    decided = [m.decided(s.prompt + s.output) for s in samples for m in (old, new)]
    assert torch.cat(decided).float().mean() > 0.5  # ties are too rare to empty the test
    for s in samples:
        assert (s.version.diff() >= 0).all()
        assert s.finish == "length"
        assert s.retractions == len(s.version.unique()) - 1
        assert max(span_gaps(s, references).values()) < TOLERANCE
        for v, model in references.items():  # and not under the other weights
            other = new if model is old else old
            if (mine := s.version == v).sum() > 5:
                assert other.gap(s, mine, ties=True) > 0.1


def test_experts_of_a_retracted_answer_are_those_of_its_last_weights(engine, old, new, new_version):
    """D076, the trap: tokens drawn before a push come back with the experts of the weights after it."""
    before = engine.version()
    futures = engine.submit([[1, 2, 3]], n=4, max_new_tokens=250)
    wait_for_tokens(engine)
    engine.push(new.tensors, new_version())
    samples = [s for s in (f.result() for f in futures) if len(s.version.unique()) == 2]
    assert samples
    for s in samples:
        assert same_experts(s, new)
        found, ids = s.experts.long().sort().values, s.prompt + s.output
        drawn_before = len(s.prompt) + int((s.version == before).sum()) - 1
        assert not torch.equal(found[:drawn_before], old.experts(ids)[:drawn_before])


def test_abort_keeps_tokens_and_their_log_probs(engine, old):
    """An aborted answer comes back with what it has, exact, with its experts."""
    futures = engine.submit([[1, 2, 3]], n=4, max_new_tokens=1500)
    wait_for_tokens(engine)
    engine.abort_all()
    for s in [f.result() for f in futures]:
        assert s.finish == "abort"
        assert 0 < len(s.output) < 1500
        assert old.gap(s) < TOLERANCE
        assert same_experts(s, old)
        assert len(s.experts) == len(s.prompt) + len(s.output) - 1


def test_pause_abort_ends_answers_and_resume_starts_new_ones(engine, old):
    """Pause mode `abort`: the answers in flight end with exact partial log-probs."""
    futures = engine.submit([[1, 2, 3]], n=2, max_new_tokens=1500)
    wait_for_tokens(engine)
    engine.pause("abort")
    samples = [f.result() for f in futures]
    assert [s.finish for s in samples] == ["abort", "abort"]
    assert all(old.gap(s) < TOLERANCE for s in samples if s.output)
    engine.resume()
    assert len(engine.generate([[1]], max_new_tokens=3)[0].output) == 3


def test_requests_sent_while_paused_wait_for_the_new_weights(engine, new, new_version):
    """A request sent during a pause is drawn from the weights pushed in the pause."""
    engine.pause("retract")
    futures = engine.submit([[1, 2, 3]], n=2, max_new_tokens=8)
    engine.push(new.tensors, version := new_version())
    assert engine.paused == "retract"  # a push leaves a pause as it found it
    assert not any(f.done() for f in futures)
    engine.resume()
    for s in [f.result() for f in futures]:
        assert (s.version == version).all()
        assert new.gap(s) < TOLERANCE


def test_push_changes_every_weight(engine, old, new, new_version):
    """After a push the engine's checksums are those of the new tensors, weight by weight."""
    assert engine.checksums() == [expected_checksums(old.tensors, engine.config)]
    engine.push(iter(new.tensors.items()), version := new_version())
    assert engine.version() == version
    assert engine.checksums() == [expected_checksums(new.tensors, engine.config)]
    before, after = (expected_checksums(m.tensors, engine.config) for m in (old, new))
    assert all(before[name] != after[name] for name in before)
    for s in engine.generate(PROMPTS, max_new_tokens=8):
        assert new.gap(s) < TOLERANCE


def test_push_in_buckets(engine, new, new_version, monkeypatch):
    """A push of many requests serves the same weights as one of one request."""
    monkeypatch.setattr(push, "BUCKET", 50_000)
    assert len(list(push.buckets(new.tensors))) > 5
    engine.push(new.tensors, new_version())
    assert engine.checksums() == [expected_checksums(new.tensors, engine.config)]


HEAD = "lm_head.weight"
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t | {"model.norm.wait": t["model.norm.weight"]}, "'model.norm.wait' is not a"),
        (lambda t: t | {GATE: t[GATE].T}, "has shape (64, 96), the model has (96, 64)"),
        (lambda t: {k: v for k, v in t.items() if k != GATE}, f"missing, the first is {GATE}"),
        (lambda t: [*t.items(), (HEAD, t[HEAD])], f"{HEAD} was given twice"),
    ],
    ids=["name", "shape", "missing", "twice"],
)
def test_push_of_other_weights_is_one_sentence_and_touches_nothing(
    engine, old, new, new_version, change, sentence
):
    """A wrong name or shape, a missing or doubled weight: ValueError, the old weights still serve."""
    before = engine.version()
    with pytest.raises(ValueError, match=r"^push: ") as error:
        engine.push(change(new.tensors), new_version())
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert engine.version() == before
    assert engine.checksums() == [expected_checksums(old.tensors, engine.config)]
    (s,) = engine.generate([[1, 2]], max_new_tokens=4)
    assert old.gap(s) < TOLERANCE


def test_push_needs_another_version(engine, new):
    """The version being served is refused: its tokens could not be told from the old ones."""
    with pytest.raises(ValueError, match="is being served"):
        engine.push(new.tensors, engine.version())


@pytest.mark.parametrize(
    "lost",
    [
        lambda t: {k: v for k, v in t.items() if k != GATE},
        lambda t: {k.replace("norm.weight", "norm.wait"): v for k, v in t.items()},
        lambda t: {k: v * 1.0001 if k == GATE else v for k, v in t.items()},
    ],
    ids=["missing", "renamed", "changed"],
)
def test_a_weight_lost_on_the_way_is_found(engine, old, new, new_version, monkeypatch, lost):
    """SGLang accepts a missing or misnamed weight without a word; the checksum does not."""
    before, load = engine.version(), engine._load
    monkeypatch.setattr(engine, "_load", lambda tensors: load(lost(tensors)))
    with pytest.raises(RuntimeError, match=r"differ from those sent, the first is model\."):
        engine.push(new.tensors, new_version())
    assert engine.version() == before  # the new version is never announced
    for use in (lambda: engine.submit([[1]]), engine.resume):
        with pytest.raises(RuntimeError, match="was not taken over"):
            use()
    monkeypatch.setattr(engine, "_load", load)
    engine.push(new.tensors, new_version())
    engine.resume()
    (s,) = engine.generate([[1, 2]], max_new_tokens=4)
    assert new.gap(s) < TOLERANCE


def test_a_lost_weight_is_found_in_any_layout(engine, new, new_version, monkeypatch):
    """Without exact checksums: a weight that did not change with its push is found, none else."""
    monkeypatch.setattr(engine, "exact", False)
    engine.push(new.tensors, new_version())
    engine.push(new.tensors, new_version())  # the same weights again: nothing has to change
    load = engine._load
    for lost in (GATE, HEAD):
        kept = {k: v for k, v in new.tensors.items() if k != lost}
        monkeypatch.setattr(engine, "_load", lambda tensors, kept=kept: load(kept))
        moved = new.tensors | {lost: new.tensors[lost] + 1}
        with pytest.raises(RuntimeError, match="1 weights in the engine did not change"):
            engine.push(moved, new_version())
    monkeypatch.setattr(engine, "_load", load)
    engine.push(new.tensors, new_version())
    engine.resume()
    (s,) = engine.generate([[1, 2]], max_new_tokens=4)
    assert new.gap(s) < TOLERANCE


def test_a_start_with_other_weights_is_repaired(engine, old, new):
    """What a start checks: an engine that does not hold its checkpoint loads it again."""
    engine._load(new.tensors)
    assert engine.checksums() != [expected_checksums(old.tensors, engine.config)]
    engine._check_start()
    assert engine.checksums() == [expected_checksums(old.tensors, engine.config)]


def test_a_refused_load_leaves_the_engine_usable(engine, new, new_version, monkeypatch):
    """If SGLang itself refuses, its session is closed, the sentence names the cause, a retry works."""
    accept = engine._accept

    def refuse(route, body):
        if route == "update_weights_from_tensor":
            raise RuntimeError("no room")
        accept(route, body)

    monkeypatch.setattr(engine, "_accept", refuse)
    with pytest.raises(RuntimeError, match=r"was not taken over \(no room\)"):
        engine.push(new.tensors, new_version())
    monkeypatch.setattr(engine, "_accept", accept)
    engine.push(new.tensors, new_version())
    engine.resume()
    assert len(engine.generate([[1]], max_new_tokens=2)[0].output) == 2


def test_in_place_is_refused_with_the_radix_cache(engine):
    """The trap is closed: with the cache on, new requests would reuse prefixes of old weights."""
    with pytest.raises(ValueError, match="disable_radix_cache=True"):
        engine.pause("in_place")
    with pytest.raises(ValueError, match="unknown pause mode"):
        engine.pause("wait")
    assert engine.paused is None


@pytest.mark.parametrize(
    "arguments", [{"prompts": [[]]}, {"prompts": [[512]]}, {"prompts": [[1]], "temperature": 0.0}]
)
def test_requests_that_would_kill_the_engine_are_refused(engine, arguments):
    """Empty prompts, tokens outside the vocabulary and temperature 0 are a ValueError here."""
    with pytest.raises(ValueError, match=r"^rollout: "):
        engine.submit(**arguments)


@pytest.fixture(scope="module")
def server(tmp_path_factory, reference):
    """A server of a dense Qwen3 with tied embeddings and an odd vocabulary, no radix cache."""
    write, folder = tiny.write, tmp_path_factory.mktemp
    old, new = (
        reference(write(folder(f"dense{seed}"), "qwen3", seed=seed, tie=True, vocab_size=500))
        for seed in (0, 1)
    )
    engine = serve(old.folder, disable_radix_cache=True)
    yield engine, old, new
    engine.close()


def test_in_place_over_http(server):
    """Over HTTP, in_place: exact before the push, after it a policy that is neither version."""
    engine, old, new = server
    (s,) = engine.generate([[1, 2, 3]], max_new_tokens=8)
    assert s.experts is None
    assert old.gap(s) < TOLERANCE
    futures = engine.submit([[1, 2, 3], [4, 5]], n=2, max_new_tokens=250)
    wait_for_tokens(engine)
    engine.pause("in_place")
    engine.push(new.tensors, 1)
    engine.resume()
    samples = [f.result() for f in futures]
    assert any(len(s.version.unique()) == 2 for s in samples)
    for s in samples:
        first = s.version == 0
        assert old.gap(s, first) < TOLERANCE
        assert s.retractions == 0
        if len(s.version.unique()) == 2:
            assert new.gap(s, ~first, ties=True) > 0.01
    (s,) = engine.generate([[1, 2, 3]], max_new_tokens=8)  # a new request is clean
    assert new.gap(s) < TOLERANCE
    assert engine.checksums() == [expected_checksums(new.tensors, engine.config)]


def test_push_and_abort_over_http(server):
    """Over HTTP the same refusals, the same retract and the same partial answers."""
    engine, old, new = server
    wrong = dict(old.tensors)
    wrong["model.norm.wait"] = wrong.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"'model.norm.wait' is not a weight"):
        engine.push(wrong, 9)
    engine.push(new.tensors, 10)
    futures = engine.submit([[1, 2, 3]], n=3, max_new_tokens=250)
    wait_for_tokens(engine)
    engine.push(old.tensors, 11)
    for s in [f.result() for f in futures]:
        assert max(span_gaps(s, {10: new, 11: old}).values()) < TOLERANCE
    futures = engine.submit([[1, 2, 3]], n=2, max_new_tokens=1500)
    wait_for_tokens(engine)
    engine.abort_all()
    for s in [f.result() for f in futures]:
        assert s.finish == "abort"
        assert old.gap(s) < TOLERANCE


def answer(**changes):
    """An answer of SGLang to a prompt of two tokens: two tokens, one layer, top-1."""
    experts = base64.b64encode(np.array([4, 5, 6], np.int32).tobytes()).decode()
    meta = {
        "output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None]],
        "weight_versions": [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 2},
        ],
        "routed_experts": experts,
        "finish_reason": {"type": "length"},
    }
    return {"output_ids": [7, 8], "meta_info": meta | changes}


def test_parse_by_hand():
    """Spans become a version per token, base64 becomes experts per token and layer."""
    s = parse([1, 2], answer(), layers=1, topk=1)
    assert s.version.tolist() == [3, 4]
    assert s.logp_mu.tolist() == [-1.0, -2.0]
    assert s.experts.tolist() == [[[4]], [[5]], [[6]]]


ROWS = [[[-0.5, 9, None], [-1.0, 7, None]], [[-0.7, 9, None], [-0.9, 6, None]]]


def test_parse_of_a_head():
    """Ids and log-probs of the likeliest tokens; none for a response without tokens; a short one is refused."""
    s = parse([1, 2], answer(output_top_logprobs=ROWS), layers=1, topk=1, head=2)
    assert s.head.tolist() == [[9, 7], [9, 6]]
    torch.testing.assert_close(s.head_logp, torch.tensor([[-0.5, -1.0], [-0.7, -0.9]]))
    assert parse([1, 2], answer(), layers=1, topk=1).head is None
    nothing = {"output_token_logprobs": [], "weight_versions": []}
    empty = parse([1, 2], answer(**nothing) | {"output_ids": []}, head=2)
    assert empty.head.shape == empty.head_logp.shape == (0, 2)
    for rows in ([], ROWS[:1], [ROWS[0], ROWS[1][:1]]):
        with pytest.raises(RuntimeError, match="heads do not fit 2 tokens with 2 each"):
            parse([1, 2], answer(output_top_logprobs=rows), layers=1, topk=1, head=2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"output_token_logprobs": [[-1.0, 7, None]]}, "1 log-probs do not belong to the 2"),
        ({"output_token_logprobs": [[-1.0, 7, None], [-2.0, 9, None]]}, "do not belong"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "miss tokens"),
        ({"routed_experts": base64.b64encode(bytes(8)).decode()}, "2 expert ids for 2 + 2 - 1"),
        ({"routed_experts": base64.b64encode(bytes(16)).decode()}, "4 expert ids for 2 + 2 - 1"),
    ],
)
def test_parse_refuses_contradictions(changes, sentence):
    """An answer that contradicts itself is an error, never a silently shifted record.

    C091 takes T rows of experts too, which another engine returns; this one returns T - 1."""
    with pytest.raises(RuntimeError) as error:
        parse([1, 2], answer(**changes), layers=1, topk=1)
    assert sentence in str(error.value)


def test_shims_do_nothing_with_cuda(monkeypatch):
    """With CUDA there is no variable to set and the plugin leaves SGLang alone."""
    assert cpu.env({})["SGLANG_USE_CPU_ENGINE"] == "1"
    assert cpu.env({"PYTHONPATH": "a", "OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.env() == {}
    monkeypatch.setitem(__import__("sys").modules, "sglang", None)  # an import would fail
    cpu.activate()


def test_a_missing_plugin_is_one_sentence(tmp_path, monkeypatch):
    """Without its entry point SGLang would die of a CUDA call; the start is refused instead."""
    monkeypatch.setattr(local, "entry_points", lambda group: [])
    with pytest.raises(RuntimeError, match="does not see the plugin"):
        local.defaults(tiny.write(tmp_path), "float32")
