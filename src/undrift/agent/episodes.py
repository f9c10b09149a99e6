"""Episodes of a federation that somebody steers, several of them side by side as one batch.

A round is cut in two.  Clients train and the server measures its state; there it waits (`observe`).
Then somebody acts, and the model moves (`act`).  So an agent sees this round's update before it
decides on it, as the policy inside the server will.

Letters: E episodes, K knobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from undrift.agent.settings import AgentSettings
from undrift.core.algorithm import init_server
from undrift.core.random import Seeds, host_fold
from undrift.core.tree import EMPTY, tree_map
from undrift.errors import ConfigError
from undrift.experiment.exam import Exam, Jury, Paper
from undrift.experiment.spec import Experiment
from undrift.experiment.world import World, build, make_task
from undrift.fleet import Fleet, hindrance
from undrift.rules.steered import ALONE, Helm, Steered, acted, sight

Numbers = np.ndarray[Any, np.dtype[np.float64]]


class Turned(NamedTuple):
    """What came of one action."""

    reward: float
    reached: bool  # the target
    over: bool  # by reaching it
    stopped: bool  # no progress, or no rounds left: it is cut off here
    value: float  # of the metric
    round: int


@dataclass
class Course:
    """How far one episode has come."""

    best: float  # where its last progress was counted from
    waited: int = 0  # rounds without progress since


def episode_seeds(seed: int, slot: int, number: int, purpose: str = "train") -> Seeds:
    """Give the seeds of one episode: a slot keeps its partition, all else is new every time."""

    def word(*words: int | str) -> int:
        return host_fold(seed, "agent", purpose, *words) & (2**53 - 1)

    return Seeds(word(slot, "data"), word(slot, number, "model"), word(slot, number, "run"))


def reward_of(value: float, settings: AgentSettings) -> float:
    """Give 64^(accuracy - target) - 1, or 64^(target - loss) - 1: 0 at the target, -1 far away.

    >>> reward_of(0.99, AgentSettings(target=0.99))
    0.0
    """
    short = value - settings.target if settings.metric == "accuracy" else settings.target - value
    return float(settings.base ** min(short, 1.0) - 1) if not math.isnan(short) else -1.0


class Episodes:
    """Runs E episodes of an experiment in step; each has its own data, model and chance.

    `games` numbers them; those of one number are the same episode until somebody acts otherwise.
    """

    def __init__(
        self,
        experiment: Experiment,
        settings: AgentSettings,
        games: Sequence[int],
        purpose: str = "train",
    ) -> None:
        self.settings, self.purpose, self.games = settings, purpose, list(games)
        self.worlds = [
            build(replace(experiment, seed=episode_seeds(settings.seed, g, 0, purpose)))
            for g in self.games
        ]
        self.rule, self.place = _steered_of(experiment)
        self.trainers = [world.trainer for world in self.worlds]
        if self.rule.pca == "clients" and all(t.roster.always_alone() for t in self.trainers):
            raise ConfigError(ALONE.format(who="an agent"))
        self._jury = Jury([_exam_of(world, settings) for world in self.worlds], settings.metric)
        # what cannot share a batch, as clients of the reference engine, trains one by one
        shares = len(self.games) > 1 and not any(map(hindrance, self.trainers))
        self._fleet = Fleet(self.trainers) if shares else None
        self._act = vmap(partial(acted, self.rule))
        self.courses = [Course(-math.inf) for _ in self.games]

    def __len__(self) -> int:
        return len(self.worlds)

    @property
    def inputs(self) -> int:
        """Count the numbers that are seen of an episode."""
        return self.rule.steering.inputs

    @property
    def actions(self) -> int:
        """Count the knobs."""
        return len(self.rule.steering.knobs)

    def begin(self, slot: int, number: int) -> None:
        """Begin another episode in one of the slots."""
        seeds = episode_seeds(self.settings.seed, self.games[slot], number, self.purpose)
        world = self.worlds[slot]
        trainer = world.trainer
        examples = world.dealt.examples
        first = make_task(replace(world.experiment, seed=seeds), examples).initial()
        w, buffers = tree_map(lambda v: v.to(trainer.engine.device), first)
        trainer.restart(init_server(trainer.algorithm, w, buffers, trainer.sizes), seeds)
        self.courses[slot] = Course(-math.inf)

    def observe(self) -> Numbers:
        """Let everybody's clients train one round: [E, n], what is seen of it before the action."""
        if self._fleet is not None:
            self._fleet.advance()
        else:
            for trainer in self.trainers:
                trainer.advance()
        helms = [self.helm(e) for e in range(len(self))]
        value = torch.stack([helm.seen.value for helm in helms])
        knobs = torch.stack([helm.knobs for helm in helms])
        one = helms[0]._replace(seen=helms[0].seen._replace(value=value), knobs=knobs)
        return sight(self.rule, one).cpu().numpy()

    def helm(self, slot: int) -> Helm:
        """Give the steered server's state."""
        found: Helm = self.trainers[slot].server.states[self.place]
        return found

    def act(self, actions: Numbers) -> list[Turned]:
        """Turn everybody's knobs by [E, K] in [-1, 1], move the models and judge them."""
        if actions.shape != (len(self), self.actions):
            raise ConfigError(
                f"actions of shape {list(actions.shape)}: {len(self)} episodes with "
                f"{self.actions} knobs need [{len(self)}, {self.actions}]"
            )
        if not np.isfinite(actions).all():
            raise ConfigError("an action is NaN or infinite: give numbers from -1 to 1")
        self._move(torch.from_numpy(np.asarray(actions, dtype=np.float64)))
        values = self._jury.judge([(t.server.w, t.server.buffers) for t in self.trainers])
        # NaN outputs have a largest class, too: a model that diverged has no accuracy
        sound = torch.stack([t.server.w.isfinite().all() for t in self.trainers]).tolist()
        known = [v if s else math.nan for v, s in zip(values, sound, strict=True)]
        return [self._turned(e, value) for e, value in enumerate(known)]

    def _move(self, actions: Tensor) -> None:
        """Take everybody's server step, as one."""
        helms = [self.helm(e) for e in range(len(self))]
        # directions and what they are fitted on are as large as models, and no action reads them
        light = [helm._replace(axis=EMPTY, actor=EMPTY) for helm in helms]
        models = [trainer.server.w for trainer in self.trainers]
        w, moved = tree_map(lambda *v: torch.stack(v), *zip(models, light, strict=True))
        found = self._act(w, moved, actions.to(w.device))
        for e, (trainer, helm) in enumerate(zip(self.trainers, helms, strict=True)):
            model, new = tree_map(lambda v, e=e: v[e], found)
            states = list(trainer.server.states)
            states[self.place] = new._replace(axis=helm.axis, actor=helm.actor)
            trainer.put(trainer.server._replace(w=model, states=tuple(states)))

    def _turned(self, slot: int, value: float) -> Turned:
        settings, course = self.settings, self.courses[slot]
        higher = value if settings.metric == "accuracy" else -value
        room = settings.progress * (1.0 if settings.metric == "accuracy" else abs(course.best))
        if not math.isfinite(course.best):
            better = math.isfinite(higher)  # the first one, or the first that is a number
        else:
            better = higher >= course.best + room
        # many small steps are progress too: they count from where the last progress was
        course.best, course.waited = (higher, 0) if better else (course.best, course.waited + 1)
        goal = settings.target if settings.metric == "accuracy" else -settings.target
        reached, done = higher >= goal, self.trainers[slot].rounds_done
        over = reached and settings.ends
        given_up = settings.ends and course.waited >= settings.patience
        stopped = not over and (given_up or done >= settings.rounds)
        return Turned(reward_of(value, settings), reached, over, stopped, value, done)


def _steered_of(experiment: Experiment) -> tuple[Steered, int]:
    rules = experiment.algorithm.rules
    found = [i for i, r in enumerate(rules) if isinstance(r, Steered) and r.policy is None]
    if len(found) != 1:
        raise ConfigError("an episode needs one Steered rule without a policy among its rules")
    rule = rules[found[0]]
    assert isinstance(rule, Steered)
    return rule, found[0]


def _exam_of(world: World, settings: AgentSettings) -> Exam:
    """Judge on clients that are held out, or else on the test set."""
    exams = world.measure.exams
    exam = exams.get("validation", exams.get("test"))
    if exam is None:
        raise ConfigError("an agent needs held-out examples: set hold.validation_clients = 0.1")
    if settings.metric == "accuracy" and "accuracy" not in world.trainer.task.metrics:
        raise ConfigError('this task has no accuracy: set agent.metric = "loss"')
    exams.clear()  # nobody asks for the others
    if settings.judged is None:
        return exam
    some = slice(settings.judged)
    paper = Paper(exam.paper.x[some].clone(), exam.paper.y[some].clone())
    return Exam(exam.task, paper, exam.device, exam.batch)
