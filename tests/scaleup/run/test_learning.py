"""tiny_cpu as users run it, cut short: the engine in bf16, 16 prompts, 8 answers. Chance is 0.125.

One step has 128 answers of 12 tokens, so the standard error of a reward at chance is 0.0085.
reports/scaleup has the whole curves.
"""

import pytest

from scaleup.recipe import load
from scaleup.run.cluster import cluster

STEPS = 45


@pytest.fixture(scope="module")
def recipe():
    """The recipe with fewer steps."""
    return load("tiny_cpu", {"training.steps": STEPS, "seeds": 2})


@pytest.fixture(scope="module")
def run(recipe):
    """Its engines."""
    with cluster(recipe.world) as run:
        yield run


@pytest.mark.parametrize(
    ("method", "lag", "least"), [("sat-grpo", "1", 0.5), ("gspo", "1", 0.25), ("grpo", "8", 0.16)]
)
def test_reward_rises(recipe, run, tmp_path, method, lag, least):
    """From chance to `least` and more over the last five steps, at the ages that the lag allows."""
    spec = next(x for x in recipe.cells() if (x.arm.label, x.lag) == (method, lag))
    rows = list(run(spec, tmp_path))
    reward = [row["reward"] for row in rows]
    assert len(reward) == STEPS
    assert sum(reward[:3]) / 3 == pytest.approx(0.125, abs=0.025)
    assert sum(reward[-5:]) / 5 > least
    assert max(row["age_max"] for row in rows) == 2 * int(lag) - 1
    assert all(row["updated"] for row in rows)
