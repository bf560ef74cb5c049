"""A finished run folder of a few seconds, shared by the tests of this folder."""

import pytest
from small_run import TINY

from simlab.simulator.compare import compare
from simlab.simulator.config import Config


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Two methods at two lags, two seeds each."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    compare(Config(**TINY), "e1", folder, 1)
    return folder
