"""A round that cannot be recorded gives the bits of one that was, or is an error."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.engines import device_round, graphs
from undrift.errors import ConfigError, TaskError
from undrift.testing.world import numbers


def trainer(**settings: Any) -> fl.Trainer:
    maker = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(n, 6, generator=maker), torch.randint(0, 3, (n,), generator=maker))
        for n in (9, 14, 5, 20)
    ]
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    chosen = {"work": fl.Work(steps=3, batch=5), "sampler": fl.Uniform(3), "graph": True}
    return fl.Trainer(
        fl.Task(net), fl.Federation.of(clients), fl.scaffold(0.1), **chosen | settings
    )


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let every recording fail, as one does that another thread breaks.

    It fails before its body: what a device records is not executed, what a CPU is told is.
    """
    modes: list[str] = []

    @contextmanager
    def recording(graph: Any, *, pool: Any, capture_error_mode: str) -> Any:
        modes.append(capture_error_mode)
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(device_round, "graph_pool", lambda device: object())
    return modes


def test_other_threads_may_use_the_device_while_a_round_is_recorded(spoiled: list[str]) -> None:
    trainer().run(3)
    assert set(spoiled) == {"thread_local"}


def test_a_recording_that_fails_changes_no_bit(
    spoiled: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer()
    one.run(4)
    assert one.engine.plan()["graph"]
    told = [r.message for r in caplog.records if "cannot be recorded" in r.message]
    assert len(told) == len(spoiled) > 0, "tried again and again, or silently"
    monkeypatch.setattr(device_round, "graph_pool", lambda device: None)  # nothing is recorded
    other = trainer()
    other.run(4)
    wanted = numbers(other)
    assert all(torch.equal(v, wanted[n]) for n, v in numbers(one).items())


def test_an_error_of_the_user_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError("no")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    piece = graphs.Piece(lambda: None, object())
    piece()
    with pytest.raises(ConfigError, match="no"):
        piece()


def break_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a driver's error")

    monkeypatch.setattr(device_round.DeviceRound, "run", fail)


def test_before_the_first_round_another_way_may_be_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_rounds(monkeypatch)
    one = trainer()
    one.run(2)
    assert "a driver's error" in caplog.text
    assert one.engine.plan()["graph"] is False, "a resumed run must take the same way"


def test_later_it_may_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    one = trainer()
    one.run(2)
    one.save(tmp_path)
    resumed = trainer()
    assert resumed.load(tmp_path)
    break_rounds(monkeypatch)
    for made in (one, resumed):
        before = numbers(made)
        with pytest.raises(TaskError, match=r"cannot be run as one piece.*a driver's error"):
            made.round()
        assert made.rounds_done == 2
        assert all(torch.equal(v, before[n]) for n, v in numbers(made).items())
