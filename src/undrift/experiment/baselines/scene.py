"""What baselines are computed from, and their marks: data, task and exams of an experiment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from undrift.core.task import Task
from undrift.experiment.baselines.rows import Values
from undrift.experiment.exam import Paper, by_client, marks_of, mean
from undrift.experiment.exams import papers_of, sites_of
from undrift.experiment.losses import meaning_of
from undrift.experiment.measure import every_metric, renamed
from undrift.experiment.spec import Experiment
from undrift.experiment.world import Dealt, deal, make_task, targets_of, trained_on
from undrift.metrics import Meaning, Sites, by_site, unequal


@dataclass(frozen=True, eq=False)
class Scene:
    """An experiment's data, dealt and with its exams, but without its algorithm."""

    experiment: Experiment
    dealt: Dealt
    task: Task
    meaning: Meaning
    y: Tensor  # of all training examples
    papers: Mapping[str, Paper]
    sites: Mapping[str, Sites]

    @property
    def rows(self) -> Tensor:
        """Give the examples that clients train on."""
        return torch.from_numpy(np.concatenate(self.dealt.parts))

    @property
    def is_table(self) -> bool:
        """Whether the data are a table."""
        return self.dealt.examples.info.preparation is not None

    @property
    def is_natural(self) -> bool:
        """Whether clients are those that the data name."""
        return self.dealt.names is not None

    def owner(self, name: str) -> Tensor | None:
        """Tell whose the examples of an exam are, -1 for nobody's; None where that is unknown."""
        if name in self.sites:
            return self.sites[name].owner
        owner = self.papers[name].owner
        return None if owner is None else owner.cpu()


def scene_of(experiment: Experiment) -> Scene | None:
    """Deal the data; None where baselines make no sense: nothing is tested, or nothing predicted.

    Inputs that are reconstructed, and texts with a target at every place, have no baselines.
    """
    if experiment.task.target == "input":
        return None
    dealt = deal(experiment)
    examples = dealt.examples
    task = make_task(experiment, examples, trained_on(experiment, dealt))
    x = examples.train_x
    y, test_y = (targets_of(experiment, x, training, examples) for training in (True, False))
    papers = papers_of(experiment.evaluate, dealt, examples, (y, test_y))
    one_each = examples.classes == 0 or y.dim() == 1
    if not papers or not one_each:
        return None
    meaning = meaning_of(experiment, examples, task)
    return Scene(experiment, dealt, task, meaning, y, papers, sites_of(dealt, papers))


class Answer(NamedTuple):
    """Outputs for the examples of an exam, or for some of them."""

    outputs: Tensor  # [n, ...]
    rows: Tensor | None = None  # [n] which examples; None: all


def values_of(scene: Scene, answers: Mapping[str, Answer]) -> Values:
    """Judge outputs as the models of a run are judged, under the same names."""
    found: dict[str, float | None] = {}
    for name, answer in answers.items():
        found |= renamed(name, _marked(scene, scene.papers[name], answer))
    return {n: v if v is None or math.isfinite(v) else None for n, v in found.items()}


@torch.no_grad()
def _marked(scene: Scene, paper: Paper, answer: Answer) -> dict[str, float | None]:
    meaning, (outputs, rows) = scene.meaning, answer
    y, owner = paper.y.cpu(), None if paper.owner is None else paper.owner.cpu()
    if rows is not None:
        y, owner = y[rows], None if owner is None else owner[rows]
    if not meaning.fits(outputs, y):
        return {}
    marks = {}
    if ":" not in scene.experiment.task.loss:  # a loss of their own may read outputs otherwise
        truths = y.to(scene.task.dtype) if y.is_floating_point() else y
        marks = marks_of(scene.task, outputs, truths)
    found: dict[str, float | None] = {n: float(mean(m)) for n, m in marks.items()}
    metrics = every_metric(scene.experiment.evaluate, meaning)
    scores, targets = meaning.scores(outputs), meaning.truths(y)
    found |= {m.name: m(scores, targets) for m in metrics if m.name not in found}
    if owner is None:
        return found
    each = by_site(metrics, scores, targets, meaning.owners(owner, outputs))
    for metric in metrics:
        found |= unequal(metric.name, [row.values[metric.name] for row in each])
    if marks:
        main = "accuracy" if "accuracy" in marks else "loss"
        found |= by_client(main, marks[main], owner, paper.clients)
    return found
