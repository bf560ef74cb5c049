"""Advantages: the registry keeps the promises, broken ones are refused, a user's file joins a run."""

import pickle

import pytest
import torch

from simlab.commands import parse_compare
from simlab.contract.advantages import PROMISES, check, draw
from simlab.core.advantages import ADVANTAGES, counted, dr_grpo
from simlab.core.user_files import LOADED
from simlab.simulator.pool import attempt
from simlab.simulator.train import train
from simlab.study.settings import RunError, Training
from simlab.study.strict import ConfigError

OWN = '''
"""Median baseline."""

def advantage(reward, length):
    reward = reward.double()
    there = ~reward.isnan()
    A = (reward - reward.nanmedian(-1, keepdim=True).values).nan_to_num(0.0)
    return A * SIZE

SIZE = 1.0
'''


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_registry_keeps_them(name):
    """Every advantage there is, those over a whole batch too."""
    check(name, ADVANTAGES[name])


def wrong(change):
    """dr_grpo and one fault."""
    return lambda reward, length: change(reward, length, dr_grpo(reward, length))


def kept(reward, length, A, seen=[]):  # noqa: B006
    seen.append(0)
    return A * len(seen)


BROKEN = {
    "summed": ("shape", wrong(lambda r, n, A: A.sum(-1)), "rewards [5, 4] give advantages [5]"),
    "listed": ("shape", wrong(lambda r, n, A: A.tolist()), "it returns list, not a tensor"),
    "deviation": ("shape", wrong(lambda r, n, A: A / A.std(-1, keepdim=True)), "guard the division"),
    "none": ("shape", wrong(lambda r, n, A: 0 * A), "every advantage is 0"),
    "narrow": ("precision", wrong(lambda r, n, A: A.float()), "float64 rewards give torch.float32"),
    "rounded": ("precision", wrong(lambda r, n, A: A if r.dtype == torch.float64 else A.round()), "float32"),
    "inside": ("untouched", wrong(lambda r, n, A: (r.mul_(1 + (r == r)), A)[1]), "it writes into reward"),
    "state": ("untouched", wrong(kept), "it differs from call to call"),
    "random": ("untouched", wrong(lambda r, n, A: A + 0 * torch.rand(())), "it draws from torch's generator"),
    "first": ("order", lambda r, n: r - r[..., :1, :].mean(-1, keepdim=True), "order of groups"),
    "leader": ("order", lambda r, n: r - r[..., :1], "order of answers"),
    "over_lanes": ("lanes", wrong(lambda r, n, A: A / (A.abs().sum() + 1)), "over the last two axes only"),
    "raw": ("flat", lambda r, n: r * (n > 0), "equal rewards of 1 give 1, not 0: subtract a baseline"),
    "nan": ("missing", lambda r, n: r - r.mean(-1, keepdim=True), "a missing reward (NaN)"),
    "kept_nan": ("missing", wrong(lambda r, n, A: A.where(~r.isnan(), 1.0)), "other than 0"),
    "by_length": ("missing", wrong(lambda r, n, A: A / n), "answers without a token"),
    "raising": ("shape", wrong(lambda r, n, A: A @ A), "RuntimeError"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_is_refused(name):
    """By the promise it breaks, in one line that says what to do; a refused NaN is no fault."""
    promise, function, says = BROKEN[name]
    with pytest.raises(ValueError, match=rf"^{name}: the advantage breaks .* {promise} ") as error:
        check(name, function)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_every_promise_refuses_something():
    """None is idle; and one that refuses NaN by a sentence is as good as one that leaves it out."""
    assert {promise for promise, _, _ in BROKEN.values()} == set(PROMISES)

    def strict(reward, length):
        if reward.isnan().any():
            raise ValueError("a reward is missing")
        return dr_grpo(counted(reward, length), length)

    check("strict", strict)


def cell(path):
    """One step of two seeds."""
    words = ["--methods", "ppo", "--lags", "1", "--seeds", "2", "--steps", "1"]
    return parse_compare([*words, "--advantage-file", str(path)]).settings.cells()[0]


def test_a_file_is_used_in_training(tmp_path):
    """An edit in the same process runs anew, also one that leaves the size; not in the middle of a run.
    A worker process, which has only the settings, loads the file itself."""
    path, rows = tmp_path / "median.py", {}
    for size in ("1.0", "2.0", "1.0"):
        path.write_text(OWN.replace("SIZE = 1.0", f"SIZE = {size}"))
        one = cell(path)
        rows.setdefault(size, []).append((one.key(""), [row["loss"] for row in train(one)]))
    assert rows["1.0"][0] == rows["1.0"][1]
    assert all(x != y for x, y in zip(rows["1.0"][0], rows["2.0"][0], strict=True))
    reward, length = draw(0)
    settings = pickle.loads(pickle.dumps(one.training))
    LOADED.clear()
    want = reward - reward.median(-1, keepdim=True).values
    assert torch.equal(settings.to_advantages(reward, length), want)
    path.write_text("1 / 0")
    assert torch.equal(settings.to_advantages(reward, length), want)


@pytest.mark.parametrize("fault", ["1 / 0", "A = A / 0", "raise SystemExit(0)"])
def test_an_error_in_training_is_one_sentence(fault, tmp_path):
    """With the file and, where there is one, the line; no number is written."""
    path = tmp_path / "median.py"
    fault = f"    if len(reward) == 2 and reward.shape[-2] == 8:\n        {fault}\n"
    path.write_text(OWN.replace("    return A", f"{fault}    return A"))
    with pytest.raises(RunError) as error:
        attempt(train, cell(path), None)
    assert str(error.value).startswith(f"{path}: ")
    assert ("not finite" if "A =" in fault else f"({path}, line 9)") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("nothing", "x = 1", "nothing.py: has no function advantage(reward, length)"),
        ("grpo", OWN, "grpo.py: there is an advantage grpo already, rename the file"),
        ("halved", "def advantage(", "halved.py: cannot be loaded (SyntaxError"),
        ("raw", "def advantage(reward, length):\n    return reward", "raw.py: the advantage breaks the promise"),
        ("one", "def advantage(reward):\n    return reward", "TypeError"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(name, text, says, tmp_path):
    """It names the setting and the file."""
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        Training(advantage_file=path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_one_of_the_two_is_given(tmp_path):
    """A name beside a file would be ignored."""
    path = tmp_path / "median.py"
    path.write_text(OWN)
    with pytest.raises(ConfigError, match=r"advantage rloo and advantage_file .*: give one"):
        Training(advantage="rloo", advantage_file=path)
