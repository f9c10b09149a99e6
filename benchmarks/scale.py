"""What a round costs as the population grows: the same cohort of 100 out of more and more clients.

    python benchmarks/scale.py                 writes benchmarks/results/scale.json
    python benchmarks/scale.py --tiny          the same code on little work

SCAFFOLD, whose client states (one million numbers each) lie in a sparse file, and FedAvg, which has
none.  Each population is a process of its own, and they take turns round by round, so that a busy
machine disturbs all alike.  Clients share rows of one pool: what is held per client is what undrift
itself needs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import undrift as fl
from undrift.experiment.environment import commit

RESULTS = Path(__file__).parent / "results"
POOL = 20_000  # distinct examples
SIZE = 20  # examples of a client


class Scale(NamedTuple):
    algorithm: str
    clients: int
    cohort: int = 100
    steps: int = 5
    batch: int = 20
    widths: tuple[int, ...] = (784, 800, 450, 26)  # 1,000,176 parameters


LADDERS = {"scaffold": (1_000, 100_000), "fedavg": (1_000, 1_000_000)}


def module(scale: Scale) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in zip(scale.widths[:-1], scale.widths[1:], strict=True):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def federation(scale: Scale) -> fl.Federation:
    maker = torch.Generator().manual_seed(0)
    patterns = torch.randn(scale.widths[-1], scale.widths[0], generator=maker) / 2
    y = torch.randint(0, scale.widths[-1], (POOL,), generator=maker)
    x = torch.randn(POOL, scale.widths[0], generator=maker) + patterns[y]
    parts: Tensor = (torch.arange(scale.clients * SIZE) % POOL).view(scale.clients, SIZE)
    return fl.Federation.split(x, y, parts, allow_shared=True)


def trainer(scale: Scale, folder: Path) -> fl.Trainer:
    made = {"scaffold": fl.scaffold, "fedavg": fl.fedavg}[scale.algorithm](0.1)
    stateful = {"state": "file", "state_path": folder / "rows"}
    return fl.Trainer(
        fl.Task(module(scale)),
        federation(scale),
        made,
        work=fl.Work(steps=scale.steps, batch=scale.batch),
        sampler=fl.Uniform(count=scale.cohort),
        **(stateful if scale.algorithm == "scaffold" else {}),
    )


class Round(NamedTuple):
    cpu_seconds: float
    wall_seconds: float
    loss: float


def serve(scale: Scale, folder: Path) -> None:
    """Be one population: train a round for every line on stdin, then tell about oneself."""
    started = time.perf_counter()
    training = trainer(scale, folder)
    ready = time.perf_counter() - started
    print("ready", flush=True)
    for _ in sys.stdin:
        before = time.process_time(), time.perf_counter()
        loss = training.round().loss
        cost = time.process_time() - before[0], time.perf_counter() - before[1]
        print(json.dumps([*cost, loss]), flush=True)
    about = {
        "seconds_to_build": ready,
        "peak_resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "parameters": sum(v.numel() for v in training.parameters().values()),
        "clients_seen": len(training.store.seen),
        "state_bytes_on_disk": training.store.num_bytes if training.store.row_floats else 0,
        "plan": training.engine.plan(),
    }
    print(json.dumps(about), flush=True)


class Population:
    """One population in a process of its own."""

    def __init__(self, scale: Scale, folder: Path, threads: int) -> None:
        folder.mkdir()
        command = [sys.executable, __file__, "--one", json.dumps(scale), "--folder", str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        self.rounds: list[Round] = []
        self.about: dict[str, Any] = {}
        self.read()  # "ready"

    def read(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a population ended with code {self.process.wait()}")
        return line

    def train(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.rounds.append(Round(*json.loads(self.read())))

    def finish(self) -> None:
        self.process.stdin.close()
        self.about = json.loads(self.read())
        self.process.stdout.close()
        self.process.wait()

    def report(self, warmup: int) -> dict[str, Any]:
        timed = self.rounds[warmup:]
        found: dict[str, Any] = {**self.about}
        for kind in ("cpu_seconds", "wall_seconds"):
            each = [getattr(one, kind) for one in timed]
            found[kind] = statistics.median(each)
            found[f"{kind}_mean"] = statistics.fmean(each)
            found[f"{kind}_by_round"] = [getattr(one, kind) for one in self.rounds]
        found["loss"] = [self.rounds[0].loss, self.rounds[-1].loss]
        return found


def compare(algorithm: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Let the populations take turns, round by round; ratios are against the smallest."""
    extra = {"cohort": 3, "steps": 2, "batch": 4, "widths": (8, 6, 4)} if asked.tiny else {}
    ladder = (10, 100) if asked.tiny else LADDERS[algorithm]
    with tempfile.TemporaryDirectory(dir=asked.scratch) as scratch:
        made = {
            n: Population(
                Scale(algorithm, n, **extra), Path(scratch, f"{algorithm}-{n}"), asked.threads
            )
            for n in ladder
        }
        for number in range(asked.rounds):
            for one in made.values():
                one.train()
            costs = {n: round(one.rounds[-1].cpu_seconds, 3) for n, one in made.items()}
            print(f"{algorithm}, round {number + 1}: {costs}", flush=True)
        for one in made.values():
            one.finish()
    found = {str(n): one.report(asked.warmup) for n, one in made.items()}
    first = found[str(ladder[0])]
    kinds = ("cpu_seconds", "cpu_seconds_mean", "wall_seconds", "wall_seconds_mean")
    for one in found.values():
        one["against_smallest"] = {kind: one[kind] / first[kind] for kind in kinds}
    return {"work": Scale(algorithm, 0, **extra)._asdict(), "populations": found}


def machine(threads: int) -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [x.split(":")[1].strip() for x in lines if x.startswith("model name")]
    return {
        "undrift": fl.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_at_start": os.getloadavg()[0],
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--algorithms", nargs="*", choices=list(LADDERS), default=list(LADDERS))
    arguments.add_argument("--rounds", type=int, default=50)
    arguments.add_argument("--warmup", type=int, default=2, help="rounds left out of medians")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--scratch", type=Path, help="where client states go: 30 GB")
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--out", type=Path, default=RESULTS / "scale.json")
    arguments.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = arguments.parse_args()
    if asked.one:
        *numbers, widths = asked.one
        serve(Scale(*numbers, tuple(widths)), asked.folder)
        return
    if asked.tiny:
        asked.rounds, asked.warmup = 3, 1
    results: dict[str, Any] = {"machine": machine(asked.threads)}
    results.update(rounds=asked.rounds, warmup=asked.warmup, algorithms={})
    for algorithm in asked.algorithms:
        results["algorithms"][algorithm] = compare(algorithm, asked)
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
