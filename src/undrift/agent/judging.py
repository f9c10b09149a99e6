"""How good a policy is: episodes on seeds that no training has seen, against chance and FedAdam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from undrift.agent.episodes import Episodes, Numbers
from undrift.agent.settings import AgentSettings
from undrift.core.random import host_fold
from undrift.experiment.spec import Experiment
from undrift.rules.steered import chosen

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
WAYS = ("policy", "random", "default")


class Score(NamedTuple):
    """What one way to act came to, one number for each episode."""

    returns: list[float]  # sum of rewards, to the end or to the last round
    rounds: list[int | None]  # to the target; None: not reached
    values: list[float]  # of the metric at the end
    knobs: list[list[list[float]]]  # [episode, round, knob]

    def table(self) -> dict[str, Any]:
        """Write it as plain JSON."""
        return {**self._asdict(), "mean_return": float(np.mean(self.returns))}


def evaluate(
    experiment: Experiment, settings: AgentSettings, layers: Layers, purpose: str = "evaluation"
) -> dict[str, Score]:
    """Play the same episodes with the policy, with random actions, and without any (FedAdam).

    All of them train as one batch; an episode that has ended stands still.
    """
    count = settings.evaluation
    # the same episode for every way: data, model, batches and cohorts
    games = Episodes(experiment, settings, [*range(count)] * len(WAYS), purpose)
    for slot in range(len(games)):
        games.begin(slot, 0)
    played = _play(games, layers, count)
    parts = {way: slice(i * count, (i + 1) * count) for i, way in enumerate(WAYS)}
    return {way: Score(*(column[part] for column in played)) for way, part in parts.items()}


def _play(games: Episodes, layers: Layers, count: int) -> tuple[list[Any], ...]:
    size = len(games)
    returns, values = [0.0] * size, [float("nan")] * size
    reached: list[int | None] = [None] * size
    over = [False] * size
    knobs: list[list[list[float]]] = [[] for _ in range(size)]
    for round in range(games.settings.rounds):
        seen = games.observe()
        actions = [_action(games, layers, seen, slot, round, count) for slot in range(size)]
        for slot, turned in enumerate(games.act(np.array(actions))):
            if over[slot]:
                continue
            returns[slot] += turned.reward
            values[slot] = turned.value
            knobs[slot].append(games.helm(slot).knobs.tolist())
            over[slot] = turned.reached  # without progress it goes on: all are given the same time
            reached[slot] = turned.round if turned.reached else None
        if all(over):
            break
    return returns, reached, values, knobs


def _action(
    games: Episodes, layers: Layers, seen: Numbers, slot: int, round: int, count: int
) -> Numbers:
    way = WAYS[slot // count]
    if way == "policy":
        actor = [(w.double(), b.double()) for w, b in layers]
        return chosen(actor, torch.from_numpy(seen[slot]).double()).numpy()
    if way == "default":
        return np.zeros(games.actions)
    words = [host_fold(games.settings.seed, "random", slot, round, k) for k in range(games.actions)]
    return np.array([(word & (2**53 - 1)) / 2**52 - 1 for word in words])
