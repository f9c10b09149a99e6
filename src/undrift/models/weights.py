"""First weights as a function of a seed: torch's default distribution, Xavier's or He's.

They come from core/random.py, so no generator is read or moved, and machines agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from undrift.core.random import fold, normal, uniform
from undrift.models.tabular import LevelMap

Layer = nn.Linear | nn.Conv2d
Way = Callable[[Layer, int, str], None]  # fills a layer, by a seed and the layer's name


def torchs_way(layer: Layer, seed: int, name: str) -> None:
    """Fill weights and biases uniformly; the bound is 1 / sqrt(inputs of one unit)."""
    bound = 1 / math.sqrt(layer.weight[0].numel())
    _fill(layer.weight, bound, seed, f"{name}.weight")
    _fill_bias(layer, bound, seed, name)


def xaviers_way(layer: Layer, seed: int, name: str) -> None:
    """Fill weights as Glorot and Bengio (2010): the bound is sqrt(6 / (inputs + outputs))."""
    field = layer.weight[0][0].numel()
    units = layer.weight.shape[0] + layer.weight.shape[1]
    _fill(layer.weight, math.sqrt(6 / (field * units)), seed, f"{name}.weight")
    _fill_bias(layer, 1 / math.sqrt(layer.weight[0].numel()), seed, name)


def hes_way(layer: Layer, seed: int, name: str) -> None:
    """Fill convolutions as He et al. (2015): N(0, 2 / outputs of one input), biases 0."""
    if not isinstance(layer, nn.Conv2d):
        return torchs_way(layer, seed, name)
    spread = math.sqrt(2 / layer.weight[:, 0].numel())
    _fill_normal(layer.weight, spread, seed, f"{name}.weight")
    assert layer.bias is not None, "every layer here has a bias"
    return _set(layer.bias, torch.zeros(layer.bias.numel()))


def draw_weights(module: nn.Module, seed: int, way: Way = torchs_way) -> None:
    """Fill linear and convolution layers in some way, others as torch does.

    A frozen embedding keeps what it was given.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, LevelMap):  # one input of a block is 1, so one input counts, not all
            _fill(layer.weight, 1.0, seed, f"{name}.weight")
        elif isinstance(layer, nn.Linear | nn.Conv2d):
            way(layer, seed, name)
        elif isinstance(layer, nn.LSTM):
            for key, parameter in layer.named_parameters():
                _fill(parameter, 1 / math.sqrt(layer.hidden_size), seed, f"{name}.{key}")
        elif isinstance(layer, nn.Embedding) and layer.weight.requires_grad:
            _fill_normal(layer.weight, 1.0, seed, f"{name}.weight")
        elif isinstance(layer, nn.BatchNorm2d | nn.LayerNorm):
            layer.reset_parameters()  # ones and zeros: draws nothing


def _fill_bias(layer: Layer, bound: float, seed: int, name: str) -> None:
    assert layer.bias is not None, "every layer here has a bias"
    _fill(layer.bias, bound, seed, f"{name}.bias")


def _fill(parameter: Tensor, bound: float, seed: int, name: str) -> None:
    draws = uniform(fold(seed, "weights", name), torch.arange(parameter.numel()))
    _set(parameter, bound * (2 * draws - 1))


def _fill_normal(parameter: Tensor, spread: float, seed: int, name: str) -> None:
    draws = normal(fold(seed, "weights", name), torch.arange(parameter.numel()))
    _set(parameter, spread * draws)


def _set(parameter: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values.view_as(parameter))
