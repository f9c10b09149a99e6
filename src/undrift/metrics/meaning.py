"""What a model's outputs mean: probabilities of classes, numbers in own units, means of counts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undrift.errors import ConfigError
from undrift.metrics.metric import Kind, whole_or_double


class Meaning(NamedTuple):
    """How outputs and targets of a task are read."""

    kind: Kind
    classes: int = 0
    names: tuple[str, ...] = ()  # of the classes
    mean: float = 0.0  # of numbers: y * std + mean is in own units
    std: float = 1.0
    log: bool = False  # whether outputs are logarithms of what is predicted
    quantile: float = 0.5  # of the pinball loss

    def scores(self, outputs: Tensor) -> Tensor:
        """Give probabilities [n, C], or predictions [n] in own units, in float64."""
        if self.kind == "classes":
            return outputs.double().softmax(1)
        values = outputs.double().flatten()
        return values.exp() if self.log else values * self.std + self.mean

    def truths(self, targets: Tensor) -> Tensor:
        """Give class numbers [n], or numbers [n] in own units, in float64."""
        if self.kind == "classes":
            return targets.long()
        return whole_or_double(targets).double().flatten() * self.std + self.mean

    def check(self, outputs: Tensor, targets: Tensor, place: str) -> None:
        """Refuse outputs that cannot be read so."""
        if self.kind != "classes":
            good, wanted = outputs.shape == targets.shape, "an output for each number"
        else:
            good = outputs.dim() == 2 and targets.dim() == 1 and outputs.shape[1] >= 2
            good = good and not targets.is_floating_point()
            wanted = "one output for each class, and one class for each example"
        if not good:
            raise ConfigError(
                f"{place} needs {wanted}; outputs are {list(outputs.shape)} and targets "
                f"{list(targets.shape)} for {len(targets)} examples"
            )

    def owners(self, owner: Tensor, outputs: Tensor) -> Tensor:
        """Give the owner of each score: an example may have several numbers."""
        if self.kind == "classes" or outputs.numel() == len(outputs):
            return owner
        return torch.repeat_interleave(owner, outputs.numel() // max(1, len(outputs)))
