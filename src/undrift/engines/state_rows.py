"""Client states read and written where the store has them, instead of copied into a round and back.

Layers that remember their steps read a client's vectors once to narrow them and once when a round
ends, by kernels that take addresses.  So of a state on the device only what such layers do not
remember is copied in, a few weights of each; and new states go straight to spare rows of the
store's table, which become visible with the round.

Letters: E experiments, C clients of each and the padding behind them, n = E * C.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undrift.core.transfer import Mail
from undrift.core.tree import Tree, leaves
from undrift.engines.graphs import copy_all
from undrift.engines.turns import Turn
from undrift.kernels.problem import Lying
from undrift.state.packing import Leaf
from undrift.state.rows import MemoryTier
from undrift.state.store import Reserved

WORD = 4  # bytes that are copied as one
OLD, NEW = 0, 1
Slice = tuple[int, int, int, int]  # see kernels/moving.py, `exchange`


class StateRows:
    """The rows of the clients of a round, whose states have buffers [E, C, ...], too.

    Of vectors only those columns of the buffers are true that no layer remembers.
    """

    def __init__(
        self, turns: Sequence[Turn], state: Tree, size: int, rest: Sequence[slice]
    ) -> None:
        self._places, self._held = turns[0].store.places, leaves(state)
        self.after = [_room_like(v) for v in self._held]  # for new states, leaf by leaf
        self._vectors = [i for i, leaf in enumerate(self._places) if _is_vector(leaf, size)]
        first, last = self._held[0], self._places[-1]
        self._words = 8 * (last.start + last.num_words) // WORD  # of a row
        self._zeros = torch.zeros(8, dtype=torch.uint8, device=first.device)
        self._in = self._table(self._held, rest)
        self._out = self._table(self.after, rest, out=True)
        self._out_but_vectors = self._table(self.after, [], out=True)
        self._whole = self._table(self._held, [slice(0, size)])
        rows = all(isinstance(t.store.tier, MemoryTier) and t.store.tier.aligned for t in turns)
        self.aligned = rows and all(self._places[i].start % 2 == 0 for i in self._vectors)
        room = (2, 1 + len(self._vectors), first.shape[0] * first.shape[1])
        # [old and new, rows and the vectors in them, n]
        self._mail = Mail({"at": torch.zeros(room, dtype=torch.int64)}, first.device)
        self._at: Tensor = self._mail.trees["at"]
        self.reserved: list[Reserved] = []

    @staticmethod
    def possible(turns: Sequence[Turn], state: Tree, size: int) -> bool:
        """Whether rows lie on the device, have a vector of this size, and are made of words."""
        held, stores = leaves(state), [t.store for t in turns]
        places = stores[0].places
        return (
            all(store.places == places for store in stores)
            and any(_is_vector(leaf, size) for leaf in places)
            and all(_is_vector(leaf, size) for leaf in places if leaf.shape == (size,))
            and all(_is_words(v) for v in held)
            and all(store.reserve([]) is not None for store in stores)
        )

    # -- what the host does --------------------------------------------------------------------
    def load(self, turns: Sequence[Turn], most: int) -> None:
        """Find the rows of a round; rows beyond a cohort are those of its first client."""
        self.reserved = []
        for turn in turns:
            ids = turn.work.ids
            found = turn.store.reserve(ids + ids[:1] * (most - len(ids)))
            assert found is not None, "asked for before"
            self.reserved.append(found)
        sides = [[at for r in self.reserved for at in r[side]] for side in (OLD, NEW)]
        rows = torch.tensor(sides)
        starts = [0, *(8 * self._places[i].start for i in self._vectors)]
        at = rows[:, None] + torch.tensor(starts)[:, None]
        self._mail.send({"at": at})

    # -- what a device does --------------------------------------------------------------------
    def fetch(self) -> None:
        """Read what no layer remembers into the buffers."""
        self._exchange(OLD, self._in)

    def fill(self) -> None:
        """Read everything; nobody may have written over the rows since."""
        self._exchange(OLD, self._whole)

    def put(self, states: Tree, *, vectors: bool) -> None:
        """Write what no layer remembers of new states, which may lie in `after`.

        Of `vectors`, too, if nobody else has.
        """
        pairs = zip(self.after, leaves(states), strict=True)
        moved = [(to, new) for to, new in pairs if to is not new]
        copy_all([to for to, _ in moved], [new for _, new in moved])
        self._exchange(NEW, self._out if vectors else self._out_but_vectors)

    def keep(self, sound: Tensor) -> None:
        """Leave states of experiments that are not sound [E] as they were: no words if they are."""
        from undrift.kernels import moving

        old, new = self._at[OLD, 0], self._at[NEW, 0]
        words = torch.where(sound, 0, self._words).repeat_interleave(len(old) // len(sound))
        moving.move(torch.stack([new, old, words], -1), self._words)

    def lying(self, vector: Tensor, side: int = OLD) -> Lying:
        """Tell where a vector of states lies, in the rows before or after."""
        at = next(j for j, i in enumerate(self._vectors) if self._held[i] is vector)
        return Lying(self._at[side, 1 + at], self.aligned)

    def _exchange(self, side: int, slices: tuple[Tensor, int]) -> None:
        from undrift.kernels import moving

        if len(slices[0]):
            moving.exchange(self._at[side, 0], *slices, out=side == NEW)

    def _table(
        self, held: Sequence[Tensor], columns: Sequence[slice], *, out: bool = False
    ) -> tuple[Tensor, int]:
        """List what is copied of all leaves, and the most words of one slice."""
        slices = [s for i, v in enumerate(held) for s in self._slices(i, v, columns, out)]
        table = torch.tensor(slices, dtype=torch.int64, device=held[0].device)
        return table, max((words for *_, words in slices), default=0)

    def _slices(self, i: int, held: Tensor, columns: Sequence[slice], out: bool) -> list[Slice]:
        """List what is copied of a leaf: some columns of a vector, all of what is none."""
        leaf, each, count = self._places[i], held.element_size(), held[0, 0].numel()
        begin, here, apart = 8 * leaf.start, held.data_ptr(), held.stride(1) * each
        parts = columns if i in self._vectors else [slice(0, count)]
        bounds = [(each * c.start, each * (c.stop - c.start)) for c in parts]
        found = [(begin + at, here + at, apart, size // WORD) for at, size in bounds]
        filled, whole = each * count, 8 * leaf.num_words
        if out and filled < whole:  # equal states are equal rows
            zeros = (whole - filled) // WORD
            found.append((begin + filled, self._zeros.data_ptr(), 0, zeros))
        return found


def are_states(vectors: Sequence[Tensor], state: Tree) -> bool:
    """Whether vectors of clients are all parts of their states."""
    known = {id(v) for v in leaves(state)}
    return all(id(v) in known for v in vectors)


def _room_like(v: Tensor) -> Tensor:
    return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)


def _is_vector(leaf: Leaf, size: int) -> bool:
    return leaf.shape == (size,) and leaf.dtype == torch.float32


def _is_words(held: Tensor) -> bool:
    """Whether a client's part [E, C, ...] is whole words, and clients are evenly apart."""
    each, lead = held.element_size(), held.shape[:2]
    inside = held[0, 0]
    even = lead[0] == 1 or held.stride(0) == lead[1] * held.stride(1)
    return inside.is_contiguous() and inside.numel() * each % WORD == 0 and even
