"""No operation on the disk, and no moment of a signal, is a bad one to stop a whole command."""

from __future__ import annotations

import pytest

from .forked import ask

NAMES = ("run", "fleet", "compare", "reproduce", "train-agent")
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
LONG = 3000  # seconds for all operations of a command


@pytest.fixture(autouse=True)
def agents(request):
    if "train-agent" in request.node.name:
        pytest.importorskip("gymnasium")
        pytest.importorskip("stable_baselines3")


@pytest.mark.parametrize(
    "plans",
    [
        ["run 57 1 1 before SIGTERM", "fleet 111 1 1 before SIGHUP"],
        ["compare 301 1 1 before SIGINT"],
        ["reproduce 95 1 1 before"],
        ["train-agent 121 1 1 before"],
    ],
    ids=lambda plans: plans[0].partition(" ")[0],
)
def test_a_command_that_is_stopped_goes_on_to_the_same_files(tmp_path, plans):
    told = ask("commands", tmp_path, *plans)
    for plan in plans:
        name, _, _, times, *moments = plan.split()
        assert told[name]["operations"] > 100, told
        assert all(told[name][moment] == int(times) for moment in moments), told


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "half", "after"])
@pytest.mark.parametrize("name", NAMES)
def test_a_command_may_be_killed_at_every_operation(tmp_path, name, moment):
    told = ask("commands", tmp_path, f"{name} 1 1 9999 {moment}", patience=LONG)[name]
    assert told[moment] >= told["operations"] * (0.15 if moment == "half" else 0.9), told


@pytest.mark.slow
@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("name", NAMES)
def test_signals_at_every_seventh_operation_lose_nothing(tmp_path, name, how):
    told = ask("commands", tmp_path, f"{name} 1 7 9999 {how}", patience=LONG)[name]
    assert told[how] >= told["operations"] / 8, told


@pytest.mark.slow
@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("name", NAMES)
def test_signals_at_a_hundred_random_moments_lose_nothing(tmp_path, name, how):
    told = ask("commands", tmp_path, name, how, "100", main="at_random", patience=LONG)
    assert told["stopped"] + told["complete"] == 100 and told["stopped"] >= 1, told
