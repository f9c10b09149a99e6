"""Draw how agents learned: the return of their episodes, rollout by rollout, and what they reach.

python docs/pictures/agents.py docs/records/agents/digits-?.json --to docs/pictures/agent-digits.png

Each file is the record that `undrift train-agent` leaves, of one seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

COLOURS = {"policy": "#0b6e99", "default": "#3c3c3c", "random": "#b5483a"}
NAMES = {"policy": "trained policy", "default": "no actions: FedAdam", "random": "random actions"}


def draw(records: list[dict[str, Any]], to: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=[3, 2])
    curves = np.array([[r["return"] for r in one["rollouts"]] for one in records])
    rollouts = np.arange(1, curves.shape[1] + 1)
    for curve in curves:
        left.plot(rollouts, curve, color=COLOURS["policy"], alpha=0.35, linewidth=1)
    left.plot(rollouts, curves.mean(0), color=COLOURS["policy"], label="in training, mean of seeds")
    for way in ("default", "random"):
        mean = np.mean([one["evaluation"][way]["mean_return"] for one in records])
        left.axhline(mean, color=COLOURS[way], linestyle="--", linewidth=1, label=NAMES[way])
    left.set(xlabel="rollout", ylabel="return of an episode")
    left.legend(fontsize=8, loc="lower right")
    for place, way in enumerate(("policy", "default", "random")):
        found = [one["evaluation"][way]["mean_return"] for one in records]
        right.bar(place, np.mean(found), color=COLOURS[way], alpha=0.75)
        right.plot([place] * len(found), found, "o", color="black", markersize=3)
    right.set_xticks(range(3), ["policy", "FedAdam", "random"])
    right.set(title="seeds that no training has seen", ylabel="return")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(to, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    chosen = parser.parse_args()
    draw([json.loads(path.read_text("utf-8")) for path in chosen.records], chosen.to)


if __name__ == "__main__":
    main()
