"""A model that is called: rows in, predictions out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from undrift.errors import ConfigError, DataError
from undrift.tabular.reading import read_rows
from undrift.using import exported, onnx_file
from undrift.using.onnx_file import Run, read_onnx
from undrift.using.package import Package
from undrift.using.predictions import Predictions
from undrift.using.runs import read_run

BATCH = 1024  # rows at a time
NOT_FINITE = "the model's output is not finite"


class Predictor:
    """Predicts for rows of a table (a DataFrame, a file, columns by name) or for tensors.

    A table's rows are prepared as the training rows were.  A tensor goes in as it is.
    """

    def __init__(self, package: Package, run: Run | None = None, *, trust: bool = False) -> None:
        self.package = package
        self.module: nn.Module | None = None if run is not None else package.module(trust)
        self._run = self._torch if run is None else run

    @property
    def about(self) -> Mapping[str, Any]:
        """Tell where the model comes from and how good it is."""
        return self.package.about

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name the classes; none where numbers are predicted."""
        return self.package.blueprint.class_names

    def __repr__(self) -> str:
        blueprint = self.package.blueprint
        what = f"{len(self.class_names)} classes" if self.class_names else blueprint.gives
        return f"Predictor({blueprint.use} of {self.package.place}: {what})"

    def __call__(self, rows: Any) -> Predictions:
        """Predict for rows: a DataFrame, a path, a mapping of columns, or a tensor [n, ...]."""
        if isinstance(rows, Tensor | np.ndarray):
            return self._of_tensor(rows)
        preparation = self.package.preparation
        if preparation is None:
            raise ConfigError(
                f"{self.package.place} was not trained on a table: call it with a tensor of inputs "
                f"{['n', *self.package.blueprint.shape]}".replace("'", "")
            )
        found = read_rows(rows, preparation)
        errors = {int(row): told for row, told in found.errors.items()}
        good = np.setdiff1d(np.arange(len(found.frame)), np.array(list(errors), dtype=np.int64))
        x = torch.from_numpy(preparation.encode(found.frame, good))
        return self._predicted(x, good, list(map(int, found.numbers)), errors)

    def _of_tensor(self, given: Any) -> Predictions:
        try:
            x = torch.as_tensor(given).detach().cpu()
        except (TypeError, ValueError) as error:
            raise DataError(f"rows must be numbers: {error}") from error
        blueprint = self.package.blueprint
        if tuple(x.shape[1:]) != blueprint.shape or x.dim() == 0:
            raise DataError(
                f"rows are {list(x.shape)}, but {self.package.place} reads "
                f"[n, {', '.join(map(str, blueprint.shape))}]"
            )
        if blueprint.whole and x.is_floating_point():
            raise DataError(f"{self.package.place} reads whole numbers, as {x.dtype} they are none")
        x = x if blueprint.whole else x.to(torch.float32)
        finite = x.isfinite().reshape(len(x), math.prod(x.shape[1:])).all(1)
        errors = {int(i): "it holds NaN or infinity" for i in (~finite).nonzero().flatten()}
        good = finite.nonzero().flatten().numpy()
        return self._predicted(x[finite], good, range(len(x)), errors)

    def _predicted(
        self, x: Tensor, good: NDArray[Any], numbers: Any, errors: dict[int, str]
    ) -> Predictions:
        """Run the model on the rows that have no error, and put its outputs into their places."""
        pieces = [self._run(x[i : i + BATCH]) for i in range(0, len(x), BATCH)]
        shape = pieces[0].shape[1:] if pieces else (max(1, len(self.class_names)),)
        outputs = np.full((len(numbers), *shape), np.nan)
        if pieces:
            outputs[good] = np.concatenate(pieces)
        finite = np.isfinite(outputs).reshape(len(outputs), math.prod(shape))
        wrong = [int(i) for i in good if not finite[i].all()]
        outputs[wrong] = np.nan
        errors = {**errors, **dict.fromkeys(wrong, NOT_FINITE)}
        preparation = self.package.preparation
        target = "" if preparation is None else str(preparation.schema.target)
        return Predictions(outputs, self.class_names, numbers, dict(sorted(errors.items())), target)

    @torch.no_grad()
    def _torch(self, x: Tensor) -> NDArray[np.float64]:
        assert self.module is not None
        dtype = next(self.module.parameters()).dtype
        outputs: Tensor = self.module(x if self.package.blueprint.whole else x.to(dtype))
        found: NDArray[np.float64] = self.package.blueprint.meaning(outputs.double()).numpy()
        return found


def load_model(path: Path | str, trust: bool = False) -> Predictor:
    """Load a model from the folder of a run, or from a file of `undrift export`.

    `trust` lets a network of somebody's own be imported (`module:function`), which runs its code.
    """
    if not isinstance(path, Path | str) or "\0" in str(path):
        raise ConfigError(f"a model is loaded from a folder or a file, got {path!r}")
    place = Path(path)
    if place.is_dir():
        return Predictor(read_run(place, trust=trust), trust=trust)
    suffix = place.suffix.lower()
    if suffix not in (exported.SUFFIX, onnx_file.SUFFIX):
        raise ConfigError(
            f"{path} is neither the folder of a run nor a file of `undrift export` "
            f"({exported.SUFFIX} or {onnx_file.SUFFIX})"
        )
    try:
        if suffix == onnx_file.SUFFIX:
            return Predictor(*read_onnx(place))
        return Predictor(exported.read_exported(place), trust=trust)
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        raise DataError(f"cannot read the model {path}: {cause}") from error
