"""What each precision does to the result of a real run: CIFAR-10, 200 rounds, 3 seeds.

    python benchmarks/precision.py --json precision.json       on a CUDA device
    python benchmarks/precision.py --tiny                      random images, anywhere

feddyn_cnn, FedAvg, 100 clients of Dirichlet(0.3), 10 a round, 2 epochs of batch 50, lr 0.1; the
seeds of one precision train as one batch.  `undrift data get cifar10` brings the images.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import undrift as fl
from undrift import models, sources
from undrift.data.partitions import DirichletClient

SEEDS = (0, 1, 2)


def images(tiny: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if tiny:
        maker = torch.Generator().manual_seed(0)
        x = torch.randn(400, 3, 32, 32, generator=maker)
        y = torch.randint(0, 10, (400,), generator=maker)
        return x[:300], y[:300], x[300:], y[300:]
    found = sources.load("cifar10")
    return found.train_x, found.train_y, found.test_x, found.test_y


def measure(precision: str, data: Any, args: Any) -> dict[str, Any]:
    x, y, test_x, test_y = data
    clients = 5 if args.tiny else 100
    trainers = []
    for seed in SEEDS:
        parts = DirichletClient(clients, alpha=0.3).split(y.numpy(), seed)
        trainers.append(
            fl.Trainer(
                fl.Task(models.build("feddyn_cnn", seed)),
                fl.Federation.split(x, y, [torch.as_tensor(p) for p in parts]),
                fl.fedavg(0.1),
                work=fl.Work(epochs=1 if args.tiny else 2, batch=50),
                sampler=fl.Uniform(count=2 if args.tiny else 10),
                seed=seed,
                device=args.device,
                precision=precision,
            )
        )
    fl.Fleet(trainers).run(args.rounds)
    found = [100 * t.evaluate(test_x, test_y)["accuracy"] for t in trainers]
    mean, spread = statistics.mean(found), statistics.stdev(found)
    return {"precision": precision, "accuracy": found, "mean": mean, "sd": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", default="float32,tf32,bf16,fp16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.rounds = 1 if args.tiny else args.rounds
    data, results = images(args.tiny), []
    for precision in args.precisions.split(","):
        results.append(measure(precision, data, args))
        print(json.dumps(results[-1]), flush=True)
        if args.json:
            card = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
            made = {"device": card, "torch": torch.__version__, "undrift": fl.__version__,
                    "rounds": args.rounds, "results": results}  # fmt: skip
            args.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
