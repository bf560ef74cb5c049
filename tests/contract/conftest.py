"""A user's stabilizer in a file of its own."""

import pytest

from simlab.stabilizers import NAMES, STABILIZERS


@pytest.fixture
def own(tmp_path):
    """Write a file with a stabilizer; the registry is as before afterwards."""

    def write(name, text):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return path

    yield write
    for name in STABILIZERS.keys() - set(NAMES):
        del STABILIZERS[name]
