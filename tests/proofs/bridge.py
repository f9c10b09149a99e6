"""From a long-hand world to an undrift trainer in float64, and what to compare afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

import undrift as fl
from undrift.rules import Schedule
from undrift.verify import bridge as verify_bridge
from undrift.verify.bridge import task_of
from undrift.verify.longhand.local import Local, Trajectory
from undrift.verify.longhand.worlds import Array, Batches, World

# undrift's name of a state -> (the long-hand name, sign): moving a model is subtracted in undrift
Names = dict[str, tuple[str, int]]


class Run(NamedTuple):
    """One entry per round, taken after it."""

    x: list[Array]
    server: list[dict[str, Array]]
    clients: list[list[dict[str, Array]]]  # of every client, sampled or not
    results: list[fl.RoundResult]


# ---- the same problem in torch -------------------------------------------------------------------


@fl.record
class Falling(Schedule):
    """Fall by `by_round` every round and by `by_step` every local step."""

    by_round: float = 1.0
    by_step: float = 1.0

    def factor(self, round: Tensor, step: Tensor) -> Any:
        return self.by_round**round * self.by_step**step


def local_of(local: Local) -> fl.Sgd:
    """Translate long-hand local settings; a step factor must be factor(1) to the power of k."""
    if local.step_factor is None:
        return verify_bridge.local_of(local)
    return verify_bridge.local_of(local, Falling(local.lr_decay, local.step_factor(1)))


# ---- running -------------------------------------------------------------------------------------


def trainer_of(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    algorithm: fl.Algorithm,
    feature: str | None = None,
    **options: Any,
) -> fl.Trainer:
    """Train the world's clients on exactly these batches."""
    task = task_of(world, feature)
    return verify_bridge.trainer_of(task, world, participants, batches, algorithm, **options)


def run(
    world: World,
    participants: list[list[int]],
    batches: Batches,
    algorithm: fl.Algorithm,
    **options: Any,
) -> Run:
    """Train all rounds and keep everything that the long-hand loops keep."""
    trainer = trainer_of(world, participants, batches, algorithm, **options)
    kept = Run([], [], [], [])
    for _ in participants:
        kept.results.append(trainer.round())
        kept.x.append(trainer.server.w.numpy().copy())
        kept.server.append(_arrays(trainer.server_state()))
        kept.clients.append([_arrays(trainer.client_state(i)) for i in range(len(world.data))])
    return kept


def _arrays(state: dict[str, Tensor]) -> dict[str, Array]:
    return {name: value.numpy().copy() for name, value in state.items()}


# ---- comparing -----------------------------------------------------------------------------------


def away(a: Array, b: Array) -> float:
    """Largest difference; infinite where one is not a number."""
    assert a.shape == b.shape
    return float(np.nan_to_num(np.abs(a - b).max(), nan=np.inf))


def gap(a: Run, b: Run) -> float:
    """Largest difference of two runs' models over all rounds and parameters."""
    assert len(a.x) == len(b.x) > 0
    return max(away(p, q) for p, q in zip(a.x, b.x, strict=True))


def distance(ours: Run, theirs: Trajectory, server: Names, clients: Names) -> float:
    """Largest difference from a long-hand run: models, server states and client states."""
    assert len(ours.x) == len(theirs.x) >= 5
    counted = {n for n in ours.server[-1] if n.endswith(".steps")}  # not in the long-hand states
    assert set(ours.server[-1]) - counted == set(server)
    assert set(ours.clients[-1][0]) == set(clients)
    pairs = list(zip(ours.x, theirs.x, strict=True))
    for mine, other in zip(ours.server, theirs.server_states, strict=True):
        pairs += [(sign * mine[n], other[name]) for n, (name, sign) in server.items()]
    for rows, others in zip(ours.clients, theirs.client_states, strict=True):
        for i, mine in enumerate(rows):
            pairs += [(sign * mine[n], others[i][name]) for n, (name, sign) in clients.items()]
    return max(away(p, q) for p, q in pairs)
