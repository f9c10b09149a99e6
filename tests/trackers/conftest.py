"""Runs to track, in a place without network."""

import os
import socket

import pytest

from undrift.experiment.events import RunInfo
from undrift.trackers import open_trackers

# Tests import the packages before a tracker does, which would set these.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

TABLES = {
    "algorithm": {"name": "scaffold", "lr": 0.1, "nesterov": True},
    "seeds": [1, 2],
    "note": "x" * 9000,
}


class Story:
    """Tells trackers of runs in the folder of one experiment."""

    def __init__(self, folder):
        self.folder, self.opened = folder, []

    def open(self, name, **settings):
        """Open a tracker; it is closed after the test, as it would be by a process that ends."""
        self.opened += open_trackers([name], self.folder, **{name: settings})
        return self.opened[-1]

    def run(self, label="scaffold", seed=1, rounds=6):
        place = self.folder / label.replace("/", "_") / f"seed-{seed}"
        place.mkdir(parents=True, exist_ok=True)
        return RunInfo("digits", label, seed, rounds, place, TABLES)

    @staticmethod
    def records(first, last, accuracy=0.1):
        return [
            {
                "round": number,
                "test_accuracy": accuracy * number,
                "train_loss": float("nan") if number == 2 else 1 / number,
                "client_steps": 40,
                "per_class": [0.5, 0.6],
                "clients": [3, 1, 4],
            }
            for number in range(first, last + 1)
        ]

    def tell(self, tracker, run, past, new, end="finished"):
        """Start a run after the rounds of `past`, go on with `new`, and end it."""
        tracker.started(run, past)
        for record in new:
            tracker.round(run, record)
        if end == "finished":
            tracker.finished(run, [*past, *new])
        elif end is not None:
            tracker.failed(run, end)


@pytest.fixture
def story(tmp_path):
    told = Story(tmp_path / "out")
    yield told
    for tracker in told.opened:
        tracker.close()


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """Let nothing out; where a tracker would keep things at home, give it another one."""
    tried = []
    reach = socket.socket.connect

    def connect(self, address):
        if self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "localhost"):
            return reach(self, address)
        tried.append(address)
        raise OSError(f"no network in tests: {address}")

    def resolve(host, *more, **named):
        tried.append(host)
        raise OSError(f"no network in tests: {host}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name in (
        "HOME",
        "XDG_CONFIG_HOME",
        "WANDB_CACHE_DIR",
        "WANDB_CONFIG_DIR",
        "WANDB_DATA_DIR",
    ):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    yield
    assert tried == []
