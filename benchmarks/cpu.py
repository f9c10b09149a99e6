"""CPU seconds of a round on one thread: ours beside a hand-written loop of the same algorithm.

    python benchmarks/cpu.py --json benchmarks/results/cpu.json
    python benchmarks/cpu.py --only gru --algorithms fedavg     a part of it

A round is the local steps of a cohort on one batch a client, then the server.  `loop` is
benchmarks/cpu_works.py; `traced` runs local steps as they are recorded, `ours` as the engine
does once it has counted enough of them.  Rounds of all sides alternate; each number is the
least of several, in milliseconds of CPU time; `gain` is loop / ours.  `start_s` is the time until
the engine has compiled.  `apart`: largest difference of the weights after three rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import platform
import time
from pathlib import Path

import torch

import undrift as fl
from cpu_works import WORKS, Loop, Work, draw, every_letter
from undrift.engines import vectorised
from undrift.experiment.environment import commit

ALGORITHMS = {
    "fedavg": lambda lr: fl.fedavg(lr),
    "scaffold_momentum": lambda lr: fl.scaffold(local=fl.sgd(lr, momentum=0.9)),
    "scaffold": lambda lr: fl.scaffold(lr),
    "fedprox": lambda lr: fl.fedprox(lr=lr, mu=0.1),
    "momentum": lambda lr: fl.fedavg(local=fl.sgd(lr, momentum=0.9)),
    "adabest": lambda lr: fl.adabest(lr, mu=0.1, beta=0.9),
    "feddyn": lambda lr: fl.feddyn(lr, alpha=0.1),
}
ALWAYS = ("fedavg", "scaffold_momentum")


def trainer(work: Work, module, algorithm, clients, **options) -> fl.Trainer:
    loss = "cross_entropy" if work.shape else every_letter
    task = fl.Task(copy.deepcopy(module), loss=loss, metrics=None if work.shape else {})
    plan = fl.Work(epochs=work.steps, batch=work.batch)
    return fl.Trainer(task, fl.Federation.of(clients), algorithm, work=plan, seed=0, **options)


def least(calls: dict, seconds: float) -> dict[str, float]:
    """Milliseconds of CPU time, of rounds that alternate until some seconds are over."""
    found = dict.fromkeys(calls, float("inf"))
    begun, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() - begun < seconds:
        for name, call in calls.items():
            start = time.process_time()
            call()
            found[name] = min(found[name], (time.process_time() - start) * 1e3)
        turns += 1
    return found


def measure(name: str, label: str, arguments) -> dict:
    work = WORKS[name]
    torch.manual_seed(0)
    module, clients = work.make(), draw(work)
    loop = Loop(work, module, clients, label)
    make = ALGORITHMS[label]
    traced = trainer(work, module, make(work.lr), clients, compiled=False, native=False)
    begun = time.perf_counter()
    ours = trainer(work, module, make(work.lr), clients)
    ours.run(3)
    took = time.perf_counter() - begun
    for _ in range(3):
        loop.round()
    wanted = torch.cat([p.detach().flatten() for p in loop.own])
    apart = float((ours.server.w - wanted).abs().max())
    traced.run(3)
    found = least(
        {"loop": loop.round, "traced": traced.round, "ours": ours.round}, arguments.seconds
    )
    row = {"work": name, "algorithm": label, **{f"{k}_ms": round(v, 2) for k, v in found.items()}}
    row |= {"gain": round(found["loop"] / found["ours"], 2), "start_s": round(took, 1)}
    return {**row, "apart": float(f"{apart:.1e}")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(WORKS))
    parser.add_argument("--algorithms", nargs="*")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    vectorised.WORTH_LOOKING = vectorised.WORTH_COMPILING = 1  # as it is later in a long run
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    rows = []
    for name in arguments.only:
        labels = arguments.algorithms or (ALGORITHMS if name.startswith("mlp") else ALWAYS)
        for label in labels:
            rows.append(measure(name, label, arguments))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        about = {"commit": commit(), "cpu": platform.processor(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
