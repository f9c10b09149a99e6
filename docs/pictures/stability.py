"""Draw stability.png: FedDyn's model grows without end at low participation, AdaBest's does not.

    undrift compare stability
    python docs/pictures/stability.py runs/stability

writes docs/records/stability.csv from the runs and draws it; without a folder it draws the record
again.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RECORD = HERE.parent / "records" / "stability.csv"
INK = {"feddyn": "#b5651d", "adabest": "#1f6f8b"}
TITLES = {"feddyn": "FedDyn", "adabest": "AdaBest"}


class Point(NamedTuple):
    """One evaluated round."""

    algorithm: str
    seed: int
    round: int
    norm: float
    accuracy: float
    loss: float


def read_runs(folder: Path) -> list[Point]:
    found = []
    for file in sorted(folder.glob("*/seed-*/rounds.jsonl")):
        seed = int(file.parent.name.partition("-")[2])
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if "test_accuracy" in row:
                values = row["norm_model"], row["test_accuracy"], row["test_loss"]
                found.append(Point(file.parent.parent.name, seed, row["round"], *values))
    return found


def write_record(points: list[Point]) -> None:
    with RECORD.open("w", newline="") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(Point._fields)
        table.writerows([*p[:3], *(f"{v:.5g}" for v in p[3:])] for p in points)


def read_record() -> list[Point]:
    with RECORD.open(newline="") as file:
        return [
            Point(a, int(s), int(r), *map(float, rest))
            for a, s, r, *rest in list(csv.reader(file))[1:]
        ]


def draw(points: list[Point]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, colour in INK.items():
        for seed in sorted({p.seed for p in points}):
            mine = [p for p in points if p.algorithm == name and p.seed == seed]
            rounds = [p.round for p in mine]
            label = TITLES[name] if seed == 0 else None
            left.plot(rounds, [p.norm for p in mine], color=colour, lw=1.2, label=label)
            right.plot(rounds, [100 * p.accuracy for p in mine], color=colour, lw=1.2, label=label)
    left.set(yscale="log", xlabel="round", ylabel="norm of the server's model")
    right.set(xlabel="round", ylabel="test accuracy, %")
    for side in (left, right):
        side.grid(alpha=0.25)
        side.spines[["top", "right"]].set_visible(False)
        side.legend(frameon=False)
    figure.savefig(HERE / "stability.png", dpi=130)


def tell(points: list[Point]) -> None:
    last = max(p.round for p in points)
    for name in INK:
        ends = [p for p in points if p.algorithm == name and p.round == last]
        norms = ", ".join(f"{p.norm:.1f}" for p in ends)
        accuracy = statistics.mean(100 * p.accuracy for p in ends)
        print(f"{TITLES[name]}: norm after round {last}: {norms}; test accuracy {accuracy:.1f} %")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_record(read_runs(Path(sys.argv[1])))
    draw(read_record())
    tell(read_record())
