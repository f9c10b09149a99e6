"""pfl's CIFAR-10 benchmark on one device: pfl itself, FedLab, a hand-written loop, undrift.

    PYTHONPATH=FOLDER_WITH_THE_PEERS python benchmarks/peers/cifar.py --json peers_gpu.json
    python benchmarks/peers/cifar.py --tiny --device cpu --peers hand --json out.json

1000 users of 50 examples, 50 of them a round, 5 local steps of batch 10, SGD 0.1, the mean of the
users' models; every 10 rounds 10,000 test images, and loss and accuracy of the round's users before
and after their local training (pfl-research, benchmarks/image_classification, baseline.yaml).

Peers take turns.  A turn is blocks of 10 rounds, each with one evaluation; its first block warms up
and is not counted.  On a GPU the end of a block is an event in the device's own queue, so that no
peer is made to wait there; the device is waited for at the end of a turn.  A peer that cannot be
imported, or fails, is reported in the JSON and the others go on.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from works import versions

EVERY = 10  # rounds from one evaluation to the next
LR = 0.1
PEERS = {  # name: where it is
    "pfl": "pfl_cifar",
    "fedlab": "fedlab_cifar",
    "hand": "hand_cifar",
    "undrift": "undrift_cifar",
    "undrift_bf16": "undrift_bf16_cifar",
    "undrift_scaffold": "undrift_scaffold_cifar",
}


class Work(NamedTuple):
    users: int = 1000
    size: int = 50
    cohort: int = 50
    batch: int = 10
    test: int = 10_000


TINY = Work(users=6, size=10, cohort=2, batch=5, test=20)


class Data(NamedTuple):
    """Channels last, as pfl keeps them; on the CPU."""

    x: Tensor  # [users * size, 32, 32, 3] normalised, user after user
    y: Tensor  # [users * size]
    test_x: Tensor
    test_y: Tensor


class Scores(NamedTuple):
    loss: float
    accuracy: float


class Setting(NamedTuple):
    work: Work
    data: Data
    device: torch.device


Mark = Callable[[], None]


def simple_cnn() -> nn.Sequential:
    """Make the model of 1,626,442 parameters, channels first."""
    net = nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(128, 10),
    )
    for module in net:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return net


@torch.no_grad()
def score(net: nn.Module, x: Tensor, y: Tensor) -> Scores:
    net.eval()
    out = net(x)
    correct = (out.argmax(-1) == y).float().sum().item()
    return Scores(F.cross_entropy(out, y, reduction="sum").item() / len(y), correct / len(y))


def channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2).contiguous()


def load_data(work: Work, folder: Path | None) -> Data:
    """Read four arrays, or make noise around one pattern per class in their shapes."""
    if folder is not None:
        names = ("train_x", "train_y", "test_x", "test_y")
        x, y, test_x, test_y = (np.load(folder / f"{name}.npy") for name in names)
    else:
        maker = np.random.default_rng(0)
        patterns = maker.integers(64, 192, (10, 32, 32, 3))
        y, test_y = (maker.integers(0, 10, n) for n in (work.users * work.size, work.test))
        x, test_x = (
            (patterns[some] + maker.integers(-64, 64, (len(some), 32, 32, 3))).astype(np.uint8)
            for some in (y, test_y)
        )
    x, y = x[: work.users * work.size], y[: work.users * work.size]
    mean, spread = x.mean((0, 1, 2)), x.std((0, 1, 2))
    images = [torch.from_numpy(((v - mean) / spread).astype(np.float32)) for v in (x, test_x)]
    labels = [torch.from_numpy(v.reshape(-1).astype(np.int64)) for v in (y, test_y)]
    return Data(images[0], labels[0], images[1], labels[1])


class Clock:
    """Marks the ends of blocks: on a GPU when the device comes there, else on the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host: list[float] = []
        self.cpu: list[float] = []
        self.events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self.events.append(event)
        self.host.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def wall(self) -> list[float]:
        """Give the times of all marks in seconds; waits for the device."""
        if not self.events:
            return self.host
        torch.cuda.synchronize(self.device)
        return [self.events[0].elapsed_time(event) / 1e3 for event in self.events]


def per_round(marks: list[float]) -> list[float]:
    """Drop the first block, divide the others."""
    blocks = [b - a for a, b in pairwise(marks)]
    return [seconds / EVERY for seconds in blocks[1:]]


class Peer:
    """One peer, its turns so far, and its error if it had one."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.setting = name, setting
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.error, self.runner = "", None
        self.guard(self.build)

    def guard(self, action: Callable[[], None]) -> None:
        if self.error:
            return
        try:
            action()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            print(f"{self.name} failed: {self.error}", file=sys.stderr)
            traceback.print_exc()

    def build(self) -> None:
        torch.manual_seed(0)
        self.runner = import_module(PEERS[self.name]).Runner(self.setting)

    def turn(self, blocks: int) -> None:
        clock = Clock(self.setting.device)
        self.runner.run(blocks + 1, clock.mark)
        wall = clock.wall()
        if len(wall) != blocks + 2:
            raise RuntimeError(f"{len(wall)} marks, expected {blocks + 2}")
        self.wall += per_round(wall)
        self.cpu += per_round(clock.cpu)

    def report(self) -> dict[str, Any]:
        if self.error:
            return {"error": self.error}
        return {
            "seconds_per_round": statistics.median(self.wall),
            "cpu_seconds_per_round": statistics.median(self.cpu),
            "lowest": min(self.wall),
            "highest": max(self.wall),
            "rounds_timed": EVERY * len(self.wall),
            "seconds_per_round_by_block": self.wall,
            "evaluations": [list(one) for one in self.runner.central],
            "user_metrics": self.runner.user_metrics,
            "versions": versions(self.runner.packages),
            "note": self.runner.note,
        }


def machine(device: torch.device) -> dict[str, Any]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
    found["tf32"] = {
        "convolutions": torch.backends.cudnn.allow_tf32,
        "matmuls": torch.backends.cuda.matmul.allow_tf32,
    }
    return found


def parse() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    arguments.add_argument(
        "--rounds", nargs="*", default=[], metavar="PEER=ROUNDS", help="timed, over all turns"
    )
    arguments.add_argument("--turns", type=int, default=3)
    arguments.add_argument("--data", type=Path, help="train_x.npy, train_y.npy, test_x.npy, ...")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--json", type=Path, required=True)
    return arguments.parse_args()


def main() -> None:
    asked = parse()
    rounds = {"pfl": 300, "fedlab": 60, "hand": 60, "undrift": 1500}
    rounds |= {"undrift_bf16": 1500, "undrift_scaffold": 1500}
    rounds.update({name: int(n) for name, n in (one.split("=") for one in asked.rounds)})
    work = TINY if asked.tiny else Work()
    if asked.tiny:
        rounds = dict.fromkeys(rounds, EVERY)
    turns = 1 if asked.tiny else asked.turns
    device = torch.device(asked.device)
    setting = Setting(work, load_data(work, asked.data), device)
    peers = [Peer(name, setting) for name in asked.peers]
    for turn in range(turns):
        for peer in peers:
            blocks = max(1, round(rounds[peer.name] / EVERY / turns))
            peer.guard(lambda peer=peer, blocks=blocks: peer.turn(blocks))
            if peer.wall and not peer.error:
                print(
                    f"turn {turn}: {peer.name} {1e3 * statistics.median(peer.wall):.2f} ms a round"
                )
            # what was measured survives a time limit: name those first that take longest
            write(asked.json, work, device, [one for one in peers if one.wall or one.error])


def our_commit() -> dict[str, str]:
    """Name the commit of undrift, if it is there."""
    try:
        from undrift.experiment.environment import commit
    except ImportError:
        return {}
    known = commit()
    return {} if known is None else {"commit": known}


def write(path: Path, work: Work, device: torch.device, peers: list[Peer]) -> None:
    asked = " ".join(["python benchmarks/peers/cifar.py", *sys.argv[1:]])
    found: dict[str, Any] = {"command": asked.replace(str(path), path.name)}
    found |= {"work": {**work._asdict(), "evaluation_every": EVERY}, "machine": machine(device)}
    found |= our_commit()
    found["peers"] = {peer.name: peer.report() for peer in peers}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.modules["cifar"] = sys.modules["__main__"]  # the peers import this module by its name
    with tempfile.TemporaryDirectory() as scratch:
        tempfile.tempdir = scratch
        main()
