"""Configurations worth trying: tiles, warps, pipeline stages.  The first of each list is safe.

The lists hold what came out best, or close to it, on some layer and precision of an H200.
"""

from __future__ import annotations

from undrift.kernels import interpreted
from undrift.kernels.problem import Problem, Thin, power
from undrift.kernels.tuner import Configuration

LARGEST_TILE = 32768  # accumulators of one program


def for_convolution(problem: Problem) -> list[Configuration]:
    """Tile rows x channels, and how deep a step of the sum is."""
    columns = min(problem.rows, 128)
    padded = any(problem.padding) and not problem.pool
    deep = 64 if problem.operand.itemsize == 2 else 32
    # (rows of a tile, depth of a step, warps, stages)
    tiles = [(128, deep, 4, 3), (128, deep, 8, 3), (64, deep, 4, 4), (256, 32, 4, 3)]
    tiles += [(256, 32, 4, 2), (256, 32, 8, 4)]
    if padded:
        tiles = [(128, deep, 4, 3), (64, deep, 4, 3), (128, deep, 8, 3), (256, deep, 4, 3)]
    if problem.precision == "float32":  # no matrix unit: accumulators are all it has room for
        tiles = [(64, 16, 4, 2), (128, 16, 8, 2), (64, 32, 4, 2), (128, 16, 4, 2)]
    if interpreted():
        tiles = [(64, 16, 4, 2)]
    return [
        dict(BM=bm, BN=columns, BK=bk, BY_ROW=by_row, QUAD_FIRST=bm == 64 * warps,
             num_warps=warps, num_stages=stages)
        for by_row in ((False, True) if padded else (False,))
        for bm, bk, warps, stages in tiles
        if bm * columns <= LARGEST_TILE and not (by_row and problem.inputs % bk)
    ]  # fmt: skip


def for_weight_gradient(problem: Problem) -> list[Configuration]:
    """Tile output channels x (tap, input channel), pixels of a step, and splits of the sum."""
    block = min(power(problem.outputs), 128)
    depth = problem.taps * problem.inputs
    crowded = problem.clients * -(-depth // 128) * -(-problem.outputs // block) > 600
    splits = [1] if crowded else [2, 4, 1]
    # (depth of a tile, pixels of a step, warps, stages)
    tiles = [(128, 64, 4, 3), (64, 64, 4, 3), (128, 32, 4, 4)]
    if problem.precision == "float32":
        tiles = [(64, 16, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (128, 16, 8, 2)]
    if interpreted():
        tiles, splits = [(64, 32, 4, 2)], [2]
    return [
        dict(SPLIT=split, BC=block, BN=bn, BP=bp, num_warps=warps, num_stages=stages)
        for split in splits
        for bn, bp, warps, stages in tiles
        if bn * block <= LARGEST_TILE
    ]


def for_thin(problem: Problem, layout: Thin) -> list[Configuration]:
    """Lines x pairs of a tile, and how many tiles a program goes through."""
    down = 2 if problem.pool else 1
    # (rows of the product, warps, stages, tiles)
    tiles = [(128, 4, 1, 1), (128, 4, 1, 5), (128, 4, 2, 9), (256, 8, 1, 1), (64, 4, 3, 9)]
    if interpreted():
        tiles = [(64, 4, 2, 2)]
    found = [
        dict(R=_lines(size // (layout.pairs * down), layout), W=layout.pairs, TILES_EACH=each,
             STAGES=stages, num_warps=warps)
        for size, warps, stages, each in tiles
    ]  # fmt: skip
    return _distinct(found)


def for_thin_weight_gradient(problem: Problem, layout: Thin) -> list[Configuration]:
    """Lines x pairs of a step, channels of a block, and splits of the sum."""
    splits = [8, 4] if problem.clients >= 64 else [8, 16]
    # (pairs of a step, stages, warps, channels of a block)
    tiles = [(64, 1, 4, 64), (64, 1, 8, 64), (32, 3, 4, 64), (64, 2, 4, 32), (64, 1, 4, 32)]
    tiles += [(64, 3, 4, 32)]
    if interpreted():
        tiles, splits = [(32, 2, 4, 64)], [2]
    found = [
        dict(SPLIT=split, R=_lines(size // layout.pairs, layout), W=layout.pairs,
             BN=min(layout.block, block), num_warps=warps, num_stages=stages)
        for split in splits
        for size, stages, warps, block in tiles
    ]  # fmt: skip
    return _distinct(found)


def _lines(wanted: int, layout: Thin) -> int:
    """Keep to a power of two that is not more than an image has: a tile spans two at most."""
    most = 1 << (layout.lines.bit_length() - 1)
    return max(1, min(wanted, most))


def _distinct(found: list[Configuration]) -> list[Configuration]:
    return [c for i, c in enumerate(found) if c not in found[:i]]
