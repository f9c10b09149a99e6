"""Are two trees the same: in their bits, within rounding, in their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from undrift.core.tree import leaves, structure

TOLERANCE = 1e-12  # in float64
Spec = tuple[str, tuple[str, ...]]  # the structure, and the kind of every leaf


def differs(a: Any, b: Any) -> bool:
    """Whether some number differs in its bits; NaN equals NaN."""
    some, other = leaves(a), leaves(b)
    return len(some) != len(other) or not all(map(_same_bits, some, other))


def _same_bits(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(a is b or a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Largest difference, relative to the larger of 1 and the largest number."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if x.shape != y.shape:
            return float("inf")
        if x.numel() and not _same_bits(x, y):
            x, y = x.double(), y.double()
            gap = float((x - y).abs().max() / max(1.0, float(y.abs().max())))
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> str:
    """Say which number differs most, or nothing."""
    gaps = {n: distance([found[n]], [wanted[n]]) for n in wanted}
    worst = max(gaps, key=lambda n: gaps[n])
    return f"{worst} is {gaps[worst]:.1e} away from that" if gaps[worst] > limit else ""


def spec(tree: Any) -> Spec:
    """Describe the structure, shapes and dtypes of a tree."""
    return str(structure(tree)), tuple(_kind(v) for v in leaves(tree))


def text(tree: Any) -> str:
    """Name the shapes and dtypes of a tree in a message."""
    kinds = ", ".join(_kind(v) for v in leaves(tree))
    return kinds if isinstance(tree, Tensor) else f"{type(tree).__name__} of ({kinds})"


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype)[6:]} {list(value.shape)}"
