"""`undrift verify`: the quick half of it; the whole is run by hand."""

from __future__ import annotations

import math

import pytest

from undrift.cli import main
from undrift.errors import ConfigError
from undrift.rules.client import Prox
from undrift.rules.named import catalogue
from undrift.verify import verify, verify_together
from undrift.verify.block_cases import BLOCK_CASES
from undrift.verify.cases import CASES
from undrift.verify.identities import IDENTITIES
from undrift.verify.table import LONGHAND, Verdict, names

# ComFed's 16 cells have their tests in proofs/: one row of them is enough here
QUICK = [i for i in IDENTITIES if not i.of.startswith("comfed:") or i.of.endswith("-yogi")]


@pytest.mark.parametrize("identity", QUICK, ids=lambda i: f"{i.of}: {i.says}")
def test_every_identity_holds(identity) -> None:  # type: ignore[no-untyped-def]
    assert identity.difference() <= identity.limit


@pytest.mark.parametrize("case", BLOCK_CASES, ids=range(len(BLOCK_CASES)))
def test_private_blocks_equal_the_long_hand_loop(case) -> None:  # type: ignore[no-untyped-def]
    assert case.difference() <= LONGHAND


def test_every_algorithm_has_identities_and_a_long_hand_loop() -> None:
    looped = {case.of for case in CASES} | {case.of for case in BLOCK_CASES}
    assert looped == set(names()) == set(catalogue())
    # FedDC becomes others only with parts of it left out, which tests/proofs do
    assert {i.of for i in IDENTITIES} == set(names()) - {"feddc"}


@pytest.mark.parametrize(
    "name",
    [
        *("adabest", "rfedavg_plus", "comfed:nova-yogi"),
        "fedrl",  # its loop reads the policy that is shipped
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "feddyn")),
    ],
)
def test_rows_are_green(name: str) -> None:
    (found,) = verify([name])
    assert found.holds, found


def test_an_algorithm_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'scaffold'"):
        verify(["scafold"])


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "fedprox", "--all"]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 hold" in out and "mu = 0: FedAvg" in out


def test_a_red_row_is_red() -> None:
    good = Verdict("x", (("a", 1e-16, True),), 1e-16, 1e-15, math.nan, math.nan, 1.0, 1.0)
    assert good.holds
    assert not good._replace(longhand=1e-6).holds
    assert not good._replace(longhand=math.nan).holds
    assert not good._replace(engines=1e-6).holds
    assert not good._replace(optimum=1e-3).holds
    assert not good._replace(identities=(("a", 1.0, False),)).holds
    assert not good._replace(problem="it fails").holds


@pytest.mark.slow
def test_processes_give_the_same_rows_in_order() -> None:
    wanted = ["fedprox", "fedavg"]
    together = list(verify_together(wanted, processes=2))
    assert [one.name for one in together] == wanted
    assert repr(together) == repr(list(verify(wanted)))  # NaN is not equal to itself


def test_a_planted_mistake_turns_a_row_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedProx that forgets its pull: the long-hand loop sees it, the identity at mu = 0 cannot."""
    monkeypatch.setattr(Prox, "direction", lambda self, g, view: g)
    (found,) = verify(["fedprox"])
    assert not found.holds and found.longhand > 1e-6 and found.identities[0][2]
