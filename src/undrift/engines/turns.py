"""What goes into a round on a device and comes out of it, and who shares it with whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from undrift.core.algorithm import Server
from undrift.core.noise import Known
from undrift.core.tree import Tree
from undrift.data.work import Room
from undrift.engines.engine import Assignment, Outcome
from undrift.engines.group import Group, Servers
from undrift.state.store import ClientStateStore, Reserved


class Shape(NamedTuple):
    """What the buffers of a round have room for."""

    clients: int
    room: Room  # for the batches; without epochs the host makes their order
    examples: int  # of the largest client; 0 where nobody goes through all of its data
    people: int = 0  # in the record of everybody; 0 where no rule reads it

    def holds(self, other: Shape) -> bool:
        """Whether a cohort of another shape fits without much waste."""
        room, fixed = self.room, (self.room.batch, self.room.epochs, self.room.width)
        small = other.clients <= self.clients and other.room.steps <= room.steps
        same = (other.room.batch, other.room.epochs, other.room.width) == fixed
        close = 8 * other.clients >= 7 * self.clients
        fixed_too = other.examples == self.examples and other.people == self.people
        return small and same and close and fixed_too

    def joined(self, other: Shape) -> Shape:
        """Make room for both."""
        room = Room(*map(max, self.room, other.room))
        most = max(self.clients, other.clients), max(self.examples, other.examples)
        return Shape(most[0], room, most[1], max(self.people, other.people))


class Turn(NamedTuple):
    """What the host hands over for a round of one experiment."""

    server: Server
    work: Assignment
    store: ClientStateStore  # has the states of these clients
    population: int
    known: Known


class Done(NamedTuple):
    """What comes out.  States and outcome are buffers: read them before the next round."""

    server: Server
    states: tuple[Tree, ...]
    outcome: Outcome
    sound: Tensor  # whether the server's half was finite; else nobody's report counted
    reserved: Reserved | None = None  # where states are written already


class Crew:
    """Experiments whose clients do the same, parted by what their servers do."""

    def __init__(self, inside: list[list[int]], group: Group) -> None:
        self.inside, self.group = inside, group
        self.servers: list[Servers] = []

    @property
    def members(self) -> list[int]:
        """List the experiments, in their order in the buffers."""
        return [i for part in self.inside for i in part]


def grouped(members: Sequence[int], key: Callable[[int], Any]) -> list[list[int]]:
    """Put members of equal keys together, in the order of the first of each."""
    found: list[tuple[Any, list[int]]] = []
    for i in members:
        mine = key(i)
        same = next((group for other, group in found if other == mine), None)
        if same is None:
            found.append((mine, [i]))
        else:
            same.append(i)
    return [group for _, group in found]
