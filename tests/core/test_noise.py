"""Secret noise: as normal as it should be, one purpose one draw, and a key that goes nowhere."""

import copy
import json
import pickle

import pytest
import torch

import undrift as fl
from undrift.core.noise import Secret, hidden
from undrift.errors import ConfigError


def test_noise_is_standard_normal():
    drawn = Secret.drawn().normal(1_000_000, "a purpose")
    assert drawn.dtype == torch.float64
    assert float(drawn.std()) == pytest.approx(1.0, rel=0.005)
    assert abs(float(drawn.mean())) < 0.005
    assert float((drawn.abs() > 3).double().mean()) == pytest.approx(0.0027, rel=0.1)
    assert float(drawn[:-1].dot(drawn[1:])) / 1e6 < 0.005


def test_one_purpose_one_draw():
    secret = Secret.drawn()
    purposes = [("row", 1, 2), ("row", 2, 1), ("row", 12, 0), ("row", 1, 20), ("after_round", 1, 2)]
    drawn = [secret.normal(100, *purpose) for purpose in purposes]
    assert torch.equal(drawn[0], secret.normal(100, *purposes[0]))
    others = [Secret.drawn().normal(100, "row", 1, 2), secret.derived("x").normal(100, "row", 1, 2)]
    together = torch.corrcoef(torch.stack([*drawn, *others])) - torch.eye(7).double()
    assert float(together.abs().max()) < 0.5


def test_a_key_is_not_shown_not_pickled_and_not_copied():
    key = bytes(range(32))
    secret = Secret(key)
    assert repr(secret) == str(secret) == f"{secret}" == "Secret(...)"
    for leak in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(ConfigError, match="not sent"):
            leak(secret)
    with pytest.raises(TypeError):
        json.dumps(secret)
    assert secret != Secret(key)  # comparing would tell


@pytest.mark.parametrize("key", [b"", b"7", bytes(31), bytes(33)])
def test_a_short_key_could_be_guessed(key):
    with pytest.raises(ConfigError, match="32 bytes"):
        Secret(key)


def test_rows_never_leave_without_their_noise():
    """Whoever forgets to draw it gets an error, not clean means."""
    algo = fl.rfedavg(0.1, noise=fl.FeatureNoise())
    rows = (torch.zeros(3, 5),)
    for noise in ((), ((),)):
        with pytest.raises(ConfigError, match="no noise was drawn"):
            hidden(algo, rows, noise)
    assert hidden(fl.rfedavg(0.1), rows, ()) is rows
    assert not torch.equal(hidden(algo, rows, (torch.ones(3, 5).double(),))[0], rows[0])
