"""Prompts as a function of a number, rewards, files of math problems, and verifiers that hang."""

import json
import os
from itertools import accumulate
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaleup import recipe
from scaleup.tasks.gym import EXTRACT
from scaleup.tasks.problems import problems
from scaleup.tasks.registry import make
from scaleup.tasks.task import Order, Prompt, Task
from scaleup.tasks.text import check_tokenizer, load_tokenizer
from scaleup.tasks.verifier import VerifierPool, last_boxed

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """A token a byte, three roles, a start and a stop token, 261 in all; encode adds the start."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    raw.add_special_tokens(["<|start|>", "<|end|>", *roles])
    start = [("<|start|>", raw.token_to_id("<|start|>"))]
    raw.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=start)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|start|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def said(tokenizer, text):
    """Token ids of an answer, its stop token included."""
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def test_each_epoch_holds_every_item_once_in_an_order_of_its_own():
    """Place i depends on seed and i alone, whatever was asked before."""
    order = Order(50, seed=3)
    epochs = [[order(i) for i in range(50 * e, 50 * e + 50)] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    late = Order(50, seed=3)  # a run that resumes in the third epoch, backwards
    assert [late(i) for i in reversed(range(100, 150))] == epochs[2][::-1]
    assert [Order(50, seed=4)(i) for i in range(50)] != epochs[0]
    assert [Order(50, seed=3, part=1)(i) for i in range(50)] != epochs[0]


def test_residue():
    """Prompts of three tokens that tell k apart, all k equally often; the reward is a share."""
    task = make("residue", seed=1)
    assert isinstance(task, Task)
    prompts = [task.prompt(i) for i in range(16)]
    assert sorted(p.answer for p in prompts) == sorted([*range(8), *range(8)])
    assert {p.answer for p in prompts[:8]} == set(range(8))
    assert len({tuple(p.ids) for p in prompts}) == 8
    assert all(len(p.ids) == 3 and max(p.ids) <= task.largest_token() for p in prompts)
    three = Prompt([3, 11, 19], 3)
    answers = [[3, 11, 4, 507], [5], []]
    assert task.rewards([three] * 3, answers) == [0.75, 0.0, 0.0]
    uniform = np.random.default_rng(0).integers(512, size=(64, 500)).tolist()
    assert abs(np.mean(task.rewards([three] * 64, uniform)) - 0.125) < 0.01
    assert task.eos is None
    assert task.counts == {}
    with pytest.raises(ValueError, match="zip"):
        task.rewards([three], answers)


@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        ("last_number", "5 - 7 = -2.", "-2"),
        ("last_number", "The answer is \N{MINUS SIGN}12", "-12"),
        ("last_number", "so 3-1", "1"),
        ("last_number", "so (3)-1", "1"),
        ("last_number", "so 3 - 1", "1"),
        ("last_number", "**-4**", "-4"),
        ("last_number", "it is 12,345,678.50 in all", "12345678.50"),
        ("last_number", "x in 3,4", "4"),
        ("last_number", "1,2345", "2345"),
        ("last_number", "none", None),
        ("tagged", "<answer>1</answer> no, <answer>\n 2 </answer> or 3", "2"),
        ("tagged", "<answer>1", None),
        ("text", " yes\n", "yes"),
    ],
)
def test_what_of_a_text_is_the_answer(kind, text, found):
    """Signs, separators of thousands, tags."""
    assert EXTRACT[kind](text) == found


def test_reasoning_gym(tokenizer):
    """The prompt asks what the verifier checks, and its scores come back for decoded answers."""
    options = {"dataset": "chain_sum", "max_terms": 2, "max_digits": 1, "size": 200}
    task = make("reasoning_gym", tokenizer, seed=5, **options)
    assert isinstance(task, Task)
    prompts = [task.prompt(i) for i in range(200)]
    first = prompts[0]
    assert first.text == tokenizer.decode(first.ids)
    question = first.answer["question"]
    assert first.text == f"<|user|>{question}<|end|><|assistant|>"
    assert first.answer["metadata"]["expression"] in question
    right = [p.answer["answer"] for p in prompts]
    assert [int(r) for r in right] == [eval(p.answer["metadata"]["expression"]) for p in prompts]
    assert (
        task.rewards(prompts, [said(tokenizer, f"I say 77, no, {r}.") for r in right]) == [1] * 200
    )
    four = next(p for p in prompts if p.answer["answer"] == "4")
    answers = [said(tokenizer, text) for text in ("14", "5", "", "4")]
    assert task.rewards([four] * 4, answers) == [0.5, 0.0, 0.0, 1.0]
    exact = make("reasoning_gym", tokenizer, seed=5, exact=True, **options)
    assert exact.prompt(7) == prompts[7]
    assert exact.rewards([four] * 4, answers) == [0, 0, 0, 1]
    whole = make("reasoning_gym", tokenizer, seed=5, extract="text", **options)
    assert whole.rewards([four], [said(tokenizer, "4")]) == [1]  # without the stop token
    assert task.eos == tokenizer.eos_token_id
    assert task.largest_token() == 260
    assert task.counts == {"timeout": 0, "crash": 0, "unreadable": 0}
    for each in (task, exact, whole):
        each.close()


def test_an_answer_that_runs_or_fails_costs_no_run(tokenizer):
    """Verifiers that evaluate the answer, or fail on an odd one: a deadline, a count, a 0."""
    more = {"workers": 1, "timeout": 1.0, "size": 5}
    task = make("reasoning_gym", tokenizer, dataset="countdown", extract="text", **more)
    prompt = task.prompt(0)
    texts = ["9**9**9**9", prompt.answer["answer"]]
    assert task.rewards([prompt] * 2, [said(tokenizer, text) for text in texts]) == [0, 1]
    assert task.counts == {"timeout": 1, "crash": 0, "unreadable": 0}
    task.close()
    task = make("reasoning_gym", tokenizer, dataset="prime_factorization", **more)
    assert task.rewards([task.prompt(0)], [said(tokenizer, "The answer is 3.5.")]) == [0]
    assert task.counts == {"timeout": 0, "crash": 1, "unreadable": 0}
    task.close()


def test_seeds_of_reasoning_gym_share_no_stream(tokenizer):
    """Their problem j of seed s + 1 is problem j + 1 of seed s; here it is not."""

    def of(seed):
        task = make("reasoning_gym", tokenizer, seed=seed, dataset="chain_sum", size=100)
        return {task.prompt(i).text for i in range(100)}

    assert len(of(0) & of(1)) < 5


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("chess", {}, "no task 'chess'; there are residue, reasoning_gym, math"),
        ("residue", {"size": 3}, "task residue: got an unexpected keyword argument 'size'"),
        ("residue", {"limit": 2}, "residue: a prompt has 3 tokens, and the limit is 2"),
        ("math", {}, "task math: missing a required"),
        ("reasoning_gym", {"dataset": "nope"}, "reasoning_gym: nope {}: .*not registered"),
        ("reasoning_gym", {"dataset": "chain_sum", "terms": 2}, "keyword argument 'terms'"),
        ("reasoning_gym", {"dataset": "chain_sum", "min_terms": 0}, "min_terms must be positive"),
        ("reasoning_gym", {"dataset": "chain_sum", "extract": "x"}, "no extract 'x'; there are"),
    ],
)
def test_options_that_do_not_fit(tokenizer, name, options, sentence):
    """One sentence for a name, an option or a value that does not exist."""
    with pytest.raises(ValueError, match=sentence):
        make(name, tokenizer, **options)


def test_a_text_task_needs_a_tokenizer_with_a_template(tokenizer):
    """Without one, or without a template, it says so; plain text needs none."""
    import copy

    with pytest.raises(ValueError, match="needs a tokenizer"):
        make("reasoning_gym", None, dataset="chain_sum")
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        make("reasoning_gym", bare, dataset="chain_sum")
    plain = make("reasoning_gym", bare, dataset="chain_sum", chat=False, system="Be brief.")
    prompt = plain.prompt(0)
    assert prompt.text == "Be brief.\n" + prompt.answer["question"]
    assert tokenizer.decode(prompt.ids) == "<|start|>" + prompt.text  # a template writes its own
    chat = make("reasoning_gym", tokenizer, dataset="chain_sum", system="Be brief.")
    assert chat.prompt(0).text.startswith("<|system|>Be brief.<|end|><|user|>")


def test_a_prompt_that_is_too_long_is_passed_over(tokenizer):
    """The limit itself is not too long; the next one stands in, and where there is none it is said."""
    make("residue", limit=3)
    options = {"dataset": "chain_sum", "size": 50}
    sizes = [len(make("reasoning_gym", tokenizer, **options).prompt(i).ids) for i in range(50)]
    assert min(sizes) < max(sizes)
    task = make("reasoning_gym", tokenizer, limit=max(sizes) - 1, **options)
    for i in range(40):
        after = next(size for size in sizes[i:] if size < max(sizes))
        assert len(task.prompt(i).ids) == after
    task = make("reasoning_gym", tokenizer, limit=min(sizes) - 1, **options)
    with pytest.raises(ValueError, match="prompt 3 and those after it have more than"):
        task.prompt(3)
    task = make("reasoning_gym", tokenizer, limit=max(sizes), **options)
    assert [len(task.prompt(i).ids) for i in range(50)] == sizes


def test_a_tokenizer_of_another_model_is_found(tokenizer, tmp_path):
    """Its ids, or its stop token, do not fit the config; a folder without one gives None."""
    end = tokenizer.eos_token_id
    check_tokenizer(tokenizer, {"vocab_size": 261, "eos_token_id": end})
    check_tokenizer(tokenizer, {"vocab_size": 300, "eos_token_id": [7, end]})
    with pytest.raises(ValueError, match="has token 260, but the model's vocabulary ends at 259"):
        check_tokenizer(tokenizer, {"vocab_size": 260, "eos_token_id": end})
    for other in (7, None, [7, 8]):
        with pytest.raises(ValueError, match=f"stops at token {end}, but the model's config at"):
            check_tokenizer(tokenizer, {"vocab_size": 261, "eos_token_id": other})
    assert load_tokenizer(tmp_path) is None
    tokenizer.save_pretrained(tmp_path)
    config = {"model_type": "llama", "vocab_size": 512, "eos_token_id": end}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode("a b") == tokenizer.encode("a b")
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 3}))
    with pytest.raises(ValueError, match="but the model's config at 3"):
        load_tokenizer(tmp_path)


def dapo(file, n, start=0):
    """A parquet file with the columns of DAPO-Math-17k."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"What is {i}?", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i), "style": "rule"},
            "extra_info": {"index": str(i)},
        }
        for i in range(start, start + n)
    ]
    pl.DataFrame(rows).write_parquet(file)
    return str(file)


def dolci(file, rows):
    """JSON lines; a row of Dolci-RL-Zero-Math-7B has prompt and ground_truth."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(file), "answer": "ground_truth"}


def test_math_files_are_mixed_and_every_problem_comes_once_an_epoch(tokenizer, tmp_path):
    """Two files with columns of their own, shuffled together; shares as the files are large."""
    more = [{"prompt": f"And {i}?", "ground_truth": [str(i)]} for i in range(100, 120)]
    files = [dapo(tmp_path / "a.parquet", 60), dolci(tmp_path / "b.jsonl", more)]
    task = make("math", tokenizer, files=files, seed=2, expect=80)
    assert isinstance(task, Task)
    first = [task.prompt(i) for i in range(80)]
    assert sorted(int(p.answer) for p in first) == [*range(60), *range(100, 120)]
    for p in first:
        word = "What is" if int(p.answer) < 60 else "And"
        assert p.text == f"<|user|>{word} {p.answer}?<|end|><|assistant|>"
        assert tokenizer.decode(p.ids) == p.text
    early = sum(p.text.startswith("<|user|>And") for p in first[:40])
    assert 4 <= early <= 16  # 10 in the mean; files one after the other would give 0
    again = make("math", tokenizer, files=files, seed=2)
    assert again.prompt(100) == task.prompt(100)
    assert [again.prompt(80 + i) for i in range(80)] != first
    task.close()


def numbers(task, numbers):
    """The right answers of prompts of these numbers, as numbers."""
    return [int(task.prompt(i).answer) for i in numbers]


def test_balanced_draws_from_the_files_in_turn(tokenizer, tmp_path):
    """Each file equally often in any window, its problems once in each of its own epochs."""
    sizes, starts = (12, 12, 6), (0, 100, 200)
    files = [dapo(tmp_path / f"{s}.parquet", n, s) for n, s in zip(sizes, starts, strict=True)]

    def new(seed=4):
        return make("math", tokenizer, files=files, seed=seed, balanced=True, expect=30)

    task = new()
    stream = numbers(task, range(180))
    of = [number // 100 for number in stream]
    for length in (3, 30, 31):
        for start in range(180 - length):
            counts = [of[start : start + length].count(k) for k in range(3)]
            assert max(counts) - min(counts) <= length % 3
    for k, (n, first) in enumerate(zip(sizes, starts, strict=True)):
        own = [number for number in stream if number // 100 == k]
        epochs = [own[i : i + n] for i in range(0, 60, n)]
        assert all(sorted(epoch) == list(range(first, first + n)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == len(epochs)  # an order of its own each
    assert [n % 100 for n in stream[0:36:3]] != [
        n % 100 for n in stream[1:36:3]
    ]  # of each file too
    late = new()  # a run that resumes: asked backwards, from the middle, with gaps
    assert numbers(late, range(179, 90, -7)) == stream[179:90:-7]
    assert numbers(late, range(90, 120)) == stream[90:120]
    assert numbers(new(seed=5), range(30)) != stream[:30]
    with pytest.raises(ValueError, match="no problem is left of file number 1"):
        make("math", tokenizer, files=[files[0]] * 2, unique=True, balanced=True)


def test_math_leaves_out_prompts_that_are_too_long(tokenizer, tmp_path):
    """Counted after `expect`, with the template; the limit itself is not too long."""
    size = [1 + i % 30 for i in range(1200)]
    rows = [{"prompt": "x" * n, "ground_truth": str(i)} for i, n in enumerate(size)]
    files = [dolci(tmp_path / "a.jsonl", rows)]
    frame = len(tokenizer.encode("<|user|><|end|><|assistant|>", add_special_tokens=False))
    for limit in (30, 29, 1):
        task = make("math", tokenizer, files=files, expect=1200, limit=limit + frame)
        short = [i for i, n in enumerate(size) if n <= limit]
        counts = {"timeout": 0, "crash": 0, "unreadable": 0, "long": 1200 - len(short)}
        assert task.counts == counts
        assert sorted(numbers(task, range(len(short)))) == short
    assert len(task.prompt(0).ids) == 1 + frame
    framed = make("math", tokenizer, files=files, limit=12, chat=False, system="sys")
    assert framed.counts["long"] == 1200 - 7 * 40  # the start, sys, a line end, and 7 tokens
    for limit in (frame, 0, -5):
        with pytest.raises(ValueError, match=f"all 1200 prompts have more than {limit} tokens"):
            make("math", tokenizer, files=files, limit=limit)
    pair = [*files, dapo(tmp_path / "b.parquet", 5)]
    assert make("math", tokenizer, files=pair, limit=frame + 1).counts["long"] == 1200 - 40 + 5
    with pytest.raises(ValueError, match="no problem is left of file number 1"):
        make("math", tokenizer, files=pair, limit=frame + 1, balanced=True)


def moved(options, folder):
    """Task options of a recipe with its files in a folder, and their paths there."""
    tables = [{"path": f} if isinstance(f, str) else dict(f) for f in options["files"]]
    paths = [folder / Path(table["path"]).name for table in tables]
    for table, path in zip(tables, paths, strict=True):
        table["path"] = str(path)
    return options | {"files": tables}, paths


@pytest.mark.parametrize("kind", ["text and list", "messages and text"])
def test_the_recipe_reads_its_files(tokenizer, tmp_path, kind):
    """Files with the columns of DAPO and Dolci under the recipe's names, by its own options."""
    world = recipe.load("qwen3_30b_a3b").world
    options, (first, second) = moved(world.task_options, tmp_path)
    assert "dapo" in first.name
    assert "dolci" in second.name
    dapo(first, 6)
    rows = [(f"And {i}?", str(i)) for i in range(100, 104)]
    if kind == "text and list":
        rows = [{"prompt": text, "ground_truth": [right]} for text, right in rows]
    else:
        rows = [
            {"prompt": [{"content": text, "role": "user"}], "ground_truth": right}
            for text, right in rows
        ]
    pl.DataFrame(rows).with_columns(dataset=pl.lit("math")).write_parquet(second)
    with pytest.raises(ValueError, match="10 problems, expected 30712: 6 of "):
        make(world.task, tokenizer, **options)
    task = make(world.task, tokenizer, **options | {"expect": 10})
    found = [task.prompt(i) for i in range(24)]
    assert {int(p.answer) for p in found} == {*range(6), *range(100, 104)}
    assert sum(int(p.answer) >= 100 for p in found) == 12  # balanced: half of each
    for p in found:
        word = "What is" if int(p.answer) < 100 else "And"
        assert p.text == f"<|user|>{word} {p.answer}?<|end|><|assistant|>"


def test_the_recipe_reads_its_evaluation(tokenizer, tmp_path):
    """The 30 problems of AIME24 from a file that repeats them, each asked once."""
    about = recipe.load("qwen3_30b_a3b").world.evaluation
    options, (file,) = moved(about.task_options, tmp_path)
    pl.concat([pl.read_parquet(dapo(file, 30))] * 3).write_parquet(file)
    task = make(about.task, tokenizer, **options)
    assert about.problems == 30
    assert sorted(numbers(task, range(about.problems))) == list(range(30))
    dapo(file, 29)
    with pytest.raises(ValueError, match="29 problems, expected 30"):
        make(about.task, tokenizer, **options)


def test_files_of_the_hub_are_left_to_polars(tmp_path, monkeypatch):
    """An hf:// path reaches polars as it is; what fails there, and other files, are one sentence."""
    here, hub = dapo(tmp_path / "a.parquet", 3), "hf://datasets/some/name/data/train.parquet"
    schema, read, asked = pl.read_parquet_schema, pl.read_parquet, []

    def at_hub(function):
        def local(file, **how):
            asked.append(file)
            return function(here, **how)

        return local

    monkeypatch.setattr(pl, "read_parquet_schema", at_hub(schema))
    monkeypatch.setattr(pl, "read_parquet", at_hub(read))
    assert [right for _, right in problems(hub)[0]] == ["0", "1", "2"]
    assert asked == [hub, hub]
    with pytest.raises(ValueError, match=f"^math: {hub} has no column 'ask', only data_source"):
        problems({"path": hub, "prompt": "ask"})
    for error in (pl.exceptions.ComputeError("no route\nmore"), OSError("no route")):

        def fails(file, error=error):
            raise error

        monkeypatch.setattr(pl, "read_parquet_schema", fails)
        with pytest.raises(ValueError, match=f"^math: {hub} cannot be read as parquet: no route$"):
            problems(hub)
    with pytest.raises(ValueError, match="of the Hugging Face hub only"):
        problems("hf://datasets/some/name/x.jsonl")


def test_the_number_of_problems_is_checked(tmp_path):
    """A file cut short, files with the same problems, no file at all."""
    a, b = dapo(tmp_path / "a.parquet", 5), dapo(tmp_path / "b.parquet", 4, start=3)
    assert list(map(len, problems([a, b], expect=9))) == [5, 4]
    assert list(map(len, problems([a, b], unique=True, expect=7))) == [5, 2]
    assert list(map(len, problems(a))) == [5]
    assert list(map(len, problems({"path": a}))) == [5]
    with pytest.raises(ValueError, match="expected 8") as error:
        problems([a, b], expect=8)
    assert str(error.value) == (
        f"math: 9 problems, expected 8: 5 of {a}, 4 of {b} (7 different ones)"
    )
    with pytest.raises(ValueError, match="0 problems, expected some: no files"):
        problems([])


GOOD = {"prompt": "What?", "ground_truth": "1"}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([GOOD, {"ground_truth": "1"}], "row 1, column 'prompt': needs text"),
        ([GOOD | {"prompt": [{"role": "user"}]}], "row 0, column 'prompt': needs text or messages"),
        ([GOOD | {"prompt": []}], "row 0, column 'prompt'"),
        ([GOOD | {"prompt": " "}], "row 0, column 'prompt'"),
        (
            [GOOD, GOOD, GOOD | {"ground_truth": ""}],
            "row 2, column 'ground_truth': needs one answer",
        ),
        ([GOOD | {"ground_truth": ["1", "2"]}], "row 0, column 'ground_truth'"),
        ([GOOD | {"ground_truth": " "}], "row 0, column 'ground_truth'"),
        ([GOOD | {"ground_truth": True}], "row 0, column 'ground_truth'"),
        ([{"prompt": "What?", "reward_model": {}}], "row 0, column 'ground_truth'"),
        ([GOOD, [1]], "row 1: needs a JSON object"),
    ],
)
def test_a_bad_row_is_one_sentence(tmp_path, rows, sentence):
    """File, row and column are named."""
    table = dolci(tmp_path / "bad.jsonl", rows)
    with pytest.raises(ValueError, match=sentence) as error:
        problems([table])
    assert str(error.value).startswith(f"math: {table['path']}, row ")
    assert "\n" not in str(error.value)


def test_bad_files_are_one_sentence(tmp_path):
    """No such file, no parquet, no JSON, no such column, no such key."""
    text = tmp_path / "x.jsonl"
    text.write_bytes(b"\xff\x00{")
    fake = tmp_path / "x.parquet"
    fake.write_text("nothing")
    for file, sentence in (
        (str(tmp_path / "none.parquet"), "there is no file"),
        (str(text), "row 0: no JSON"),
        (str(fake), "cannot be read as parquet"),
        (
            {"path": dapo(tmp_path / "a.parquet", 2), "prompt": "ask"},
            "has no column 'ask', only data",
        ),
        ({"path": "a", "column": "b"}, "see 'column'"),
        ({"prompt": "b"}, "see 'path'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            problems([file])


FAKE = """
import os, signal, time

def fake(answer, text, timeout):
    if text == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))  # as deaf as a long multiplication
        with open(os.environ["HUNG"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        while True:
            time.sleep(1)
    if text == "die":
        os._exit(3)
    if text == "full":
        raise MemoryError
    if text == "raise":
        raise ArithmeticError
    if text == "print":
        print("[1.0]", flush=True)
        return 0.5
    if text == "unreadable":
        return text
    if text == "odd":
        return float("nan")
    return float(answer == text)

def useless(answer, text, timeout):
    return 0.0
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """A module `fakes` of verifiers, and the file where a hanging one leaves its process id."""
    (tmp_path / "fakes.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HUNG", str(tmp_path / "hung"))
    return tmp_path / "hung"


def test_a_verifier_that_hangs_or_crashes_scores_0_and_is_replaced(fakes):
    """Each failure is counted by its name, the others keep their scores and order."""
    pool = VerifierPool(2, timeout=0.2, verifier="fakes:fake")
    texts = [
        "1",
        "hang",
        "1",
        "die",
        "1",
        "raise",
        "print",
        "full",
        "1",
        "hang",
        "unreadable",
        "2",
        "odd",
        "1",
    ]
    expected = [1, 0, 1, 0, 1, 0, 0.5, 0, 1, 0, 0, 0, 0, 1]
    assert pool([("1", text) for text in texts]) == expected
    assert pool.counts == {"timeout": 2, "crash": 4, "unreadable": 1}
    for pid in fakes.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    running = [worker.process for worker in pool._workers if worker.process]
    pool.close()
    assert running
    assert all(process.poll() is not None for process in running)


@pytest.mark.parametrize("verifier", ["fakes:useless", "fakes:absent", "no_such_module:f"])
def test_a_verifier_that_does_not_work_stops_the_run(fakes, verifier):
    """It must not pass for a model that is always wrong."""
    pool = VerifierPool(1, verifier=verifier)
    with pytest.raises(RuntimeError, match="could not be started"):
        pool([("1", "1")])
    pool.close()


REAL = [
    ("1/2", r"It is \boxed{\frac{1}{2}}.", 1),
    (r"\frac{1}{2}", r"so $\boxed{\dfrac{2}{4}}$", 1),
    (r"\frac{1}{2}", "The answer is $0.5$", 1),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0),
    ("(1,2]", r"\boxed{(1, 2]}", 1),
    ("(1,2]", r"\boxed{[1,2]}", 0),
    (r"[0,1) \cup (2,3]", r"\boxed{[0,1)\cup(2,3]}", 1),
    ("1,000", r"\boxed{1000}", 1),
    ("1000", r"in all \boxed{1,000}", 1),
    ("1,000", r"\boxed{10000}", 0),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
    ("x^2", r"\boxed{\boxed{x^2}}", 1),
    (r"\frac{3}{4}", r"$\boxed{ \text{so } \boxed{\frac{3}{4}} }$", 1),
    ("34", r"First \boxed{33}, but then \boxed{34}.", 1),
    ("33", r"First \boxed{33}, but then \boxed{34}.", 0),
    ("34", r"\boxed{34} was right, and \boxed{35", 1),
    ("34", "Answer: 34", 1),
    ("34", "Answer: 35", 0),
    ("-3", "Answer: \N{MINUS SIGN}3", 1),
    ("$34$", "34", 1),
    ("34", "", 0),
]


def test_real_latex(tokenizer, tmp_path):
    """Fractions, intervals, 1,000, nested boxes through tokens and math-verify; a hopeless one ends."""
    data = dolci(tmp_path / "a.jsonl", [{"prompt": "?", "ground_truth": "1"}])
    task = make("math", tokenizer, files=[data], workers=1)
    prompts = [Prompt([], answer) for answer, _, _ in REAL]
    outputs = [said(tokenizer, text) for _, text, _ in REAL]
    found = dict(zip(REAL, task.rewards(prompts, outputs), strict=True))
    assert {case: reward for case, reward in found.items() if reward != case[2]} == {}
    assert task.counts["timeout"] + task.counts["crash"] == 0
    task.close()
    task = make("math", tokenizer, files=[data], workers=1, timeout=2.0)
    hopeless = [Prompt([], "5"), Prompt([], "5"), Prompt([], r"\text{}")]
    texts = [r"\boxed{9^{9^{9^{9^9}}}}", r"\boxed{5}", "5"]
    assert task.rewards(hopeless, [said(tokenizer, text) for text in texts]) == [0, 1, 0]
    assert task.counts == {"timeout": 1, "crash": 0, "unreadable": 1, "long": 0}
    assert task.rewards(hopeless[1:], [said(tokenizer, text) for text in texts[1:]]) == [1, 0]
    assert task.counts["unreadable"] == 2  # totals
    task.close()


def test_last_boxed():
    """Braces are matched; a box that never closes is passed over."""
    assert last_boxed(r"a \boxed{\frac{1}{2}} b") == r"\boxed{\frac{1}{2}}"
    assert last_boxed(r"\boxed{1} \boxed{2") == r"\boxed{1}"
    assert last_boxed("no box") == "no box"
    assert last_boxed(r"\boxed{") == r"\boxed{"
    endless = r"\boxed{" * 20_000
    assert last_boxed(endless) == endless


@given(st.lists(st.sampled_from([r"\boxed{", "{", "}", "x"]), max_size=14).map("".join))
def test_last_boxed_is_the_closed_box_that_begins_last(text):
    """Against every pair of places of the text."""
    closed = []
    for start in range(len(text)):
        for end in range(start, len(text) + 1):
            part = text[start:end]
            depths = list(accumulate({"{": 1, "}": -1}.get(c, 0) for c in part))
            if part.startswith(r"\boxed{") and depths[-1] == 0 and 0 not in depths[6:-1]:
                closed.append(part)
    assert last_boxed(text) == (closed[-1] if closed else text)


@pytest.mark.parametrize(
    ("number", "text"), [(0.00001, "0.00001"), (1e16, "10000000000000000"), (0.5, "0.5"), (7, "7")]
)
def test_numbers_of_a_file_are_written_out(tmp_path, number, text):
    """math-verify reads no 1e-05."""
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": "How much?", "answer": number}) + "\n")
    ((problem,),) = problems(str(file), answer="answer")
    assert problem[1] == text
    file.write_text('{"prompt": "How much?", "answer": NaN}\n')
    with pytest.raises(ValueError, match="needs one answer, a text or a number"):
        problems(str(file), answer="answer")
