"""Every example runs, and README shows what runs."""

import importlib.util
import math
import os
import re
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import on_ranks

from simlab.contract.batches import ragged
from simlab.contract.promises import check
from simlab.core.tokens import TokenBatch
from simlab.stabilizers import NAMES, STABILIZERS, bind, load, parts

ROOT = Path(__file__).parent.parent
PLUG_IN = ROOT / "examples/plug_in.py"
WHOLE_BATCH = [name for name in NAMES if "whole_batch" in parts(name)]


def printed(ranks=1):
    """q and the norm of the gradient that the first of these ranks prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {
            "WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free.getsockname()[1],
        }
    world = {k: str(v) for k, v in world.items()} | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, PLUG_IN],
            env=os.environ | world | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, said
    assert [out for out, _ in said[1:]] == [""] * (ranks - 1)
    return [float(x) for x in re.fullmatch(r"q (\S+) gradient (\S+)\n", said[0][0]).groups()]


@pytest.mark.slow
def test_plug_in_on_one_rank_and_on_two():
    """Two gloo ranks, started as torchrun does and reducing in place, have one process's numbers."""
    q, norm = printed()
    q_of_two, norm_of_two = printed(ranks=2)
    assert q > 0
    assert q_of_two == q
    assert norm_of_two == pytest.approx(norm, rel=1e-5)


def test_readme_shows_the_step_of_plug_in():
    """README's lines stand in the example, word for word."""
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert shown.count("\n") == 10
    assert textwrap.indent(shown, "    ") in PLUG_IN.read_text()


@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_a_reducer_may_work_in_place(name):
    """One that returns None, as torch.distributed.all_reduce does, gives the numbers of one that
    returns the sum, and of a single rank that holds both shards."""
    method = bind(name)
    near, far = ragged(0), ragged(1)
    far = replace(far, logp_mu=far.logp.detach() - 2 * (far.logp - far.logp_mu).detach())
    shards = [[near], [far]]

    def in_place(reduce):
        def all_reduce(x):
            x.copy_(reduce(x))

        return all_reduce

    whole = method.stats(shards[0] + shards[1])
    returned = on_ranks(2, lambda i, reduce: method.stats(shards[i], reduce))
    written = on_ranks(2, lambda i, reduce: method.stats(shards[i], in_place(reduce)))
    alone = method.stats(shards[0])
    assert any(not torch.equal(alone[key], whole[key]) for key in whole)
    for key, value in whole.items():
        for stats in (*returned, *written):
            torch.testing.assert_close(stats[key], value)


def test_gate_shares_of_ten_tokens(monkeypatch):
    """One token of ten is gated; what it carries, by hand. The method is PPO, and keeps the contract."""
    monkeypatch.setattr("simlab.stabilizers.STABILIZERS", dict(STABILIZERS))
    method = bind(load(ROOT / "examples/gate_shares.py"))
    check(method)
    d = torch.tensor([0.0] * 8 + [-0.1, 0.5])
    b = TokenBatch(
        d - 2.0, torch.full((10,), -2.0), torch.ones(10), torch.ones(10, dtype=torch.bool),
        torch.arange(10), tv=torch.full((10,), 0.2), uniform=torch.arange(10) / 10,
        age=torch.arange(10),
    )  # fmt: skip
    out = method.surrogate(b, **method.stats([b]))
    assert torch.equal(out.S, bind("ppo").surrogate(b).S)
    mean = {k: float(v.value.double().mean()) for k, v in out.diagnostics.items()}
    assert mean["share_tail_tokens"] == mean["share_age_tokens"] == pytest.approx(0.1)
    off = [1 - math.exp(-0.1), math.exp(0.5) - 1]
    assert mean["share_tail_sampled_tv"] == pytest.approx(off[1] / 20)
    assert mean["share_all_sampled_tv"] == pytest.approx(sum(off) / 20)
    assert mean["share_tail_outward_gain"] == pytest.approx(off[1] / 10)
    assert mean["share_random_exact_tv"] == pytest.approx(0.02)


def test_pairs_of_a_committed_run():
    """Failures are counted from the runs, verdicts are those of the page's rules, a pair that is not there is said."""
    spec = importlib.util.spec_from_file_location("pairs", ROOT / "examples/pairs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = module.pairs(ROOT / "reports/compare/e1", ["ppo-dual:ppo", "ppo:ppo-dual"])
    said = {(r["arm"], r["lag"]): r for r in rows.iter_rows(named=True)}
    assert len(rows) == 8
    assert (said["ppo-dual", "24"]["failed"], said["ppo-dual", "24"]["failed_other"]) == (0, 23)
    assert said["ppo-dual", "24"]["risk"] == "fails less"
    assert said["ppo", "24"]["risk"] == "fails more"
    assert said["ppo-dual", "1"]["risk"] == "not separated"
    with pytest.raises(ValueError, match="has none of satt:ppo"):
        module.pairs(ROOT / "reports/compare/e1", ["satt:ppo"])
