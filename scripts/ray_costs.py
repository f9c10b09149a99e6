"""What a round costs over Ray: bytes by cohort and by model, time against the engine alone.

    OMP_NUM_THREADS=2 python scripts/ray_costs.py

Prints the table of docs/ray.md.  Bytes are counted where they are sent; times are the fastest of
some rounds after the first two.
"""

import argparse
import time

import torch
from torch import nn

import undrift as fl
from undrift.engines.ray_cluster import connect

FEATURES, HIDDEN, CLASSES, CLIENTS = 784, 200, 10, 512


def federation() -> fl.Federation:
    draw = torch.Generator().manual_seed(0)
    clients = [
        (
            torch.randn(32, FEATURES, generator=draw),
            torch.randint(0, CLASSES, (32,), generator=draw),
        )
        for _ in range(CLIENTS)
    ]
    return fl.Federation.of(clients)


def trainer(data: fl.Federation, algorithm: str, cohort: int, **engine: object) -> fl.Trainer:
    net = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    return fl.Trainer(
        fl.Task(net, feature="1"),
        data,
        fl.catalogue()[algorithm].build(lr=0.05),
        work=fl.Work(epochs=2, batch=16),
        sampler=fl.Uniform(count=cohort),
        **engine,
    )


def seconds(made: list[fl.Trainer], rounds: int) -> list[float]:
    """Fastest round of each; they take turns, so that other load on the machine is theirs alike."""
    for one in made:
        one.run(2)
    times = [[one.round().seconds for one in made] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


def bytes_table(data: fl.Federation, cohorts: list[int]) -> None:
    print("| algorithm | clients | model down | sums up | per client down | per client up |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in ("fedavg", "scaffold", "mime", "rfedavg_plus"):
        for cohort in cohorts:
            made = trainer(data, name, cohort, engine="ray", actors=2)
            made.round()
            before = made.engine.sent
            made.round()
            sent = [b - a for a, b in zip(before, made.engine.sent, strict=True)]
            each = [sent[1] / cohort, sent[3] / cohort]
            print(
                f"| {name} | {cohort} | {sent[0]:,} | {sent[2]:,} | {each[0]:.0f} | {each[1]:.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--times-only", action="store_true")
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 100, 500])
    options = parser.parse_args()
    data = federation()
    started = time.perf_counter()
    connect()
    print(f"a cluster of this machine is up after {time.perf_counter() - started:.1f} s")
    for actors in () if options.times_only else (1, 2):
        started = time.perf_counter()
        first = trainer(data, "fedavg", 10, engine="ray", actors=actors)
        print(f"{actors} new actors hold {CLIENTS} clients: {time.perf_counter() - started:.1f} s")
        del first
        started = time.perf_counter()
        again = trainer(data, "fedavg", 10, engine="ray", actors=actors)
        print(f"the same again, in the same processes: {time.perf_counter() - started:.1f} s")
        del again
    print()
    if not options.times_only:
        bytes_table(data, options.cohorts)
    print()
    print("| algorithm | clients | alone | 1 actor | 2 actors |")
    print("|---|--:|--:|--:|--:|")
    for name in ("fedavg", "scaffold"):
        for cohort in options.cohorts:
            made = [trainer(data, name, cohort)]
            made += [trainer(data, name, cohort, engine="ray", actors=n) for n in (1, 2)]
            alone, *over = seconds(made, options.rounds)
            ratios = " | ".join(f"{s / alone:.2f}x" for s in over)
            print(f"| {name} | {cohort} | {1000 * alone:.0f} ms | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
