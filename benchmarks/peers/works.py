"""What every simulator is asked to do, and how its cost is counted.  Needs numpy alone.

A peer's script calls `main(run, packages)`.  `run(job, mark)` trains `job.rounds` rounds, calls
`mark` once before the first and once after each, and returns the model's arrays by name.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LR = 0.1
FAMILY = "UNDRIFT_BENCH_FAMILY"  # in the environment of every process that belongs to one run
Weights = dict[str, np.ndarray]


class Linear(NamedTuple):
    inputs: int
    outputs: int

    @property
    def weight(self) -> tuple[int, ...]:
        return (self.outputs, self.inputs)


class Conv(NamedTuple):
    inputs: int
    outputs: int
    kernel: int

    @property
    def weight(self) -> tuple[int, ...]:
        return (self.outputs, self.inputs, self.kernel, self.kernel)


Layer = Linear | Conv | str  # "relu", "pool" (2 x 2), "flatten"


class Work(NamedTuple):
    """Local steps of FedAvg: `cohort` of `clients`, each `steps` batches of its own."""

    layers: tuple[Layer, ...]
    shape: tuple[int, ...]
    classes: int
    clients: int
    cohort: int
    steps: int
    batch: int

    @property
    def size(self) -> int:
        return self.steps * self.batch


MLP = (Linear(784, 100), "relu", Linear(100, 100), "relu", Linear(100, 26))
CNN = (
    *(Conv(3, 64, 5), "relu", "pool", Conv(64, 64, 5), "relu", "pool", "flatten"),
    *(Linear(1600, 384), "relu", Linear(384, 192), "relu", Linear(192, 10)),
)
WORKS = {
    "emnist_mlp": Work(MLP, (784,), 26, 1000, 100, 10, 45),
    "feddyn_cnn": Work(CNN, (3, 32, 32), 10, 100, 10, 10, 50),
}
CHECKED = 5  # clients in the check, all of which take part


def small(work: Work) -> Work:
    """The same models on little work."""
    return work._replace(clients=6, cohort=3, steps=2, batch=4)


def start(work: Work) -> Weights:
    """Make a first model, named as torch.nn.Sequential names it."""
    maker, made = np.random.default_rng(1), {}
    for place, layer in enumerate(work.layers):
        if isinstance(layer, str):
            continue
        bound = 1 / math.sqrt(math.prod(layer.weight[1:]))
        for name, shape in (("weight", layer.weight), ("bias", (layer.outputs,))):
            made[f"{place}.{name}"] = maker.uniform(-bound, bound, shape).astype(np.float32)
    return made


def write_data(work: Work, folder: Path) -> None:
    """Noise around one pattern per class: every model can learn it, so that losses must fall."""
    maker = np.random.default_rng(0)
    count = work.clients * work.size
    y = maker.integers(0, work.classes, count)
    x = maker.standard_normal((count, *work.shape), dtype=np.float32)
    patterns = maker.standard_normal((work.classes, *work.shape), dtype=np.float32) / 2
    for some in np.array_split(np.arange(count), 100):
        x[some] += patterns[y[some]]
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)


class Job(NamedTuple):
    """One run of one peer.

    A check trains `CHECKED` clients, all of them, for one round on batches in stored order, so that
    its result can be compared with everybody else's.
    """

    name: str
    work: Work
    folder: Path  # x.npy, y.npy: client after client
    threads: int
    rounds: int
    check: bool
    tiny: bool

    def clients(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Give each client's examples: views of one array in memory."""
        x, y = (np.load(self.folder / f"{name}.npy") for name in "xy")
        pieces = range(0, self.work.clients * self.work.size, self.work.size)
        return [(x[i : i + self.work.size], y[i : i + self.work.size]) for i in pieces]


def make_job(name: str, folder: Path, threads: int, rounds: int, check: bool, tiny: bool) -> Job:
    work = small(WORKS[name]) if tiny else WORKS[name]
    if check:
        # the data of all clients: the first ones are the same with fewer clients
        count = min(CHECKED, work.clients)
        # rounding flips a ReLU or a pooling sooner or later, which is no mistake: few steps there
        steps = min(work.steps, 2) if any(isinstance(n, Conv) for n in work.layers) else work.steps
        work, rounds = work._replace(clients=count, cohort=count, steps=steps), 1
    return Job(name, work, folder, threads, rounds, check, tiny)


class Cost(NamedTuple):
    cpu: float  # seconds of all threads of all processes of this run
    wall: float


def _relatives() -> Iterator[Path]:
    """Find the other processes of this run, whoever is their parent by now."""
    token = f"{FAMILY}={os.environ.get(FAMILY, '')}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            belongs = token in (process / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or somebody else's
            continue
        if belongs and int(process.name) != os.getpid():
            yield process


def _ticks(process: Path) -> int:
    try:
        text = (process / "stat").read_text()
    except OSError:
        return 0
    return sum(int(v) for v in text.rpartition(")")[2].split()[11:13])  # user and system


_seen: dict[str, int] = {}  # ticks by process: one that has ended keeps what it had used


def cost() -> Cost:
    """Count what was used until now by this process and its relatives."""
    if os.environ.get(FAMILY):
        for process in _relatives():
            _seen[process.name] = max(_seen.get(process.name, 0), _ticks(process))
    cpu = time.process_time() + sum(_seen.values()) / os.sysconf("SC_CLK_TCK")
    return Cost(cpu, time.perf_counter())


def versions(packages: list[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            module = sys.modules.get(package)  # a checkout on the path has no metadata
            found[package] = getattr(module, "__version__", "not installed")
    return found


Run = Callable[[Job, Callable[[], None]], Weights]


def main(run: Run, packages: list[str], note: str) -> None:
    """Be one peer's script: run a job, write what it cost and what came out."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--work", choices=list(WORKS), required=True)
    arguments.add_argument("--folder", type=Path, required=True, help="data; made if not there")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--out", type=Path, required=True, help="writes OUT.json and OUT.npz")
    asked = arguments.parse_args()
    job = make_job(asked.work, asked.folder, asked.threads, asked.rounds, asked.check, asked.tiny)
    if not (job.folder / "y.npy").exists():
        write_data(small(WORKS[job.name]) if job.tiny else WORKS[job.name], job.folder)
    marks: list[Cost] = []
    weights = run(job, lambda: marks.append(cost()))
    pairs = list(pairwise(marks))
    result: dict[str, Any] = {
        "cpu_seconds": [after.cpu - before.cpu for before, after in pairs],
        "wall_seconds": [after.wall - before.wall for before, after in pairs],
        "versions": versions(packages),
        "note": note,
    }
    np.savez(asked.out.with_suffix(".npz"), **weights)
    asked.out.with_suffix(".json").write_text(json.dumps(result))
