"""Ways to convolve a cohort in torch: C clients, each with its own weights.

Shapes.  x [C, B, ci, H, W], w [C, co, ci / groups, kh, kw], bias [C, co] or None, y and its
gradient [C, B, co, H', W'].  All of them give the same numbers within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Pair = tuple[int, int]


class ConvShape(NamedTuple):
    """What a convolution does besides its weights, and what follows it in the same op."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    relu: bool = False
    pool: bool = False  # 2x2 maximum; before or after the ReLU is the same


class TorchWay(NamedTuple):
    """One way: the convolution with its bias, and its gradients."""

    forward: Callable[[Tensor, Tensor, Tensor | None, ConvShape], Tensor]
    # (gradient, x, w, shape, whether x's and w's gradients are needed)
    backward: Callable[[Tensor, Tensor, Tensor, ConvShape, Pair], tuple[Tensor | None, ...]]


def output_size(x: Sequence[int], w: Sequence[int], shape: ConvShape) -> Pair:
    """Give the size of the convolution's own output, from the shapes of x and w.

    >>> output_size((8, 3, 32, 32), (64, 3, 5, 5), ConvShape())
    (28, 28)
    """
    height, width = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(
            x[-2:], w[-2:], shape.stride, shape.padding, shape.dilation, strict=True
        )
    )
    return height, width


# ------------------------------------------------------------------------- grouped convolutions
def _wide(t: Tensor) -> Tensor:
    """[C, B, c, H, W] -> [B, C c, H, W]."""
    return t.transpose(0, 1).flatten(1, 2)


def _cohort(t: Tensor, clients: int) -> Tensor:
    """[B, C c, H, W] -> [C, B, c, H, W]."""
    return t.unflatten(1, (clients, -1)).transpose(0, 1)


def _grouped_forward(x: Tensor, w: Tensor, b: Tensor | None, shape: ConvShape) -> Tensor:
    bias = None if b is None else b.flatten()
    groups = len(w) * shape.groups
    z = F.conv2d(
        _wide(x), w.flatten(0, 1), bias, shape.stride, shape.padding, shape.dilation, groups
    )
    return _cohort(z, len(w))


def _grouped_backward(
    g: Tensor, x: Tensor, w: Tensor, shape: ConvShape, needs: Pair
) -> tuple[Tensor | None, ...]:
    gx, gw = _gradients(_wide(g), _wide(x), w.flatten(0, 1), shape, len(w), needs)
    return (
        None if gx is None else _cohort(gx, len(w)),
        None if gw is None else gw.unflatten(0, (len(w), -1)),
    )


def _gradients(
    g: Tensor, x: Tensor, w: Tensor, shape: ConvShape, clients: int, needs: Pair
) -> tuple[Tensor | None, ...]:
    found = torch.ops.aten.convolution_backward(
        g, x, w, None, shape.stride, shape.padding, shape.dilation, False, [0, 0],
        clients * shape.groups, [*map(bool, needs), False],
    )  # fmt: skip
    return tuple(t if need else None for t, need in zip(found[:2], needs, strict=True))


def _last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def _channels_last_forward(x: Tensor, w: Tensor, b: Tensor | None, shape: ConvShape) -> Tensor:
    bias = None if b is None else b.flatten()
    groups = len(w) * shape.groups
    wide, weight = _last(_wide(x)), _last(w.flatten(0, 1))
    z = F.conv2d(wide, weight, bias, shape.stride, shape.padding, shape.dilation, groups)
    return _cohort(z, len(w))


def _channels_last_backward(
    g: Tensor, x: Tensor, w: Tensor, shape: ConvShape, needs: Pair
) -> tuple[Tensor | None, ...]:
    parts = (_last(_wide(g)), _last(_wide(x)), _last(w.flatten(0, 1)))
    gx, gw = _gradients(*parts, shape, len(w), needs)
    return (
        None if gx is None else _cohort(gx, len(w)),
        None if gw is None else gw.contiguous().unflatten(0, (len(w), -1)),
    )


# ----------------------------------------------------------------- unfolded, as matrix products
def _columns(x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Lay out the patches: [C, groups, ci/groups kh kw, B L]."""
    cols = F.unfold(x.flatten(0, 1), w.shape[-2:], shape.dilation, shape.padding, shape.stride)
    return cols.unflatten(0, x.shape[:2]).unflatten(2, (shape.groups, -1)).movedim(1, 3).flatten(3)


def _matrices(t: Tensor, groups: int) -> Tensor:
    """[C, B, co, H, W] -> [C, groups, co/groups, B H W]."""
    return t.transpose(1, 2).unflatten(1, (groups, -1)).flatten(3)


def _unfold_forward(x: Tensor, w: Tensor, b: Tensor | None, shape: ConvShape) -> Tensor:
    rows = w.flatten(2).unflatten(1, (shape.groups, -1))
    z = (rows @ _columns(x, w, shape)).flatten(1, 2)
    if b is not None:
        z = z + b[:, :, None]
    return z.unflatten(2, (x.shape[1], *output_size(x.shape, w.shape, shape))).transpose(1, 2)


def _unfold_backward(
    g: Tensor, x: Tensor, w: Tensor, shape: ConvShape, needs: Pair
) -> tuple[Tensor | None, ...]:
    rows, grad = w.flatten(2).unflatten(1, (shape.groups, -1)), _matrices(g, shape.groups)
    gx = gw = None
    if needs[0]:
        cols = (rows.transpose(2, 3) @ grad).unflatten(3, (x.shape[1], -1)).movedim(3, 1)
        gx = F.fold(
            cols.flatten(2, 3).flatten(0, 1), x.shape[-2:], w.shape[-2:], shape.dilation,
            shape.padding, shape.stride,
        ).unflatten(0, x.shape[:2])  # fmt: skip
    if needs[1]:
        gw = (grad @ _columns(x, w, shape).transpose(2, 3)).view(w.shape)
    return gx, gw


# ------------------------------------------------------------------------- client after client
def _one_forward(x: Tensor, w: Tensor, b: Tensor | None, shape: ConvShape) -> Tensor:
    return F.conv2d(x, w, b, *shape[:4])


def _loop_forward(x: Tensor, w: Tensor, b: Tensor | None, shape: ConvShape) -> Tensor:
    biases = [None] * len(w) if b is None else list(b)
    return torch.stack([_one_forward(*one, shape) for one in zip(x, w, biases, strict=True)])


def _loop_backward(
    g: Tensor, x: Tensor, w: Tensor, shape: ConvShape, needs: Pair
) -> tuple[Tensor | None, ...]:
    found = [_gradients(*one, shape, 1, needs) for one in zip(g, x, w, strict=True)]
    return tuple(_stacked([part[i] for part in found]) for i in range(2))


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    there = [p for p in parts if p is not None]
    return torch.stack(there) if there else None


# ------------------------------------------------------------------ client after client, overlapped
STREAMS = 16
_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def _overlapped(clients: int, device: torch.device, work: Callable[[int], None]) -> None:
    """Run work(0), work(1), ... on streams beside the current one, which waits for them all.

    A stream may only write into memory that was allocated before, on the current stream.
    """
    if device not in _streams:
        _streams[device] = [torch.cuda.Stream(device) for _ in range(STREAMS)]
    here, others = torch.cuda.current_stream(device), _streams[device][:clients]
    for stream in others:
        stream.wait_stream(here)
    for c in range(clients):
        with torch.cuda.stream(others[c % len(others)]):
            work(c)
    for stream in others:
        here.wait_stream(stream)


def _streams_forward(x: Tensor, w: Tensor, b: Tensor | None, shape: ConvShape) -> Tensor:
    if x.device.type != "cuda":
        return _loop_forward(x, w, b, shape)
    z = x.new_empty((len(w), x.shape[1], w.shape[1], *output_size(x.shape, w.shape, shape)))

    def work(c: int) -> None:
        z[c].copy_(_one_forward(x[c], w[c], None if b is None else b[c], shape))

    _overlapped(len(w), x.device, work)
    return z


def _streams_backward(
    g: Tensor, x: Tensor, w: Tensor, shape: ConvShape, needs: Pair
) -> tuple[Tensor | None, ...]:
    if x.device.type != "cuda":
        return _loop_backward(g, x, w, shape, needs)
    made = tuple(
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if need else None
        for t, need in zip((x, w), needs, strict=True)
    )

    def work(c: int) -> None:
        for whole, part in zip(made, _gradients(g[c], x[c], w[c], shape, 1, needs), strict=True):
            if whole is not None and part is not None:
                whole[c].copy_(part)

    _overlapped(len(w), x.device, work)
    return made


TORCH_WAYS: dict[str, TorchWay] = {
    "grouped": TorchWay(_grouped_forward, _grouped_backward),
    "channels_last": TorchWay(_channels_last_forward, _channels_last_backward),
    "unfold": TorchWay(_unfold_forward, _unfold_backward),
    "streams": TorchWay(_streams_forward, _streams_backward),
    "loop": TorchWay(_loop_forward, _loop_backward),
}


# ------------------------------------------------------------------------------ ReLU and pooling
NO_GRADIENT = 4  # in the index of a pooled layer, where 0 to 3 is the place of the maximum


def finish(z: Tensor, shape: ConvShape) -> tuple[Tensor, Tensor]:
    """Apply ReLU and pooling: (y, where each pooled value came from as int8, else empty)."""
    if not shape.pool:
        return (z.relu() if shape.relu else z), z.new_empty((len(z), 0), dtype=torch.int8)
    swapped = z.stride(0) < z.stride(1)  # grouped convolutions have clients inside examples
    rows = z.transpose(0, 1) if swapped else z
    y, flat = F.max_pool2d(rows.flatten(0, 1), 2, return_indices=True)
    row, column = flat // z.shape[-1], flat % z.shape[-1]
    place = (row % 2 * 2 + column % 2).to(torch.int8)
    if shape.relu:
        place = torch.where(y > 0, place, NO_GRADIENT)
        y = y.relu()
    y, place = (t.unflatten(0, rows.shape[:2]) for t in (y, place))
    return (y.transpose(0, 1), place.transpose(0, 1)) if swapped else (y, place)


def unfinish(g: Tensor, y: Tensor, place: Tensor, shape: ConvShape, size: Sequence[int]) -> Tensor:
    """Bring a gradient back through ReLU and pooling; `size` is that of the convolution."""
    if not shape.pool:
        return torch.where(y > 0, g, 0.0) if shape.relu else g
    parts = torch.stack([torch.where(place == q, g, 0.0) for q in range(4)], -1)
    # [..., H, W, 4] -> [..., H, 2, W, 2]
    whole = parts.unflatten(-1, (2, 2)).transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return F.pad(whole, (0, size[1] - whole.shape[-1], 0, size[0] - whole.shape[-2]))
