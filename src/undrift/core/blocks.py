"""Layers that a seam computes: convolutions and BatchNorms with what follows, and linear layers.

A sequence looks ahead.  Conv2d with a ReLU and a 2x2 max-pool behind it becomes one op, so does a
BatchNorm where kernels do it, and a Linear with a ReLU before it; between two layers of the seam
activations stay in the operand type.  A layer with hooks is always called itself, on float32, and
what leaves the seam is float32 in torch's usual order of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from undrift import kernels
from undrift.core.convolution import ConvShape, Seam, convolve
from undrift.core.dense import dense
from undrift.core.linear import Descent
from undrift.core.precision import operand_type
from undrift.kernels.problem import Norm

# Layers without weights that pass on whatever type they get.
TRANSPARENT = (
    *(nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Block(NamedTuple):
    """A layer of the seam and what is computed with it."""

    layer: nn.Module
    relu: bool = False  # behind a convolution or a BatchNorm, before a linear layer
    pool: bool = False
    length: int = 1  # how many layers of the sequence it stands for


def run_sequence(
    layers: Sequence[nn.Module], x: Tensor, seam: Seam, descent: Descent | None = None
) -> Tensor:
    """Call layers one after the other, those of the seam as blocks."""
    at = 0
    while at < len(layers):
        block = find_block(layers, at) or find_norm(layers, at, seam, x)
        at += block.length if block else 1
        if block is None:
            x = layers[at - 1](x)
        else:
            rest = layers[at:]
            narrow = _feeds_seam(rest, seam, x)
            x = run_block(block, x, seam, descent, narrow, flat=_is_flat(rest))
    return x


def run_block(
    block: Block, x: Tensor, seam: Seam, descent: Descent | None, narrow: bool = False,
    flat: bool = False,
) -> Tensor:  # fmt: skip
    """Compute a block; `narrow` leaves the result as the next layer of the seam reads it.

    `flat`: what comes next reads channel after channel.
    """
    layer: Any = block.layer
    if isinstance(layer, _BatchNorm):
        wide = torch.promote_types(x.dtype, torch.float32)
        result = operand_type(seam.precision, wide) if narrow else wide
        norm = Norm(layer.eps, result, block.relu, block.pool, planes=flat or not narrow)
        normed: Tensor = layer(x, norm)
        return normed
    how = seam.way(layer._place.name, narrow, descent)._replace(planes=flat or not narrow)
    if isinstance(layer, nn.Linear):
        return dense(x, layer.weight, layer.bias, how._replace(rectify=block.relu))
    single = x.dim() == 3  # one image: torch takes it so
    y = convolve(
        x[None] if single else x, layer.weight, layer.bias,
        conv_shape(layer, block.relu, block.pool), how,
    )  # fmt: skip
    y = y.squeeze(0) if single else y
    # Whoever comes next may call `view`.
    return y if narrow else y.contiguous()


def moving(module: nn.Module) -> set[str]:
    """Name the parameters that move while going back, where a pass has a seam and a descent."""
    layers = [(name, part) for name, part in module.named_modules() if takes(part)]
    own = [(name, key) for name, part in layers for key, _ in part.named_parameters(recurse=False)]
    return {f"{name}.{key}" if name else key for name, key in own}


def find_block(layers: Sequence[nn.Module], at: int) -> Block | None:
    """Find out whether a layer is the seam's, and how many of the next ones go with it."""
    layer = layers[at]
    if _is_hooked(layer):
        return None
    if _is_relu(layer) and at + 1 < len(layers) and isinstance(layers[at + 1], nn.Linear):
        linear = find_block(layers, at + 1)
        seen = getattr(layer, "inplace", False)  # others may read what it writes
        return None if seen or linear is None else linear._replace(relu=True, length=2)
    if not takes(layer):
        return None
    return _with_followers(layers, at, pools=True) if isinstance(layer, nn.Conv2d) else Block(layer)


def find_norm(layers: Sequence[nn.Module], at: int, seam: Seam, x: Any) -> Block | None:
    """Find out whether a layer is a BatchNorm that kernels compute, and what goes with it."""
    if not normalises(layers[at], seam, x):
        return None
    return _with_followers(layers, at, pools=isinstance(layers[at], nn.BatchNorm2d))


def _with_followers(layers: Sequence[nn.Module], at: int, pools: bool) -> Block:
    """Add a ReLU and, where a layer `pools`, a 2x2 max-pool that follow it, in either order."""
    block = Block(layers[at])
    for follower in layers[at + 1 : at + 3]:
        relu = _is_relu(follower) and not block.relu
        pool = _is_small_pool(follower) and pools and not block.pool
        if _is_hooked(follower) or not (relu or pool):
            break
        block = Block(block.layer, block.relu or relu, block.pool or pool, block.length + 1)
    return block


def normalises(layer: nn.Module, seam: Seam, x: Any) -> bool:
    """Whether a layer is a prepared BatchNorm that nobody looks at, and kernels compute it.

    x lies where its input does; before other layers it may be anything, such as an LSTM's pair.
    """
    if not isinstance(layer, _BatchNorm) or not hasattr(layer, "_place") or _is_hooked(layer):
        return False
    plain = layer.weight is None or layer.weight.dtype == torch.float32
    place: Any = layer._place
    return plain and seam.uses_kernels(place.name) and kernels.available(x.device)


def takes(layer: nn.Module) -> bool:
    """Whether a prepared layer can be computed by a seam."""
    kind = getattr(layer, "kind", None)  # what `prepare` exchanged
    if kind is None or "forward" in vars(layer):
        return False
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros" and _padding(layer) is not None
    return isinstance(layer, nn.Linear)


def conv_shape(layer: nn.Conv2d, relu: bool, pool: bool) -> ConvShape:
    """Describe a convolution that `takes` has accepted."""
    padding = _padding(layer)
    assert padding is not None, "asked for before"
    stride, dilation = _pair(layer.stride), _pair(layer.dilation)
    return ConvShape(stride, padding, dilation, layer.groups, relu, pool)


def _padding(layer: nn.Conv2d) -> tuple[int, int] | None:
    """Give the padding on both sides, or None if the sides differ."""
    if not isinstance(layer.padding, str):
        return _pair(layer.padding)
    if layer.padding == "valid":
        return 0, 0
    total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return None if any(n % 2 for n in total) else (total[0] // 2, total[1] // 2)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _feeds_seam(layers: Sequence[nn.Module], seam: Seam, x: Tensor) -> bool:
    """Whether the next layer with weights is the seam's and nobody looks at what lies between."""
    for layer in layers:
        if _is_hooked(layer):
            return False
        if takes(layer) or normalises(layer, seam, x):
            return True
        if _kind(layer) not in TRANSPARENT:
            return False
    return False


def _is_flat(layers: Sequence[nn.Module]) -> bool:
    """Whether what comes next, behind layers that leave memory as it lies, is a Flatten."""
    kinds = (_kind(layer) for layer in layers)
    return next((k for k in kinds if k not in (nn.Dropout, nn.Identity)), None) is nn.Flatten


def _kind(layer: nn.Module) -> type:
    kind: type = getattr(layer, "kind", type(layer))
    return kind


def _is_hooked(layer: nn.Module) -> bool:
    return any(getattr(layer, hooks) for hooks in HOOKS) or "forward" in vars(layer)


def _is_relu(layer: nn.Module) -> bool:
    return _kind(layer) is nn.ReLU


def _is_small_pool(layer: nn.Module) -> bool:
    """Whether a layer takes the maximum of every 2x2 square, and nothing else."""
    if _kind(layer) is not nn.MaxPool2d or not isinstance(layer, nn.MaxPool2d):
        return False
    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    plain = [_pair(s) for s in sizes] == [(2, 2), (2, 2), (0, 0), (1, 1)]
    return plain and not layer.ceil_mode and not layer.return_indices
