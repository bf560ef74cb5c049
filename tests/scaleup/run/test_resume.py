"""The batch of a step by hand, and the state of a run through a checkpoint; no engine, no trainer."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scaleup.recipe import load
from scaleup.rollout.sample import Sample
from scaleup.run.batch import Group, make_batch
from scaleup.run.resume import STATE, Checkpoints, Progress
from simlab.core.advantages import dr_grpo
from simlab.study.settings import RunError

RUN = load("tiny_cpu").cells()[0]


def sample(output, version, experts=None):
    """A sample after the prompt 7 8."""
    n = len(output)
    return Sample([7, 8], output, -torch.ones(n), torch.full((n,), version), experts, "length", 0)


def test_a_batch_by_hand():
    """Two prompts of two responses: one group teaches, ages are steps minus versions."""
    groups = [
        Group([sample([1, 2], 3), sample([3], 4)], [0.0, 1.0]),
        Group([sample([4], 4), sample([5], 4)], [0.5, 0.5]),
    ]
    batch = make_batch(5, groups, dr_grpo)
    assert (batch.reward, batch.flat_groups, batch.length) == (0.5, 0.5, 1.25)
    assert batch.columns == {
        "group": [0, 0, 1, 1],
        "reward": [0.0, 1.0, 0.5, 0.5],
        "finish_reason": ["length"] * 4,
    }
    assert [r.advantage for r in batch.responses] == [-0.5, 0.5, 0.0, 0.0]
    assert [r.tokens.tolist() for r in batch.responses][:2] == [[7, 8, 1, 2], [7, 8, 3]]
    assert [r.fields["age"].tolist() for r in batch.responses] == [[2, 2], [1], [1], [1]]
    assert {r.prompt for r in batch.responses} == {2}
    assert {tuple(r.fields) for r in batch.responses} == {("age",)}
    wanted = ("reward", "group", "position", "uniform")
    more = make_batch(5, groups, dr_grpo, wanted, np.random.default_rng(1)).responses
    assert [r.fields["reward"] for r in more] == [0.0, 1.0, 0.5, 0.5]
    assert [r.fields["group"] for r in more] == [0, 0, 1, 1]
    assert [r.fields["position"].tolist() for r in more] == [[0, 1], [0], [0], [0]]
    drawn = torch.cat([r.fields["uniform"] for r in more])
    assert drawn.tolist() == np.random.default_rng(1).random(5).tolist()
    words = "5 0 0 [1, 2]", "5 0 1 [3]", "5 1 0 [4]", "5 1 1 [5]"
    assert batch.digest == sha256("".join(words).encode()).hexdigest()[:16]


class Ranks:
    """Trainers whose checkpoint is an empty folder, or that fail to write one."""

    def __init__(self, fails=False):
        self.fails = fails

    def on_all_ranks(self, method, folder, what):
        """Save step 4."""
        path = Path(folder) / "step_00000004"
        path.mkdir(parents=True, exist_ok=True)
        (path / "trainer.pt").touch()
        if self.fails:
            raise RunError(f"{what}: no room")
        return [str(path)]


def test_progress_through_a_checkpoint(tmp_path):
    """What waits to be trained on comes back as it was; the checkpoint before is removed."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", RUN)
    assert checkpoints.latest() == (None, Progress())
    old = tmp_path / "checkpoints" / "step_00000002"
    old.mkdir(parents=True)
    group = Group([sample([1, 2], 3, torch.ones(3, 2, 2)), sample([3], 4)], [0.25, 1.0])
    checkpoints.save(Ranks(), Progress(4, 3, 6, {5: {1: group}}))
    path, progress = checkpoints.latest()
    assert path == tmp_path / "checkpoints" / "step_00000004"
    assert not old.exists()
    assert (progress.step, progress.served, progress.begun) == (4, 3, 6)
    assert progress.ready.keys() == {5}
    (samples, rewards) = progress.ready[5][1]
    assert rewards == [0.25, 1.0]
    for mine, other in zip(samples, group.samples, strict=True):
        for name, value in vars(other).items():
            read = getattr(mine, name)
            assert torch.equal(read, value) if torch.is_tensor(value) else read == value, name


def test_checkpoints_of_another_run_and_torn_ones(tmp_path):
    """Each is one sentence that names the file, or the setting that differs."""
    checkpoints = Checkpoints(tmp_path, RUN)
    checkpoints.save(Ranks(), Progress(4, 4, 4))
    other = load("tiny_cpu", {"training.lr": 1.0}).cells()[0]
    with pytest.raises(RunError, match=r"step_00000004: is a checkpoint of another run, its train"):
        Checkpoints(tmp_path, other).latest()
    state = tmp_path / "step_00000004" / STATE
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(RunError, match=r"run\.pt: is no state of a run"):
        checkpoints.latest()


def test_a_checkpoint_that_fails_leaves_the_one_before(tmp_path):
    """The disk is full: the sentence says how much was free, and what is torn is removed."""
    checkpoints = Checkpoints(tmp_path, RUN)
    whole = tmp_path / "step_00000002"
    whole.mkdir()
    (whole / STATE).touch()
    with pytest.raises(RunError, match=r"^checkpoint of step 4 in .*: no room \([\d,]+ MB of the"):
        checkpoints.save(Ranks(fails=True), Progress(4, 4, 4))
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000002"]


def test_an_evaluation_is_due_when_a_push_passes_a_multiple():
    """Every 4 steps, at the push that comes at or after them."""
    from scaleup.run.evaluation import Evaluator

    spec = SimpleNamespace(world=SimpleNamespace(evaluate_every=4))
    evaluator = SimpleNamespace(spec=spec)
    due = [
        (s, b)
        for b, s in ((0, 3), (3, 6), (6, 7), (7, 8), (8, 16))
        if Evaluator.due(evaluator, s, b)
    ]
    assert due == [(6, 3), (8, 7), (16, 8)]
