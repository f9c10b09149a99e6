"""Gradient boosting by scikit-learn on the pooled, prepared table: a ceiling, where installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.core.losses import Pinball
from undrift.errors import DataError
from undrift.experiment.baselines.fitted import SMALLEST
from undrift.experiment.baselines.scene import Answer, Scene

LABEL = "gradient boosting, pooled"
MISSING = (
    "Gradient boosting on the pooled table is left out: it needs scikit-learn, pip install "
    "'undrift[boosting]'."
)


def is_installed() -> bool:
    """Whether scikit-learn is there."""
    return find_spec("sklearn") is not None


def boosted(scene: Scene) -> dict[str, Answer]:
    """Fit trees on all training rows, and give their answers as a network's outputs."""
    rows, examples = scene.rows, scene.dealt.examples
    x, y = examples.train_x[rows], scene.y[rows]
    seed = scene.experiment.seeds.run % 2**32
    predict = _classes(scene, x, y, seed) if scene.meaning.kind == "classes" else _numbers(
        scene, x, y, seed
    )  # fmt: skip
    papers = scene.papers.items()
    return {n: Answer(predict(p.x.cpu()).to(scene.task.dtype)) for n, p in papers}


def _plain(x: Tensor) -> Any:
    return x.flatten(1).cpu().numpy()


def _classes(scene: Scene, x: Tensor, y: Tensor, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    there = y.unique().tolist()
    if len(there) < 2:
        raise DataError("all training rows are of one class")
    weights = getattr(scene.task.loss, "weight", None)
    weighed = None if weights is None else weights.cpu().numpy()[y.numpy()].astype(np.float64)
    model = HistGradientBoostingClassifier(random_state=seed)
    model.fit(_plain(x), y.numpy(), sample_weight=weighed)
    columns = [int(c) for c in model.classes_]

    def predict(x: Tensor) -> Tensor:
        found = torch.zeros(len(x), scene.meaning.classes, dtype=torch.float64)
        found[:, columns] = torch.from_numpy(model.predict_proba(_plain(x)))
        return found.clamp(min=SMALLEST).log()

    return predict


def _numbers(scene: Scene, x: Tensor, y: Tensor, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(random_state=seed, **_loss(scene))
    model.fit(_plain(x), y.flatten().double().numpy())

    def predict(x: Tensor) -> Tensor:
        found = torch.from_numpy(model.predict(_plain(x)))[:, None]
        return found.clamp(min=SMALLEST).log() if scene.meaning.log else found

    return predict


def _loss(scene: Scene) -> dict[str, Any]:
    """Name the loss as scikit-learn does."""
    name = scene.task.loss_name
    if isinstance(scene.task.loss, Pinball) or name == "pinball":
        return {"loss": "quantile", "quantile": scene.meaning.quantile}
    return {"loss": {"mae": "absolute_error", "poisson": "poisson"}.get(name, "squared_error")}
