"""A finished run folder of a few seconds, shared by the tests of this folder."""

import pytest

from simlab.simulator.compare import compare
from simlab.simulator.config import Config

TINY = {
    "methods": ("ppo", "none"),
    "lags": ("0", "1"),
    "seeds": 2,
    "draws": 2,
    "world": {"prompts": 2, "horizon": 3, "vocab": 3, "answers": 2, "features": 4},
    "training": {"steps": 8},
}


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Two methods at two lags, two seeds each."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    compare(Config(**TINY), "e1", folder, 1)
    return folder
