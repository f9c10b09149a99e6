"""Forms of a cohort's convolution that read and write channels last.

Shapes.  x [C, B, ci, H, W] and g [C, B, co, H', W'] lie in memory as [C, B, H, W, c]; w is
[C, co, ci / groups, kh, kw].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from undrift.core.conv_ways import TORCH_WAYS, ConvShape, output_size


class Form(NamedTuple):
    """One form: the output and both gradients."""

    output: Callable[[Tensor, Tensor, ConvShape], Tensor]  # (x, w, shape)
    # (g, w, shape, size of x); (g, x, w, shape), of which only w's size is read
    by_x: Callable[[Tensor, Tensor, ConvShape, Sequence[int]], Tensor]
    by_w: Callable[[Tensor, Tensor, Tensor, ConvShape], Tensor]


# ------------------------------------------------------------- patches, as products of matrices
def _patches(x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Copy out what each output reads: [C, B H' W', kh kw ci]."""
    rows, columns = output_size(x.shape, w.shape, shape)
    (up, left), (down, right), (height, width) = shape.padding, shape.stride, shape.dilation
    last = x.permute(0, 1, 3, 4, 2)
    if up or left:
        last = F.pad(last, (0, 0, left, left, up, up))
    c, b, h, v, one = last.stride()
    size = (*last.shape[:2], rows, columns, *w.shape[3:], last.shape[4])
    steps = (c, b, h * down, v * right, h * height, v * width, one)
    return last.as_strided(size, steps).reshape(len(x), -1, w.shape[3] * w.shape[4] * last.shape[4])


def _matrix(w: Tensor) -> Tensor:
    """[C, co, ci, kh, kw] -> [C, kh kw ci, co]."""
    return w.permute(0, 3, 4, 2, 1).flatten(1, 3)


def _rows(g: Tensor) -> Tensor:
    """[C, B, co, H', W'] -> [C, B H' W', co]."""
    return g.permute(0, 1, 3, 4, 2).flatten(1, 3)


def _patches_output(x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    y = torch.bmm(_patches(x, w, shape), _matrix(w))
    rows, columns = output_size(x.shape, w.shape, shape)
    return y.unflatten(1, (x.shape[1], rows, columns)).permute(0, 1, 4, 2, 3)


def _patches_by_x(g: Tensor, w: Tensor, shape: ConvShape, size: Sequence[int]) -> Tensor:
    """Multiply, then add every product to the place that it was read from."""
    (up, left), (down, right), (height, width) = shape.padding, shape.stride, shape.dilation
    batch, channels, whole_rows, whole_columns = size
    rows, columns = g.shape[3:]
    parts = torch.bmm(_rows(g), _matrix(w).transpose(1, 2))
    parts = parts.view(len(g), batch, rows, columns, *w.shape[3:], channels)
    space = (len(g), batch, whole_rows + 2 * up, whole_columns + 2 * left, channels)
    found = g.new_zeros(space)
    for i in range(w.shape[3]):
        for j in range(w.shape[4]):
            below = slice(i * height, i * height + (rows - 1) * down + 1, down)
            beside = slice(j * width, j * width + (columns - 1) * right + 1, right)
            found[:, :, below, beside] += parts[:, :, :, :, i, j]
    inside = found[:, :, up : up + whole_rows, left : left + whole_columns]
    return inside.permute(0, 1, 4, 2, 3)


def _patches_by_w(g: Tensor, x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    found = torch.bmm(_rows(g).transpose(1, 2), _patches(x, w, shape))
    return found.view(*w.shape[:2], *w.shape[3:], w.shape[2]).permute(0, 1, 4, 2, 3)


# ----------------------------------------------------------------------- the forms that torch has
def _by_torch(name: str) -> Form:
    way = TORCH_WAYS[name]

    def by_x(g: Tensor, w: Tensor, shape: ConvShape, size: Sequence[int]) -> Tensor:
        x = g.new_empty((len(w), *size))  # only its size is read
        found, _ = way.backward(g, x, w, shape, (True, False))
        assert found is not None, "it was asked for"
        return found

    def by_w(g: Tensor, x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
        _, found = way.backward(g, x, w, shape, (False, True))
        assert found is not None, "it was asked for"
        return found

    return Form(lambda x, w, shape: way.forward(x, w, None, shape), by_x, by_w)


GROUPED = "grouped"
FORMS = {name: _by_torch(name) for name in (GROUPED, "channels_last", "streams")}
PATCHES = "patches"  # only where groups = 1
FORMS[PATCHES] = Form(_patches_output, _patches_by_x, _patches_by_w)
