"""Save, kill, resume: the next step is that of the run that went on, in any layout."""

import pytest
import torch

from scaleup.engines_report.launch import Ranks
from scaleup.engines_report.measure import gap, take
from scaleup.engines_report.resuming import (
    AFTER,
    BEFORE,
    FROM,
    RESUMED,
    resumable,
    resume,
    save_and_go_on,
)
from scaleup.models import tiny


@pytest.fixture(scope="module")
def ranks():
    """One process, and two that share a model."""
    with Ranks(1, 300, daemon=False) as one, Ranks(2, 300, daemon=False) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a tiny mixture of experts in it."""
    folder = tmp_path_factory.mktemp("run")
    tiny.write(folder / "model", "qwen3_moe", seed=1)
    return folder


@pytest.fixture(scope="module")
def saved(root):
    """Runs that were saved, went on, and were killed; a torn save lies beside the last one."""
    found = {}
    for name, layout in FROM.items():
        two = Ranks(2, timeout=300, daemon=False)
        found[name] = two(save_and_go_on, root / "model", root / name, layout)[0]
        two.close(kill=True)
        (root / name / "step_00000009.part").mkdir()
    return found


@pytest.mark.parametrize(("name", "n", "layout"), RESUMED)
def test_resume(ranks, root, saved, name, n, layout):
    """Every number of the next steps, the averaged quantile included, is that of the run that went on."""
    for found, path, iteration in ranks[n](resume, root / "model", root / name, layout):
        assert path == f"step_{BEFORE:08d}"
        assert iteration == BEFORE + AFTER
        assert gap(saved[name], found) < 1e-5


def test_negative_control(ranks, root, saved):
    """One step counter for all parameters, as Megatron leaves it: the step after next is wrong."""
    found = ranks[1](resume, root / "model", root / "DP2", {}, True)[0][0]
    assert found[0]["loss"] == pytest.approx(saved["DP2"][0]["loss"], abs=1e-6)
    assert abs(found[1]["loss"] - saved["DP2"][1]["loss"]) > 1e-5


def fresh(root):
    """First step from the checkpoint before any step, and without one."""
    from scaleup.trainer import checkpoint

    trainer, micro = resumable(root / "model", {})
    a = take(trainer, micro, 2)
    trainer, micro = resumable(root / "model", {})
    checkpoint.load(root / "DP2" / "step_00000000", trainer)
    assert trainer.iteration == 0
    return a, take(trainer, micro, 2)


def test_checkpoint_before_any_step(ranks, root, saved):
    """A save before the first step changes nothing."""
    ((a, b),) = ranks[1](fresh, root)
    assert gap(a, b) < 1e-6


def mixed(root):
    """What is said when Adam's state does not fit."""
    from scaleup.trainer import checkpoint

    trainer, _ = resumable(root / "model", {})
    path = checkpoint.latest(root / "EP2")
    state = torch.load(path / checkpoint.STATE)
    torch.save(state | {"optimizers": 5}, path / checkpoint.STATE)
    try:
        checkpoint.load(path, trainer)
    except ValueError as error:
        return str(error)
    finally:
        torch.save(state, path / checkpoint.STATE)


def test_errors(ranks, root, saved, tmp_path):
    """State of another number of optimizers is refused; an empty folder has no checkpoint."""
    from scaleup.trainer import checkpoint

    assert "state of 5 optimizers" in ranks[1](mixed, root)[0]
    assert checkpoint.latest(tmp_path) is None
