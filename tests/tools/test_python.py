"""`simlab.compare` is the command: the same settings, the same rows."""

import pytest
from small_run import TINY

import simlab
from simlab.study.strict import ConfigError
from simlab.tools.folders import different


def flat(settings):
    """Options by their names on the command line."""
    sections = [x for x in settings.values() if isinstance(x, dict)]
    own = {k: x for k, x in settings.items() if not isinstance(x, dict)}
    return own | {k: x for section in sections for k, x in section.items()}


def test_compare_gives_the_table_of_the_run_folder(run, tmp_path):
    """Options by name, with the experiment's own settings below them."""
    options = flat(TINY) | {"feature_scale": 2.0, "lr": 2.0}
    table = simlab.compare(**options, out=tmp_path / "again", workers=1)
    assert table.columns[:3] == ["arm", "method", "lag"]
    assert table["arm"].to_list()[:3] == ["ppo", "none", "ppo@1"]
    assert different(run, tmp_path / "again") == []


def test_errors_are_sentences():
    """An unknown setting, method or experiment, before anything runs."""
    with pytest.raises(ConfigError, match="there is no such setting; did you mean methods"):
        simlab.compare(method=["ppo"])
    with pytest.raises(ValueError, match="no experiment 'e9'; there are"):
        simlab.compare(experiment="e9")
    with pytest.raises(ConfigError, match="no stabilizer 'poo'"):
        simlab.compare(["ppo", "poo"])
