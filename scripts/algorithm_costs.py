"""What an algorithm costs and where it ends: counted and measured, not claimed.

Letters: n parameters of the model, d numbers in the feature layer, N clients, e examples of the
largest client, C classes.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from algorithm_facts import Facts, Incomplete, build, entries, facts_of, phrase
from torch import Tensor

from undrift.core.algorithm import Algorithm
from undrift.core.rule import overrides
from undrift.core.task import Task
from undrift.data import Work
from undrift.errors import UndriftError
from undrift.trainer import Trainer
from undrift.verify.table import PROMISES
from undrift.verify.worlds import SIZES, Point, Setting, half_square, quadratics, trainer

FEATURES, CLASSES = 5, 3  # of verify's world
OPTIMUM = 1e-8
ROUNDS = 1000


class Cost(NamedTuple):
    """Floats, as expressions in the letters above."""

    down: str  # per client and round
    up: str
    client: str  # kept by every client
    server: str  # kept by the server, the model itself not counted


class Ended(NamedTuple):
    """Where an algorithm is on the quadratics after many rounds."""

    setting: str
    distance: float  # to the optimum; NaN if it diverged

    @property
    def said(self) -> str:
        """Say it in a few words."""
        if math.isnan(self.distance):
            return "diverges"
        return "reached" if self.distance <= OPTIMUM else f"{self.distance:.2g} away"


def setting_for(name: str) -> Setting:
    """Choose a world that the algorithm accepts: everybody takes part, so that cohorts stay."""
    one_step = entries()[name].needs == "one step"
    return Setting(everybody=True, steps=1 if one_step else 4, full_batch=one_step)


@cache
def cost_of(name: str, algorithm: Algorithm) -> Cost:
    """Count what is sent in the second round, and what is kept."""
    made = trainer(algorithm, setting_for(name))
    made.round()
    result = made.round()
    clients = len(result.ids)
    found = Cost(*map(str, (
        result.floats_down // clients,
        result.floats_up // clients,
        floats(made.client_state(0)),
        floats(made.server_state()),
    )))  # fmt: skip
    letters = {"n": made.task.size, "d": FEATURES, "N": len(SIZES), "e": max(SIZES), "C": CLASSES}
    return Cost(*(
        written(name, what, int(value), letters) for what, value in found._asdict().items()
    ))  # fmt: skip


def floats(state: dict[str, Tensor]) -> int:
    """Count the numbers of a state."""
    return sum(v.numel() for v in state.values())


def written(name: str, what: str, value: int, letters: dict[str, int]) -> str:
    """Write a count in letters: by hand where features or examples enter, else a n + b."""
    by_hand = facts_of(name).get("cost", {}).get(what)
    if by_hand is not None:
        if eval(by_hand, {"__builtins__": {}}, letters) != value:
            raise Incomplete(f"{name}: {what} is said to be {by_hand}, but {value} were counted")
        return str(by_hand).replace("*", "·")
    models, rest = divmod(value, letters["n"])
    if rest > 3:
        raise Incomplete(f"{name}: {value} floats ({what}) are no whole number of models and a few "
                         f"numbers: say how many under [cost] of its facts")  # fmt: skip
    parts = [f"{models if models > 1 else ''}n"] * bool(models) + [str(rest)] * bool(rest)
    return " + ".join(parts) or "0"


def exchanges(algorithm: Algorithm) -> list[str]:
    """Tell what happens beside one broadcast and one report."""
    said = []
    if any(p.shares_probe for p in algorithm.parts):
        said.append("one more exchange before local training")
    elif algorithm.uses("probe"):
        said.append("one pass over own data before local training")
    if algorithm.uses("begin"):
        said.append("own variables are renewed on all own data before local training")
    if algorithm.uses("review"):
        said.append("one pass over own data after local training")
    looks_back = [r for r in algorithm.rules if overrides(r, "after_round")]
    if any(r.refresh == "once" for r in looks_back):
        said.append("everybody looks at the first model once, before the first round")
    elif looks_back:
        said.append("one more exchange after the server's step, and once before the first round")
    return said


# ----------------------------------------------------------------------------------- quadratics
def ended(name: str) -> Ended | None:
    """Train on verify's heterogeneous quadratics, everybody, 5 full steps a round."""
    algorithm = PROMISES[name]() if name in PROMISES else build(name, lr=0.05)
    world = quadratics()
    task = Task(Point(4), half_square, dtype=torch.float64)
    work = Work(steps=1 if entries()[name].needs == "one step" else 5, batch=None)
    try:
        runner = Trainer(task, world.federation, algorithm, work=work)
        runner.run(ROUNDS)
    except UndriftError:
        return None  # it needs features, or a second block
    distance = float((runner.server.w - world.optimum).abs().max())
    said = ", ".join([f"lr {algorithm.local.lr:g}", *map(phrase, algorithm.rules)])
    return Ended(said, distance if math.isfinite(distance) else math.nan)


def measure() -> dict[str, Any]:
    """Measure all of them, for docs/algorithms/measured.json."""
    found = {n: ended(n) for n in entries() if n != "comfed"}
    return {n: None if e is None else e._asdict() for n, e in found.items()}


def told(facts: Facts) -> str:
    """Give what a facts file adds about costs."""
    return str(facts.get("cost", {}).get("note", ""))
