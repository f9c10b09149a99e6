"""`undrift verify`: the quick half of it; the whole is run by hand."""

from __future__ import annotations

import math

import pytest

from undrift.cli import main
from undrift.errors import ConfigError
from undrift.verify import verify
from undrift.verify.identities import IDENTITIES
from undrift.verify.table import Verdict, names


@pytest.mark.parametrize("identity", IDENTITIES, ids=lambda i: f"{i.of}: {i.says}")
def test_every_identity_holds(identity) -> None:  # type: ignore[no-untyped-def]
    assert identity.difference() <= identity.limit


@pytest.mark.parametrize(
    "name", ["fedavg", "feddyn", "adabest", "rfedavg_plus", "comfed:nova-yogi"]
)
def test_rows_are_green(name: str) -> None:
    (found,) = verify([name])
    assert found.holds, found


def test_an_algorithm_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'scaffold'"):
        verify(["scafold"])
    assert "fedvra_u" not in names()


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "fedprox", "--all"]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 hold" in out and "mu = 0: FedAvg" in out


def test_a_red_row_is_red() -> None:
    good = Verdict("x", (("a", 1e-16, True),), 1e-15, math.nan, math.nan, 1.0, 1.0)
    assert good.holds
    assert not good._replace(engines=1e-6).holds
    assert not good._replace(optimum=1e-3).holds
    assert not good._replace(identities=(("a", 1.0, False),)).holds
    assert not good._replace(problem="it fails").holds
