"""What a model's outputs mean: probabilities of classes, numbers in own units, means of counts."""

from __future__ import annotations

from typing import Any, NamedTuple

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

    def fits(self, outputs: Any, targets: Tensor) -> bool:
        """Whether outputs can be read so."""
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            return False
        if self.kind != "classes":
            return outputs.shape == targets.shape
        plain = outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point()
        return plain and outputs.shape[1] >= max(2, self.classes)

    def check(self, outputs: Any, targets: Tensor, place: str) -> None:
        """Refuse outputs that cannot be read so."""
        if self.fits(outputs, targets):
            return
        classes = self.kind == "classes"
        wanted = "an output for each class" if classes else "an output for each number"
        shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ConfigError(
            f"{place} needs {wanted} of an example; outputs are {shape} and targets "
            f"{list(targets.shape)} for {len(targets)} examples"
        )

    def owners(self, owner: Tensor, outputs: Tensor) -> Tensor:
        """Give the owner of each score: an example may have several numbers."""
        if self.kind == "classes" or outputs.numel() == len(outputs):
            return owner
        return torch.repeat_interleave(owner, outputs.numel() // max(1, len(outputs)))
