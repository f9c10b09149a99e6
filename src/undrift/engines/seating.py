"""Where clients and their models lie while a round goes on, crew by crew.

Models and their buffers lie side by side for all crews, so that one backward pass serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undrift.core.algorithm import Client
from undrift.core.histories import Histories
from undrift.core.tree import EMPTY, leaves, tree_map
from undrift.core.views import Carry
from undrift.engines.deciding import Deciding
from undrift.engines.graphs import Buffers, aligned, spread_into
from undrift.engines.group import Group, split
from undrift.engines.stepping import Seat


class Seating:
    """Writes what clients have, and what they begin with, where steps find it."""

    def __init__(self, groups: Sequence[Group], buffers: Buffers, deciding: Deciding) -> None:
        self.groups, self.buffers, self._deciding = groups, buffers, deciding
        self._size = deciding.task.size

    @property
    def _histories(self) -> Histories | None:
        return self._deciding.stepping.histories

    def parts(self) -> list[tuple[Group, slice]]:
        """Tell where the experiments of each group stand."""
        return list(zip(self.groups, split([g.size for g in self.groups]), strict=True))

    def seats(self) -> list[Seat]:
        """Give what the steps of all groups read and move."""
        return [self.seat(g) for g in range(len(self.groups))]

    def seat(self, g: int) -> Seat:
        """Give what the steps of a group read and move."""
        broadcast, clients, carry = (
            self.buffers[f"{name} {g}"] for name in ("broadcast", "clients", "carry")
        )
        return Seat(tuple(leaves(self.groups[g].numbers)), broadcast, clients, carry)

    # -- clients -----------------------------------------------------------------------------
    def put_clients(self, g: int, clients: Client) -> None:
        """Keep what clients have; a state that nobody prepared stays where it is."""
        name = f"clients {g}"
        if self.groups[g].uses("begin"):
            self.buffers.put(name, clients)
            return
        rest = self.buffers.put(f"known {g}", self.but_loaded(clients))
        info = rest.info if leaves(rest.info) else self.buffers["info"]
        self.buffers.hold(name, rest._replace(state=clients.state, info=info))

    def but_loaded(self, clients: Client) -> Client:
        """Leave out states, and what the host has written for the only crew: they stay there."""
        own = EMPTY if len(self.groups) == 1 else clients.info
        found: Client = clients._replace(state=EMPTY, info=own)
        return found

    # -- models ------------------------------------------------------------------------------
    def put_carries(self, carries: Sequence[Carry]) -> None:
        """Write what everybody begins with."""
        if "models" not in self.buffers:
            w, kept = tree_map(lambda *v: torch.cat(v), *[(c.w, c.buffers) for c in carries])
            self.buffers.hold("models", (aligned(w), tree_map(torch.clone, kept)))
            for g, (carry, (_, part)) in enumerate(zip(carries, self.parts(), strict=True)):
                w, kept = tree_map(lambda v, part=part: v[part], self.buffers["models"])
                rest = self._deciding.room(carry._replace(w=EMPTY, buffers=EMPTY))
                self.buffers.hold(f"carry {g}", rest._replace(w=w, buffers=kept))
        for g, carry in enumerate(carries):
            spread_into(*(self._spread(c) for c in (self.buffers[f"carry {g}"], carry)))

    @property
    def has_buffers(self) -> bool:
        """Whether modules of the only crew have buffers."""
        return any(v.numel() for v in leaves(self.buffers["carry 0"].buffers))

    @property
    def clients(self) -> int:
        """Tell how many clients of an experiment have room."""
        return int(self.buffers["models"][0].shape[1])

    def put_model(self, started: Tensor) -> None:
        """Write of the only crew's models what layers do not remember."""
        spread_into(*(self._parts_of([v]) for v in (self.buffers["carry 0"].w, started)))

    def put_but_model(self, started: Carry) -> None:
        """Write of its other vectors what layers do not remember."""
        both = [c._replace(w=EMPTY) for c in (self.buffers["carry 0"], started)]
        spread_into(*(self._parts_of(c) for c in both))

    def but_vectors(self, carry: Carry) -> Any:
        """Leave out vectors of which only parts are spread.

        A part is no argument for compiled code, which is tried on copies: they take as much room
        as the whole, and where a part begins at an odd place, so do copies of every call.
        """
        if self._histories is None:
            return carry
        return tree_map(lambda v: () if self._is_vector(v) else v, carry)

    def _parts_of(self, tree: Any) -> list[Tensor]:
        """View what layers do not remember of vectors."""
        assert self._histories is not None, "asked for before"
        vectors = [v for v in leaves(tree) if self._is_vector(v)]
        return [part for v in vectors for part in self._histories.others(v)]

    def _spread(self, carry: Carry) -> Any:
        """Leave out what histories write at the end of a round, or nobody reads."""
        histories = self._histories
        if histories is None:
            return carry
        return tree_map(lambda v: histories.others(v) if self._is_vector(v) else v, carry)

    def _is_vector(self, v: Tensor) -> bool:
        return (v.dim(), *v.shape[-1:]) == (3, self._size)
