"""The exams of an experiment: on which examples models are judged, and whose these are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from undrift.core.task import Task
from undrift.data.partitions import Parts
from undrift.experiment.exam import Asked, Exam, Paper
from undrift.experiment.sections import Evaluation
from undrift.metrics import Meaning, Sites, metrics_for
from undrift.sources import Examples

if TYPE_CHECKING:
    from undrift.experiment.world import Dealt


def papers_of(
    evaluate: Evaluation, dealt: Dealt, examples: Examples, targets: tuple[Tensor, Tensor]
) -> dict[str, Paper]:
    """Put examples together: the test set, clients' own and those of held-out clients."""
    train_y, test_y = targets
    classes = examples.classes if evaluate.per_class else 0
    papers: dict[str, Paper] = {}
    if len(examples.test_x):
        owner = dealt.owner if evaluate.clients else None
        clients = len(dealt.parts) if owner is not None else 0
        papers["test"] = Paper(examples.test_x, test_y, owner, clients, classes)
    if dealt.test_parts is not None:
        # each client's own test examples; without a common test set they are the test
        name = "own" if papers else "test"
        papers[name] = _own_paper(examples.train_x, train_y, dealt.test_parts)
    if dealt.validation is not None:
        rows = torch.from_numpy(dealt.validation)
        papers["validation"] = Paper(examples.train_x[rows], train_y[rows])
    return papers


def _own_paper(x: Tensor, y: Tensor, parts: Parts) -> Paper:
    rows = torch.from_numpy(np.concatenate(parts))
    sizes = torch.tensor([len(p) for p in parts])
    owner = torch.repeat_interleave(torch.arange(len(parts)), sizes)
    return Paper(x[rows], y[rows], owner, len(parts))


def exams_of(
    task: Task,
    papers: Mapping[str, Paper],
    evaluate: Evaluation,
    meaning: Meaning | None,
    device: torch.device,
) -> dict[str, Exam]:
    """Make an exam of each paper; metrics that the targets do not have are refused."""
    asked = None
    if meaning is not None:
        place, names = "evaluate.metrics", evaluate.metrics
        metrics = metrics_for(names, meaning.kind, place, meaning.quantile)
        asked = Asked(tuple(metrics), meaning)
    return {n: Exam(task, paper, device, evaluate.batch, asked) for n, paper in papers.items()}


def sites_of(dealt: Dealt, papers: Mapping[str, Paper]) -> dict[str, Sites]:
    """Tell whose the examples of each exam are, where somebody's."""
    names = dealt.site_names()
    owners = {n: p.owner for n, p in papers.items()}
    if "test" in papers and dealt.owner is not None:
        owners["test"] = dealt.owner
    return {n: Sites(owner.cpu(), names) for n, owner in owners.items() if owner is not None}
