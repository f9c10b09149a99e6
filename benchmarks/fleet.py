"""Many experiments as one batch against one after the other: ComFed's grid on CIFAR-10's set-up.

    python benchmarks/fleet.py --json fleet.json       on a CUDA device
    python benchmarks/fleet.py --tiny                  the same code on little work, on any

16 cells x 3 seeds: feddyn_cnn, 100 clients, 10 a round, 1 epoch of batch 32, client momentum 0.9,
Dirichlet(0.1) over classes (each seed its own), random images.  Alone: the cells in `--alone`, two
of each client rule, seeds in turns, timed in turns with the fleet; their mean stands for all 48.
Building is not counted, nor a first turn, in which rounds of new lengths are still recorded.
Operations count every example that is trained on, and once more where SCAFFOLD takes the gradient
of all of a client's data.
How far the models of both are from each other, against how far they have moved, is told after the
first four rounds and at the end: both round differently, and on random labels that grows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import undrift as fl
from rounds import operations, profile, wait
from undrift import models
from undrift.data.partitions import DirichletClass
from undrift.experiment.environment import commit
from undrift.fleet import Fleet

CLIENTS = ("sgd", "prox", "scaf", "nova")
SERVERS = ("sgd", "adam", "adagrad", "yogi")
CELLS = "sgd-sgd,prox-yogi,scaf-adam,nova-adagrad,sgd-adam,prox-sgd,scaf-yogi,nova-sgd"


def federations(args: Any) -> list[fl.Federation]:
    count = 60 if args.tiny else 50_000
    maker = torch.Generator(args.device).manual_seed(0)
    x = torch.randn(count, 3, 32, 32, generator=maker, device=args.device)
    y = torch.randint(0, 10, (count,), generator=maker, device=args.device)
    clients, least = (4, 2) if args.tiny else (100, 10)
    dealt = [DirichletClass(clients, alpha=0.1, min_size=least) for _ in range(args.seeds)]
    parts = [d.split(y.cpu().numpy(), seed) for seed, d in enumerate(dealt)]
    return [fl.Federation.split(x, y, [torch.as_tensor(i) for i in part]) for part in parts]


def make(client: str, server: str, seed: int, data: fl.Federation, args: Any) -> fl.Trainer:
    local = fl.sgd(0.01, momentum=0.9, weight_decay=1e-4)
    mu = {"mu": 0.005} if client == "prox" else {}
    return fl.Trainer(
        fl.Task(models.build("feddyn_cnn", seed)),
        data,
        fl.comfed(client, server, local=local, **mu),
        work=fl.Work(epochs=1, batch=4 if args.tiny else 32),
        sampler=fl.Uniform(count=2 if args.tiny else 10),
        seed=seed,
        device=args.device,
        precision=args.precision,
        graph=True,
    )


def place(cell: str, seed: int) -> int:
    """Tell where a cell of a seed stands in the fleet."""
    client, server = cell.split("-")
    return 16 * seed + 4 * CLIENTS.index(client) + SERVERS.index(server)


def timed(run: Any, device: str) -> tuple[float, Any]:
    wait(device)
    started = time.perf_counter()
    found = run()
    wait(device)
    return time.perf_counter() - started, found


def distances(
    some: list[fl.Trainer], others: list[fl.Trainer], started: list[torch.Tensor]
) -> list[float]:
    """Tell how far models are from each other, against how far they have moved."""
    trios = zip(some, others, started, strict=True)
    return [float((a.server.w - b.server.w).norm() / (b.server.w - w).norm()) for a, b, w in trios]


def examples(trainer: fl.Trainer, results: list[Any]) -> int:
    """Count the examples that went forward and back in some rounds."""
    looks = any(trainer.algorithm.uses(hook) for hook in ("probe", "review"))
    sizes = trainer.federation.sizes
    return (1 + looks) * sum(int(sizes[i]) for r in results for i in r.ids)


def skipped(found: list[list[Any]]) -> int:
    """Count clients who were left out, as their numbers were not finite."""
    return sum(len(r.skipped) for results in found for r in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--alone", default=CELLS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.turns, args.seeds = 1, 1, 2
    data = federations(args)
    flops = operations(models.build("feddyn_cnn", 0), (3, 32, 32))
    fleet = Fleet(
        [make(c, s, e, data[e], args) for e in range(args.seeds) for c in CLIENTS for s in SERVERS]
    )
    cells = args.alone.split(",")
    alone = [
        make(*cell.split("-"), i % args.seeds, data[i % args.seeds], args)
        for i, cell in enumerate(cells)
    ]
    places = [place(cell, i % args.seeds) for i, cell in enumerate(cells)]
    twins = [fleet.trainers[i] for i in places]
    started = [trainer.server.w.clone() for trainer in alone]
    built, _ = timed(lambda: fleet.run(4), args.device)
    for trainer in alone:
        trainer.run(4)
    apart_at_first = distances(twins, alone, started)
    together, one_by_one, taken, seen, left_out = [], [], 0, 0, [0, 0, 0]
    for _ in range(1 + args.turns):
        seconds, found = timed(lambda: fleet.run(args.rounds), args.device)
        together.append(seconds / args.rounds)
        taken += sum(r.steps for results in found for r in results)
        seen += sum(map(examples, fleet.trainers, found))
        left_out[0] += skipped(found)
        left_out[1] += skipped([found[i] for i in places])
        seconds, found = timed(lambda: [t.run(args.rounds) for t in alone], args.device)
        left_out[2] += skipped(found)
        one_by_one.append(seconds / args.rounds / len(alone))
    a_round, each = (statistics.median(turns[1:]) for turns in (together, one_by_one))
    count, rounds = len(fleet.trainers), args.rounds * (1 + args.turns)
    result = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "undrift": fl.__version__,
        "commit": commit(),
        "precision": args.precision,
        "experiments": count,
        "together": fleet._together,
        "ms_together": a_round * 1e3,
        "ms_alone_each": each * 1e3,
        "times_faster": each * count / a_round,
        "apart_after_4_rounds": dict(zip(cells, apart_at_first, strict=True)),
        "apart": dict(zip(cells, distances(twins, alone, started), strict=True)),
        "left_out": dict(zip(("all", "those cells together", "alone"), left_out, strict=True)),
        "client_steps": taken / rounds,  # of all clients of all experiments
        "examples": seen / rounds,
        "tflops": flops * seen / rounds / a_round / 1e12,
        "built_s": built,
        "host_ms": timed(fleet.advance, "cpu")[0] * 1e3,  # to queue a round
        "lanes": fleet._runner.lanes.widths if fleet._runner.lanes else None,
        "profile": profile(lambda: fleet.run(1)) if args.device == "cuda" else [],
        "by_turn": {"together": together[1:], "alone": one_by_one[1:]},
    }
    print(json.dumps({**result, "profile": result["profile"][:25]}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
