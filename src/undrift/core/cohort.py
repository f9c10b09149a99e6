"""The cohort axis of an op that sees all clients at once.

Such an op always has a leading axis C, of length 1 for a single client.  Its vmap rule makes one
axis of what vmap adds and what is there, and calls the op again: however many axes are nested
(experiments, clients), the op sees one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def joined(tensors: Sequence[Tensor | None], dims: Any, count: int) -> list[Tensor | None]:
    """Put vmap's axis in front and join it with the cohort's; what is shared is expanded."""
    return [
        t if t is None else _in_front(t, dim, count).flatten(0, 1)
        for t, dim in zip(tensors, dims, strict=False)
    ]


def _in_front(t: Tensor, dim: int | None, count: int) -> Tensor:
    return t.expand(count, *t.shape) if dim is None else t.movedim(dim, 0)


def parted(outputs: Sequence[Tensor], count: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Take the axis apart again: what a vmap rule returns."""
    parts = tuple(t.unflatten(0, (count, len(t) // count)) for t in outputs)
    return parts, (0,) * len(parts)
