"""Our engines against a straightforward PyTorch loop: CPU seconds per round, side by side.

    python benchmarks/cohort.py                 both works, writes benchmarks/results/cohort.json
    python benchmarks/cohort.py --tiny          the same code on little work
    python benchmarks/cohort.py --plans         how many clients at a time a CPU likes best

The three take turns within one run, so that a busy machine disturbs all alike; ratios are medians
over repetitions.  CPU time, not wall-clock: it does not reward idle cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import undrift as fl

RESULTS = Path(__file__).parent / "results"
LR = 0.1


class Load(NamedTuple):
    name: str
    module: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    clients: int
    cohort: int
    steps: int
    batch: int


def emnist_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 26)
    )


def feddyn_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10)),
    )


LOADS = {
    "emnist_mlp": Load("emnist_mlp", emnist_mlp, (784,), 26, 1000, 100, 10, 45),
    "feddyn_cnn": Load("feddyn_cnn", feddyn_cnn, (3, 32, 32), 10, 100, 10, 10, 50),
}


def make_federation(load: Load) -> fl.Federation:
    size = load.steps * load.batch
    maker = torch.Generator().manual_seed(0)
    x = torch.randn(load.clients * size, *load.shape, generator=maker)
    y = torch.randint(0, load.classes, (len(x),), generator=maker)
    return fl.Federation.split(x, y, torch.arange(len(x)).split(size))


def make_trainer(load: Load, data: fl.Federation, engine: str, **options: object) -> fl.Trainer:
    torch.manual_seed(0)
    return fl.Trainer(
        fl.Task(load.module()),
        data,
        fl.fedavg(LR),
        work=fl.Work(steps=load.steps, batch=load.batch),
        sampler=fl.Uniform(count=load.cohort),
        engine=engine,
        **options,
    )


class HandLoop:
    """FedAvg as anybody would write it."""

    def __init__(self, load: Load, data: fl.Federation) -> None:
        torch.manual_seed(0)
        self.load, self.net = load, load.module()
        self.model = {n: v.clone() for n, v in self.net.state_dict().items()}
        self.clients = [data.client(i) for i in range(load.cohort)]

    def round(self) -> None:
        total = {n: torch.zeros_like(v) for n, v in self.model.items()}
        for x, y in self.clients:
            self.train(x, y)
            for name, value in self.net.state_dict().items():
                total[name] += value * len(x)
        size = sum(len(x) for x, _ in self.clients)
        self.model = {n: v / size for n, v in total.items()}

    def train(self, x: Tensor, y: Tensor) -> None:
        self.net.load_state_dict(self.model)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)
        order = torch.randperm(len(x))
        for rows in order.split(self.load.batch)[: self.load.steps]:
            optimizer.zero_grad()
            F.cross_entropy(self.net(x[rows]), y[rows]).backward()
            optimizer.step()


def cpu_seconds(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


def compare(load: Load, repeats: int, with_reference: bool) -> dict[str, object]:
    data = make_federation(load)
    trainer = make_trainer(load, data, "vectorised")
    actions: dict[str, Callable[[], object]] = {
        "hand loop": HandLoop(load, data).round,
        "vectorised": trainer.round,
    }
    if with_reference:
        actions["reference"] = make_trainer(load, data, "reference").round
    for action in actions.values():
        action()  # warm-up; the vectorised engine makes its plan here
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            seconds[name].append(cpu_seconds(action))
    ratios = {
        name: statistics.median(h / t for h, t in zip(seconds["hand loop"], times, strict=True))
        for name, times in seconds.items()
    }
    return {
        "work": load._replace(module=None)._asdict(),
        "plan": trainer.engine.plan(),
        "cpu_seconds_per_round": {n: statistics.median(t) for n, t in seconds.items()},
        "speed_against_hand_loop": ratios,
        "all_seconds": seconds,
    }


def plans(load: Load, repeats: int) -> dict[str, float]:
    data, found = make_federation(load), {}
    for chunk in (1, 5, 10, 25, 50, 100):
        if chunk <= load.cohort:
            trainer = make_trainer(load, data, "vectorised", chunk=chunk)
            trainer.round()
            found[str(chunk)] = min(cpu_seconds(trainer.round) for _ in range(repeats))
    return found


def environment(threads: int) -> dict[str, object]:
    cpu = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    return {
        "undrift": fl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu[0].split(":")[1].strip() if cpu else platform.processor(),
        "threads": threads,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--work", choices=list(LOADS), nargs="*", default=list(LOADS))
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--plans", action="store_true")
    arguments.add_argument("--out", type=Path, default=RESULTS / "cohort.json")
    chosen = arguments.parse_args()
    results = []
    for threads in chosen.threads:
        torch.set_num_threads(threads)
        for name in chosen.work:
            load = LOADS[name]
            if chosen.tiny:
                load = load._replace(clients=6, cohort=3, steps=2, batch=4)
            if chosen.plans:
                print(name, threads, plans(load, 3))
                continue
            found = compare(load, chosen.repeats, with_reference=True)
            results.append({**environment(threads), **found})
            print(f"{name}, {threads} threads:", found["speed_against_hand_loop"], flush=True)
    if results and not chosen.tiny:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
