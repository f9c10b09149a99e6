"""The loss of an experiment, by the kind of its targets, and what outputs mean under it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undrift import own
from undrift.core.losses import METRICS, OF_CLASSES, OF_NUMBERS, Focal, Pinball
from undrift.core.task import Task
from undrift.errors import ConfigError, DataError
from undrift.experiment.names import imported
from undrift.experiment.spec import Experiment
from undrift.metrics import Kind, Meaning
from undrift.sources import Examples

USUAL = {"classes": "cross_entropy", "numbers": "mse", "counts": "poisson"}  # under "auto"


def kind_of(experiment: Experiment, examples: Examples) -> Kind:
    """Tell whether targets are classes, numbers, or counts as a table declares them."""
    if experiment.task.target == "input" or not examples.classes:
        target = getattr(examples.info.preparation, "target", None)
        counts = experiment.task.target != "input" and getattr(target, "kind", "") == "count"
        return "counts" if counts else "numbers"
    return "classes"


def loss_settings(
    experiment: Experiment, examples: Examples, targets: Tensor | None = None
) -> dict[str, Any]:
    """Give the loss of a task, and its metrics where the loss does not bring them.

    Balanced class weights are those of `targets`; without any, of all training examples.
    """
    settings, kind = experiment.task, kind_of(experiment, examples)
    if ":" in settings.loss:
        with own.scope(experiment.home):
            return {"loss": imported(settings.loss, "task.loss")}
    name = USUAL[kind] if settings.loss == "auto" else settings.loss
    _check_kind(name, kind)
    if name == "poisson":
        _check_counts(examples)
    if name == "pinball" and settings.quantile is not None:
        return {"loss": Pinball(settings.quantile)}
    if kind != "classes":
        return {"loss": name} | _refused_weights(settings.class_weights)
    weight = None
    if settings.class_weights is not None:
        targets = examples.train_y if targets is None else targets
        weight = class_weights(settings.class_weights, targets, examples.classes)
    if name == "focal" and (weight is not None or settings.gamma is not None):
        gamma = 2.0 if settings.gamma is None else float(settings.gamma)
        return {"loss": Focal(gamma, weight), "metrics": METRICS}
    if weight is not None:
        return {"loss": nn.CrossEntropyLoss(weight), "metrics": METRICS}
    return {"loss": name}


def _check_kind(name: str, kind: Kind) -> None:
    of_classes = name in OF_CLASSES
    if of_classes and kind != "classes":
        raise ConfigError(
            f"task.loss = {name!r} needs classes; these targets are {kind}: choose from "
            f"{', '.join(OF_NUMBERS)}"
        )
    if not of_classes and kind == "classes":
        needed = "counts" if name == "poisson" else "numbers"
        raise ConfigError(
            f"task.loss = {name!r} needs {needed}; these targets are classes: choose from "
            f"{', '.join(OF_CLASSES)}"
        )


def _refused_weights(weights: Any) -> dict[str, Any]:
    if weights is not None:
        raise ConfigError("task.class_weights needs classes; these targets are numbers")
    return {}


def _check_counts(examples: Examples) -> None:
    """Refuse targets that are no counts: scaled, below 0, or fractions."""
    y = examples.train_y
    if tuple(examples.info.target_scale) != (0.0, 1.0):
        raise ConfigError(
            "task.loss = 'poisson' needs counts as they are; these targets are standardised: set "
            "data.standardise = false, or declare the target as a count"
        )
    bad = ((y < 0) | (y != y.round())).reshape(len(y), -1).any(1).nonzero()
    if len(bad):
        first = y[bad[0, 0]].flatten()[0].item()
        raise DataError(
            f"task.loss = 'poisson' needs counts; {len(bad)} of {len(y)} training targets are not "
            f"(the first is {first:g}): use mse, mae or huber"
        )


def class_weights(given: str | Sequence[float], targets: Tensor, classes: int) -> Tensor:
    """Give a weight for each class: those given, or n / (C n_c); 0 for a class without examples.

    >>> class_weights("balanced", torch.tensor([0, 0, 0, 1]), 3)
    tensor([0.4444, 1.3333, 0.0000])
    """
    if not isinstance(given, str):
        if len(given) != classes:
            raise ConfigError(
                f"task.class_weights = {list(given)} has {len(given)} weights for {classes} "
                "classes: give one for each"
            )
        return torch.tensor(given, dtype=torch.float64).float()
    count = torch.bincount(targets.flatten().cpu(), minlength=classes)
    return torch.tensor(balanced_weights(count.tolist()), dtype=torch.float64).float()


def balanced_weights(counts: Sequence[int]) -> list[float]:
    """Give n / (C n_c) for each class, 0 for a class without examples.

    >>> balanced_weights([3, 1, 0])
    [0.4444444444444444, 1.3333333333333333, 0.0]
    """
    return [sum(counts) / (len(counts) * n) if n else 0.0 for n in counts]


def meaning_of(experiment: Experiment, examples: Examples, task: Task) -> Meaning:
    """Tell what the outputs of a task mean."""
    kind, quantile = kind_of(experiment, examples), experiment.task.quantile
    if kind == "classes":
        return Meaning(kind, examples.classes, tuple(examples.info.class_names))
    log = task.loss_name == "poisson"
    scaled = experiment.task.target != "input"
    mean, std = examples.info.target_scale if scaled else (0.0, 1.0)
    made = Meaning("counts" if log else kind, mean=mean, std=std, log=log)
    return made._replace(quantile=0.5 if quantile is None else float(quantile))


def meaning_of_task(task: Task) -> Meaning | None:
    """Tell what the outputs of somebody's own task mean; None under a loss of their own."""
    if task.loss_name in OF_CLASSES or isinstance(task.loss, Focal):
        return Meaning("classes")
    if isinstance(task.loss, Pinball):
        return Meaning("numbers", quantile=task.loss.quantile)
    if task.loss_name not in OF_NUMBERS:
        return None
    log = task.loss_name == "poisson"
    return Meaning("counts" if log else "numbers", log=log)
