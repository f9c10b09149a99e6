"""Which value of a setting that a table tunes is best for each of its methods."""

from __future__ import annotations

import math
from collections.abc import Sequence

from undrift.experiment.family import paper_settings
from undrift.metrics import lower_is_better
from undrift.papers.records import Entry


def best_of(entries: Sequence[Entry]) -> list[Entry]:
    """Choose one entry of each method that is tuned: soonest at the target, then best at the end.

    A table says in [paper] what it `tunes`, and labels its runs METHOD NAME=VALUE.  More seeds that
    reach the target come first; what diverged comes last.
    """
    groups: dict[tuple[str, str], list[Entry]] = {}
    for one in entries:
        if paper_settings()[one["setting"]].paper.get("tunes"):
            groups.setdefault((one["setting"], one["method"].partition(" ")[0]), []).append(one)
    return [min(some, key=_badness) for some in groups.values()]


def _badness(entry: Entry) -> tuple[float, ...]:
    ours, paper = entry["ours"], paper_settings()[entry["setting"]].paper
    if ours["value"] is None or ours.get("diverged"):
        return (math.inf,)
    reached = [r for r in ours["rounds_to"][-1]["each"] if r is not None]
    never = len(entry["seeds"]) - len(reached)
    rounds = sum(reached) / len(reached) if reached else math.inf
    return (never, rounds, ours["value"] * (1 if lower_is_better(paper["metric"]) else -1))


def told(entry: Entry) -> str:
    """Say which value was best, and what it came to."""
    ours = entry["ours"]
    if ours["value"] is None or ours.get("diverged"):
        return f"{entry['setting']}: no value of {entry['method'].partition(' ')[0]} is any good"
    target = ours["rounds_to"][-1]
    rounds = ", ".join("never" if r is None else str(r) for r in target["each"])
    return (
        f"{entry['setting']}: best is {entry['method']}; "
        f"rounds to {target['target']:g}: {rounds}; {ours['value']:g} at the end"
    )
