"""What the end of a round makes of layers that remember their steps (core/history.py).

A client's report, its next state and the length of its update are sums of a few vectors, weight by
weight, wherever rules are linear there, too:

    value j of client c = table[j, c, 0] * (sum over steps of r G^T X)
                        + sum over t of table[j, c, 1 + t] * V_t

with V_t what all clients share (the received model, SCAFFOLD's c) or each has (c_i).  So the
weights that clients ended with are never written: they are made again wherever they are read.

The first values are added up over each client's weights, those behind are its next states, the last
are added up over clients.  `close` gives all of it.  Then it is known whose numbers are finite; if
anybody's are not, states and sums are written once more, without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Size(NamedTuple):
    """How many vectors there are of each kind."""

    shared: int
    own: int
    states: int
    sums: int


class Placed(NamedTuple):
    """Where vectors of clients lie, if not in matrices: addresses [E * C] of each whole vector."""

    own: Sequence[Tensor]
    states: Sequence[Tensor]
    before: Sequence[Tensor]
    aligned: bool  # whether all are multiples of 16
    column: int = 0  # where a layer begins in them


class Ending(NamedTuple):
    """The values, what they are made of and where they go.  E experiments, C clients of each.

    P stands for a whole model's weights or, in `of` a layer, for its own: [out, in].
    """

    table: Tensor  # [J, E, C, 1 + shared + own]
    needs: tuple[tuple[int, ...], ...]  # which of these value j reads: others are not looked at
    squares: tuple[bool, ...]  # of the first values: whether their squares are added up
    shared: Sequence[Tensor]  # [E, P] each
    used: Tensor  # [shared]: whether any of the values that `close` gives has a part of it
    own: Sequence[Tensor]  # [E, C, P] each
    taken: Tensor  # [E, C]: whose values count
    states: Sequence[Tensor]  # [E, C, P] each, to be written
    before: Sequence[Tensor]  # the same, of those who do not count
    sums: Sequence[Tensor]  # [E, P] each, float64, to be written
    again: Tensor | None = None  # a flag: states and sums are written only if it is set
    placed: Placed | None = None  # own vectors, states and those before: kernels look there instead

    def of(self, view: Callable[[Tensor], Tensor], column: int = 0) -> Ending:
        """Look at one layer of every vector, which begins at a column."""
        shared, own, states, before, sums = (
            [view(v) for v in vectors]
            for vectors in (self.shared, self.own, self.states, self.before, self.sums)
        )
        placed = self.placed
        if placed is not None:
            placed = placed._replace(column=column)
        return self._replace(
            shared=shared, own=own, states=states, before=before, sums=sums, placed=placed
        )

    def close(self, moved: Tensor) -> Tensor:
        """Write states and sums where weights have `moved` [E, C, out, in].

        Gives what is added up over clients' weights, [summed, E, C, 1].  The kernel's own work,
        operation by operation.
        """
        count, first = by_weight(self.taken, moved), len(self.squares)
        values = self._values(moved)
        states, last = values[first : first + len(self.states)], len(values) - len(self.sums)
        for state, held, value in zip(self.states, self.before, states, strict=True):
            self._write(state, torch.where(count, value, held))
        for total, value in zip(self.sums, values[last:], strict=True):
            self._write(total, torch.where(count, value, 0).sum(1, dtype=torch.float64))
        pairs = zip(values, self.squares, strict=False)
        each = [torch.where(count, v * v if square else v, 0) for v, square in pairs]
        none = moved.new_empty((0, *self.taken.shape))
        return (torch.stack([v.sum((2, 3)) for v in each]) if each else none)[..., None]

    def _write(self, to: Tensor, value: Tensor) -> None:
        to.copy_(value if self.again is None else torch.where(self.again, value, to))

    def _values(self, moved: Tensor) -> list[Tensor]:
        read = [moved, *(v[:, None] for v in self.shared), *self.own]
        pairs = zip(self.table, self.needs, strict=True)
        return [combination(row, needs, read) for row, needs in pairs]


def combination(row: Tensor, needs: Sequence[int], read: Sequence[Tensor]) -> Tensor:
    """Add up what is read as often as row [E, C, n] says; what is not needed is not looked at."""
    terms = [by_weight(row[..., t], read[t]) * read[t] for t in needs]
    return sum(terms[1:], terms[0]) if terms else torch.zeros_like(read[0])


def by_weight(values: Tensor, like: Tensor) -> Tensor:
    """Give values [E, C] as many axes as the weights have."""
    return values.reshape(*values.shape, *[1] * (like.dim() - 2))
