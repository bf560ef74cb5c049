"""Save, kill, resume: the next step is that of the run that went on, in any layout."""

import gc
import multiprocessing

import pytest
import torch

from scaleup import tiny
from scaleup.launch import Ranks

BEFORE, AFTER = 2, 2  # steps up to the checkpoint, and past it
FROM = {"DP2": {}, "EP2": {"ep": 2}}
RESUMED = [
    ("DP2", 2, {}),
    ("DP2", 1, {}),
    ("DP2", 2, {"pp": 2}),
    ("DP2", 2, {"ep": 2}),
    ("EP2", 1, {}),
    ("EP2", 2, {"ep": 2}),
    ("EP2", 2, {"tp": 2, "ep": 2}),
]


@pytest.fixture(scope="module")
def ranks():
    """One process, and two that share a model."""
    with Ranks(1, timeout=300) as one, Ranks(2, timeout=300) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a tiny mixture of experts in it."""
    folder = tmp_path_factory.mktemp("run")
    tiny.write(folder / "model", "qwen3_moe", seed=1)
    return folder


def start(root, layout):
    """A trainer and its micro-batches, and leave to start Megatron's writer."""
    from scaleup import model, weights
    from scaleup.responses import Response, share
    from scaleup.train import Settings, Trainer
    from simlab.stabilizers import bind

    multiprocessing.current_process()._config["daemon"] = False  # a rank may have children
    layout = model.Layout(**layout)
    model.start(layout)
    built = model.build(model.read_config(root / "model"), layout)
    weights.load(built, weights.read(root / "model"))
    settings = Settings(lr=1e-3, quantile="ema", decay=0.5, weight_decay=0.1)
    trainer = Trainer(built, bind("sat"), settings)
    draw = torch.Generator().manual_seed(3)
    rows = []
    for i in range(8):
        tokens = torch.randint(512, (6 + i,), generator=draw)
        logp_mu = -6.5 + 0.5 * torch.randn(3 + i, generator=draw)
        rows.append(Response(tokens, 3, logp_mu, (-1.0) ** (i // 3)))
    return trainer, trainer.collate(share(rows, 2)[trainer.dp_rank])


def steps(trainer, micro, n):
    """Loss, gradient norm and quantile of n steps."""
    found = [trainer.step(micro) for _ in range(n)]
    return [(x.loss, x.grad_norm, float(x.stats["q"])) for x in found]


def train_and_save(root, name, layout):
    """Steps past the checkpoint."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from scaleup import checkpoint

    trainer, micro = start(root, layout)
    checkpoint.save(root / name, trainer)  # before any step: a state of zeros
    steps(trainer, micro, BEFORE)
    checkpoint.save(root / name, trainer, {"sampler": torch.arange(3), "version": 7})
    filesystem_async._results_queue = None  # Megatron's helper would outlive a killed rank
    gc.collect()
    return steps(trainer, micro, AFTER)


def resume(root, name, layout, share_steps=False):
    """The same steps from the checkpoint."""
    from scaleup import checkpoint

    trainer, micro = start(root, layout)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()  # nothing is left of the first weights
    path = checkpoint.latest(root / name)
    extra = checkpoint.load(path, trainer)
    if share_steps:
        for optimizer in checkpoint._optimizers(trainer):
            states = list(optimizer.optimizer.state.values())
            for held in states:
                held["step"] = states[0]["step"]
    return steps(trainer, micro, AFTER), path.name, trainer.iteration, extra


@pytest.fixture(scope="module")
def saved(root):
    """Runs that were saved, went on, and were killed; a torn save lies beside the last one."""
    found = {}
    for name, layout in FROM.items():
        two = Ranks(2, timeout=300)
        found[name] = two(train_and_save, root, name, layout)[0]
        two.close(kill=True)
        (root / name / "step_00000009.part").mkdir()
    return found


@pytest.mark.parametrize(("name", "n", "layout"), RESUMED)
def test_resume(ranks, root, saved, name, n, layout):
    """Loss, norm and the averaged quantile of the next steps are those of the run that went on."""
    for found, path, iteration, extra in ranks[n](resume, root, name, layout):
        print(name, layout, found, saved[name])
        assert path == f"step_{BEFORE:08d}"
        assert iteration == BEFORE + AFTER
        assert extra["version"] == 7
        assert extra["sampler"].tolist() == [0, 1, 2]
        for a, b in zip(found, saved[name], strict=True):
            assert a[0] == pytest.approx(b[0], abs=1e-6)
            assert a[1:] == pytest.approx(b[1:], rel=1e-5)


def test_negative_control(ranks, root, saved):
    """One step counter for all parameters, as Megatron leaves it: the step after next is wrong."""
    found = ranks[1](resume, root, "DP2", {}, True)[0][0]
    assert found[0][0] == pytest.approx(saved["DP2"][0][0], abs=1e-6)
    assert abs(found[1][0] - saved["DP2"][1][0]) > 1e-5


def fresh(root):
    """First step from the checkpoint before any step, and without one."""
    from scaleup import checkpoint

    trainer, micro = start(root, {})
    a = steps(trainer, micro, 2)
    trainer, micro = start(root, {})
    checkpoint.load(root / "DP2" / "step_00000000", trainer)
    assert trainer.iteration == 0
    return a, steps(trainer, micro, 2)


def test_checkpoint_before_any_step(ranks, root, saved):
    """A save before the first step changes nothing."""
    ((a, b),) = ranks[1](fresh, root)
    for x, y in zip(a, b, strict=True):
        assert x == pytest.approx(y, rel=1e-6)


def mixed(root):
    """What is said when Adam's state does not fit."""
    from scaleup import checkpoint

    trainer, _ = start(root, {})
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
    from scaleup import checkpoint

    assert "state of 5 optimizers" in ranks[1](mixed, root)[0]
    assert checkpoint.latest(tmp_path) is None
