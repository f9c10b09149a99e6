"""How good a policy is: episodes on seeds that no training has seen, against chance and FedAdam."""

from __future__ import annotations

import math
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
        """Write it as plain JSON; a value that is no number, of a model that diverged, is None."""
        values = [v if math.isfinite(v) else None for v in self.values]
        knobs = [[[round(v, 6) for v in knob] for knob in one] for one in self.knobs]
        mean = float(np.mean(self.returns))
        return {**self._asdict(), "values": values, "knobs": knobs, "mean_return": mean}


def evaluate(
    experiment: Experiment, settings: AgentSettings, layers: Layers, purpose: str = "evaluation"
) -> dict[str, Score]:
    """Play the same episodes with the policy, with random actions, and without any (FedAdam).

    All of them train as one batch; what an episode does after its end is not counted.
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
    actor = [(w.double(), b.double()) for w, b in layers]
    for round in range(games.settings.rounds):
        actions = _actions(games, actor, games.observe(), round, count)
        turned = games.act(actions)
        stand = torch.stack([games.helm(slot).knobs for slot in range(size)]).tolist()
        for slot, one in enumerate(turned):
            if over[slot]:
                continue
            returns[slot] += one.reward
            values[slot] = one.value
            knobs[slot].append(stand[slot])
            over[slot] = one.over  # without progress it goes on: all are given the same time
            if one.reached and reached[slot] is None:
                reached[slot] = one.round
        if all(over):
            break
    return returns, reached, values, knobs


def _actions(games: Episodes, actor: Layers, seen: Numbers, round: int, count: int) -> Numbers:
    """Give everybody's action: the policy's, random ones, none."""
    policy = [chosen(actor, torch.from_numpy(one).double()).numpy() for one in seen[:count]]
    chance = [_random(games, slot, round) for slot in range(count, 2 * count)]
    return np.stack([*policy, *chance, *[np.zeros(games.actions)] * count])


def _random(games: Episodes, slot: int, round: int) -> Numbers:
    words = [host_fold(games.settings.seed, "random", slot, round, k) for k in range(games.actions)]
    return np.array([(word & (2**53 - 1)) / 2**52 - 1 for word in words])
