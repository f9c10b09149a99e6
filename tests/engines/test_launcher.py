"""What is decided before any cluster is there: versions, shares, who is let in."""

import os
import sys

import pytest

import undrift as fl
from undrift.engines import ray_cluster as launcher
from undrift.engines.ray_cluster import Each, Resources, share_out
from undrift.errors import ConfigError, MissingExtra
from undrift.experiment import EngineSettings
from undrift.testing.world import tiny_world


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """Give settings back afterwards."""
    for name in (launcher.MODE, launcher.TOKEN, launcher.NICENESS, launcher.LOOPBACK):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("version", ["1.13.0", "2.9.3", "2.53.0", "2.53.1rc1"])
def test_an_old_ray_is_refused(version):
    with pytest.raises(ConfigError, match=rf"Ray {version} is too old.*2\.54 or later"):
        launcher.check_version(version)


@pytest.mark.parametrize("version", ["2.54.0", "2.60.0", "2.60.0.dev1", "3.0.0"])
def test_a_new_ray_is_taken(version):
    launcher.check_version(version)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'undrift\[ray\]'"):
        launcher.load_ray()


def test_a_cluster_without_a_token_is_not_started(monkeypatch):
    monkeypatch.setenv(launcher.MODE, "disabled")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=disabled lets anybody"):
        launcher.connect()


def test_a_token_and_loopback_are_set_before_ray_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with launcher._closed(None):
        assert os.environ[launcher.MODE] == "token" and len(os.environ[launcher.TOKEN]) == 64
        assert os.environ[launcher.LOOPBACK] == "0"
        first = os.environ[launcher.TOKEN]
    assert launcher.LOOPBACK not in os.environ  # others may start clusters of their own
    with launcher._closed(None):
        assert os.environ[launcher.TOKEN] == first  # a token that is there is kept


def test_the_settings_of_a_given_cluster_are_left_alone():
    with launcher._closed("auto"):
        assert launcher.MODE not in os.environ and launcher.TOKEN not in os.environ


@pytest.mark.parametrize(
    ("there", "asked", "found"),
    [
        (Resources(1, 8, 0), (None, None), (1, Each(0, 0, 8))),  # one per machine
        (Resources(3, 24, 0), (None, None), (3, Each(0, 0, 8))),
        (Resources(1, 2, 0), (3, None), (3, Each(0, 0, 1))),
        (Resources(1, 16, 4), (None, None), (4, Each(0, 1, 4))),  # one per GPU
        (Resources(1, 16, 4), (None, 2), (2, Each(0, 2, 8))),
        (Resources(1, 16, 1), (2, 0.5), (2, Each(0, 0.5, 8))),
        (Resources(1, 16, 4), (None, 0), (1, Each(0, 0, 16))),
    ],
)
def test_who_gets_what(there, asked, found):
    assert share_out(there, *asked) == found


def test_in_a_shared_cluster_processors_are_reserved():
    assert share_out(Resources(2, 16, 0), 3, None, alone=False) == (3, Each(5.0, 0, 5))
    assert share_out(Resources(1, 2, 0), 4, None, alone=False) == (4, Each(0.5, 0, 1))


def test_more_gpus_than_there_are_are_refused():
    with pytest.raises(ConfigError, match=r"3 actors with 1 GPUs each do not fit: .* has 2"):
        share_out(Resources(1, 8, 2), 3, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": -1}, "gpus = -1"),
        ({"gpus": "all"}, "gpus = 'all'"),
        ({"timeout": 0}, "timeout = 0"),
        ({"address": 6379}, "address must be a text"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(options, words):
    with pytest.raises(ConfigError, match=words):
        tiny_world().trainer(fl.fedavg(), engine="ray", **options)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"actors": 2}, "engine.actors belongs to engine.use = 'ray'"),
        ({"use": "reference", "gpus": 1}, "engine.gpus belongs to"),
        ({"use": "ray", "actors": 0}, "engine.actors"),
        ({"use": "ray", "gpus": -0.5}, "engine.gpus = -0.5"),
        ({"use": "ray", "gpus": "1"}, "engine.gpus must be a number"),
        ({"use": "ray", "address": 1}, "engine.address must be a text"),
        ({"use": "rey"}, "Did you mean 'ray'"),
    ],
)
def test_bad_engine_sections_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        EngineSettings(**settings)


def test_an_engine_section_is_read_and_written():
    text = 'model = "logistic"\ndata = "digits"\nalgorithm = "fedavg"\nrounds = 1\n'
    text += '[partition]\nuse = "iid"\nclients = 4\n'
    text += '[engine]\nuse = "ray"\nactors = 2\ngpus = 0.5\naddress = "auto"\n'
    made = fl.Experiment.from_toml(text, trust=True)
    assert made.engine == EngineSettings("ray", actors=2, gpus=0.5, address="auto")
    assert fl.Experiment.from_toml(made.to_toml(), trust=True).engine == made.engine
