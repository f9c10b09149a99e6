"""First weights as a function of a seed: torch's default distribution, or Xavier's.

They come from core/random.py, so no generator is read or moved, and machines agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from undrift.core.random import fold, uniform

Bound = Callable[[Tensor], float]  # weights are uniform on [-bound, bound)


def torch_bound(weight: Tensor) -> float:
    """Give the bound of torch's own layers: 1 / sqrt(inputs of one unit)."""
    return 1 / math.sqrt(weight[0].numel())


def xavier_bound(weight: Tensor) -> float:
    """Give the bound of Glorot and Bengio (2010): sqrt(6 / (inputs + outputs))."""
    field = weight[0][0].numel()
    return math.sqrt(6 / (field * (weight.shape[0] + weight.shape[1])))


def draw_weights(module: nn.Sequential, seed: int, bound: Bound = torch_bound) -> None:
    """Fill the linear and convolution layers; biases as torch draws them."""
    for name, layer in module.named_children():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            _fill(layer.weight, bound(layer.weight), seed, f"{name}.weight")
            assert layer.bias is not None, "every layer here has a bias"
            _fill(layer.bias, torch_bound(layer.weight), seed, f"{name}.bias")


def _fill(parameter: Tensor, bound: float, seed: int, name: str) -> None:
    draws = uniform(fold(seed, "weights", name), torch.arange(parameter.numel()))
    with torch.no_grad():
        parameter.copy_((bound * (2 * draws - 1)).view_as(parameter))
