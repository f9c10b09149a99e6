"""Which implementation computes a layer, and in which precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from undrift.core.conv_ways import TORCH_WAYS
from undrift.core.linear import Descent
from undrift.core.precision import check_precision
from undrift.errors import unknown_name

if TYPE_CHECKING:
    from undrift.core.history import History

WAYS = (*TORCH_WAYS, "triton", "auto")  # auto: whichever is fastest, found out once


class Way(NamedTuple):
    """How one layer is computed."""

    name: str = "grouped"
    precision: str = "float32"
    narrow: bool = False  # leave the output in the operand type: the next layer reads it so
    descent: Descent | None = None  # take the SGD step while going back
    history: History | None = None  # remember the step instead, see core/history.py
    planes: bool = False  # a convolution's output is best when each channel lies together
    rectify: bool = False  # a linear layer's input goes through ReLU first


@dataclass(frozen=True)
class Seam:
    """Which implementation each layer takes, and the precision of all of them.

    >>> Seam("bf16", {"conv1": "loop"}).way("conv1").name
    'loop'
    """

    precision: str = "float32"
    choices: Mapping[str, str] = field(default_factory=dict)  # by the layer's full name
    default: str = "grouped"

    def __post_init__(self) -> None:
        check_precision(self.precision)
        for name in (self.default, *self.choices.values()):
            if name not in WAYS:
                raise unknown_name("way to convolve", name, list(WAYS), "engine")

    @property
    def may_use_kernels(self) -> bool:
        """Whether Triton kernels are asked for anywhere."""
        return bool({"triton", "auto"} & {self.default, *self.choices.values()})

    def uses_kernels(self, layer: str) -> bool:
        """Whether a layer without ways of its own, a BatchNorm, takes Triton kernels."""
        return self.choices.get(layer, self.default) in ("triton", "auto")

    def way(self, layer: str, narrow: bool = False, descent: Descent | None = None) -> Way:
        """Give the way that a layer takes; linear layers are Triton's or torch's."""
        known = None if descent is None else descent.histories
        history = None if known is None else known.layers.get(layer)
        name = self.choices.get(layer, self.default)
        if descent is None or not descent.steps:
            return Way(name, self.precision, narrow, None, history)
        return Way(name, self.precision, narrow, descent._replace(layer=layer), history)
