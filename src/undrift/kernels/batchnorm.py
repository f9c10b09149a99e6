"""BatchNorm of a cohort by the kernels: two passes over memory forward, two back, and small sums.

Shapes.  x, y and their gradients [C, B, F, ...] in any order of memory; mask [C, B]; mean,
variance, scale and shift [C, F] (rows may lie far apart); size [C].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from undrift.kernels import interpreted
from undrift.kernels.interpreter import mend
from undrift.kernels.problem import MOST_OFFSETS, Norm, power
from undrift.kernels.programs import batchnorm as programs
from undrift.kernels.trials import relative
from undrift.kernels.tuner import Launch, log, on_device

if interpreted():
    mend()

TOLERANCE = 1e-4  # of float32 on a small batch
_right: set[torch.device] = set()
_wrong: set[torch.device] = set()
VALUES = 2048  # of a tile
LEAST_TILES = 2  # of a program that sums: fewer would leave more parts than they read
MOST_SPLITS = 64  # their parts are added up as one tile; fills a large device from 10 clients on


class Known(NamedTuple):
    """What x is normalised with."""

    mask: Tensor | None
    mean: Tensor
    var: Tensor
    scale: Tensor | None
    shift: Tensor | None


def takes(x: Tensor) -> bool:
    """Whether the kernels do one client's batch [B, F, ...]."""
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and x.dim() >= 2 and 0 < x.numel() <= MOST_OFFSETS


def prove(device: torch.device) -> None:
    """Find out on a small batch, once, whether the kernels give right numbers on a device.

    A compiler may well turn a legal program into one that writes zeros.
    """
    device = torch.empty(0, device=device).device  # with its number
    if interpreted() or device in _wrong or device in _right:
        return
    try:
        found = max(_error(device, pool) for pool in (False, True))
        trouble = "" if found < TOLERANCE else f"they are off by {found:.1e}"
    except Exception as error:  # whatever a compiler or a driver may raise
        trouble = str(error)[:200] or type(error).__name__
    (_wrong if trouble else _right).add(device)
    if trouble:
        log.warning("BatchNorm runs without kernels on %s: %s", device, trouble)


def is_wrong(device: torch.device) -> bool:
    """Whether the kernels were found to be wrong on a device."""
    return device in _wrong


def _error(device: torch.device, pool: bool) -> float:
    """Compare values and gradients of a small cohort with torch's in float64."""
    source = torch.Generator(device).manual_seed(0)
    x, w, b, g = (
        torch.randn(size, generator=source, device=device)
        for size in ((2, 5, 6, 6, 24), (2, 24), (2, 24), (2, 5, 24, 6, 6))
    )
    x, g, how = x.movedim(-1, 2), g[..., ::2, ::2] if pool else g, Norm(1e-5, x.dtype, True, pool)
    mean, var, size = statistics(x, None)
    known = Known(None, mean, var, w, b)
    y, place = apply(x, known, how)
    found = (y, *gradients(g, x, size, place, known, how))
    return max(_apart(found, c, x, w, b, g, pool) for c in range(2))


def _apart(
    found: Sequence[Tensor], c: int, x: Tensor, w: Tensor, b: Tensor, g: Tensor, pool: bool
) -> float:
    """Tell how far one client's results are from torch's, relative to these."""
    rows, scale, shift = inputs = [t[c].double().requires_grad_() for t in (x, w, b)]
    with torch.enable_grad():
        y = functional.batch_norm(rows, None, None, scale, shift, training=True).relu()
        y = functional.max_pool2d(y, 2) if pool else y
    wanted = (y.detach(), *torch.autograd.grad(y, inputs, g[c].double()))
    errors = [relative(a[c], b) for a, b in zip(found, wanted, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf  # NaN is no maximum


def statistics(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Give each client's mean and biased variance by channel, and values per channel: float32."""
    with on_device(x):
        flat, tile = _flat(x), _tile(x)
        clients, images, channels, pixels = flat.shape
        splits = _splits(images * pixels, tile)
        parts = _floats(x, clients, splits, 4, channels)
        arguments = (flat, _bytes(mask, flat), parts, images, splits, *flat.stride())
        constants = dict(F=channels, P=pixels, MASKED=mask is not None, **tile)
        grid = (clients * splits, _tiles(channels, tile["BC"]))
        Launch(programs.moments, grid, arguments, constants).run()
        mean, var = (_floats(x, clients, channels) for _ in range(2))
        size = _floats(x, clients)
        _join(programs.join_moments, parts, mean, var, size)
        return mean, var, size


def apply(x: Tensor, known: Known, how: Norm) -> tuple[Tensor, Tensor]:
    """Give (y, places of pooled values or empty)."""
    with on_device(x):
        call = _call(x, known, how)
        y = _empty_like(x, _output(x.shape, how), how.result, how.planes)
        size = (call.clients, call.cells, call.channels) if how.pool else (call.clients, 0)
        place = torch.empty(size, dtype=torch.int8, device=x.device)
        tile = _tile(x, 4 if how.pool else 1)
        strides = (*call.x.stride(), *_flat(y).stride())
        arguments = (call.x, *call.tensors, y, place, *call.numbers, *strides)
        Launch(programs.normalise, call.grid(tile), arguments, call.constants | tile).run()
        return y, place


def gradients(
    g: Tensor, x: Tensor, size: Tensor | None, place: Tensor, known: Known, how: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients by x, scale and shift; without a size mean and variance were fixed."""
    with on_device(g):
        call, g, tile = _call(x, known, how), _flat(g), _tile(x, 4 if how.pool else 1)
        by_scale, by_shift = _slopes(call, g, place, tile)
        gx = _empty_like(x, x.shape, x.dtype)
        tensors = (*call.tensors, call.x if size is None else size, place, by_shift, by_scale, gx)
        strides = (*g.stride(), *call.x.stride(), *_flat(gx).stride())
        arguments = (g, call.x, *tensors, *call.numbers, *strides)
        constants = dict(call.constants, FIXED=size is None, **tile)
        Launch(programs.input_gradient, call.grid(tile), arguments, constants).run()
        return gx, by_scale, by_shift


class _Call(NamedTuple):
    """What the programs that normalise have in common."""

    x: Tensor  # [C, B, F, pixels]
    tensors: tuple[Tensor, ...]  # mask, mean, variance, scale, shift
    numbers: tuple[int | float, ...]  # B, eps, how far apart clients' scales and shifts lie
    constants: dict[str, Any]
    clients: int
    cells: int  # of a client: pixels, or squares of four
    channels: int

    def grid(self, tile: dict[str, int]) -> tuple[int, int]:
        """Give each tile a program."""
        tiles = _tiles(self.cells, tile["BP"])
        return self.clients * tiles, _tiles(self.channels, tile["BC"])


def _call(x: Tensor, known: Known, how: Norm) -> _Call:
    flat = _flat(x)
    clients, images, channels, pixels = flat.shape
    mean, var, scale, shift = (
        t if t is None or t.stride(1) == 1 else t.contiguous() for t in known[1:]
    )
    assert mean is not None and var is not None, "always known"
    flags = dict(MASKED=known.mask is not None, SCALE=scale is not None, SHIFT=shift is not None)
    constants = dict(F=channels, P=pixels, W=x.shape[-1], RELU=how.relu, POOL=how.pool, **flags)
    scale, shift = (mean if t is None else t for t in (scale, shift))
    mean, var = mean.contiguous(), var.contiguous()
    tensors = (_bytes(known.mask, flat), mean, var, scale, shift)
    numbers = (images, how.eps, scale.stride(0), shift.stride(0))
    cells = images * (pixels // 4 if how.pool else pixels)
    return _Call(flat, tensors, numbers, constants, clients, cells, channels)


def _slopes(call: _Call, g: Tensor, place: Tensor, tile: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Give the gradients by scale and shift."""
    splits = _splits(call.cells, tile)
    parts = _floats(g, call.clients, splits, 2, call.channels)
    strides = (*g.stride(), *call.x.stride())
    arguments = (g, call.x, *call.tensors, place, parts, splits, *call.numbers, *strides)
    grid = (call.clients * splits, _tiles(call.channels, tile["BC"]))
    Launch(programs.slopes, grid, arguments, call.constants | tile).run()
    by_shift, by_scale = (_floats(g, call.clients, call.channels) for _ in range(2))
    _join(programs.join_slopes, parts, by_shift, by_scale)
    return by_scale, by_shift


def _join(program: Any, parts: Tensor, *sums: Tensor) -> None:
    """Add parts [C, splits, kinds, F] up."""
    clients, splits, _, channels = parts.shape
    block = min(power(channels), 32)
    constants = dict(F=channels, BS=power(splits, 1), BC=block, num_warps=4)
    Launch(program, (clients, _tiles(channels, block)), (parts, *sums, splits), constants).run()


# --------------------------------------------------------------------------------- layouts, sizes
def _flat(x: Tensor) -> Tensor:
    """[C, B, F, ...] -> [C, B, F, pixels], a view wherever pixels lie evenly.

    A client whose images lie between those of many others may be spread too far for the programs.
    """
    flat = x.flatten(3) if x.dim() > 3 else x.unsqueeze(3)
    reach = sum((n - 1) * s for n, s in zip(flat.shape[1:], flat.stride()[1:], strict=True))
    return flat if reach <= MOST_OFFSETS else flat.contiguous()


def _has_channels_last(x: Tensor) -> bool:
    return x.stride(2) == 1 and x.dim() > 3


def _empty_like(
    x: Tensor, shape: Sequence[int], dtype: torch.dtype, planes: bool = False
) -> Tensor:
    """Make room that lies as x does, or channel by channel."""
    if planes or not _has_channels_last(x):
        return torch.empty(shape, dtype=dtype, device=x.device)
    last = torch.empty((*shape[:2], *shape[3:], shape[2]), dtype=dtype, device=x.device)
    return last.movedim(-1, 2)


def _output(shape: Sequence[int], how: Norm) -> tuple[int, ...]:
    return (*shape[:3], shape[3] // 2, shape[4] // 2) if how.pool else tuple(shape)


def _tile(x: Tensor, each: int = 1) -> dict[str, int]:
    """Choose cells and channels of a tile, so that what lies together is read together.

    `each`: the values that a cell stands for.
    """
    widest = 64 if x.stride(2) == 1 else 8
    channels = min(power(x.shape[2], 1), widest)
    return dict(BP=VALUES // channels // each, BC=channels, num_warps=4)


def _splits(cells: int, tile: dict[str, int]) -> int:
    """Choose how many programs share a client's sum.

    Not by the number of clients: a client's bits are the same whoever trains beside it.
    """
    return min(_tiles(cells, LEAST_TILES * tile["BP"]), MOST_SPLITS)


def _tiles(n: int, size: int) -> int:
    return -(-n // size)


def _floats(like: Tensor, *size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=like.device)


def _bytes(mask: Tensor | None, instead: Tensor) -> Tensor:
    return instead if mask is None else mask.contiguous().view(torch.uint8)
