"""What the host writes before a round on a device: who takes part, and what they bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from undrift.core.algorithm import Server
from undrift.core.noise import Known
from undrift.core.transfer import Mail
from undrift.core.tree import Tree, tree_map
from undrift.engines.engine import Assignment
from undrift.engines.graphs import Buffers, copy_into
from undrift.engines.state_rows import StateRows
from undrift.engines.turns import Crew, Shape, Turn

PLANNED = 3  # among the numbers of an experiment: the round for which a cohort was chosen
STEPS = 4  # where they begin there


class Loading:
    """Writes turns into the buffers of a round."""

    def __init__(
        self,
        crews: Sequence[Crew],
        shape: Shape,
        buffers: Buffers,
        device: torch.device,
        room: Callable[[Tree], Tree],
    ) -> None:
        self.crews, self.shape, self.buffers, self.device = crews, shape, buffers, device
        self._room = room  # copies states to where they will stay
        self.rows: StateRows | None = None  # of the only crew, where states need not be copied
        # By experiment, from the last round: the same servers are in the buffers.  Not while a
        # round is under way, which writes over them.
        self.returned: dict[int, Server] = {}
        self._mail: Mail | None = None

    @property
    def places(self) -> list[int]:
        """Tell which experiment stands where."""
        return [i for crew in self.crews for i in crew.members]

    def load(self, turns: Sequence[Turn]) -> None:
        """Write what the host knows into the buffers; rows beyond a cohort take no step."""
        for g, crew in enumerate(self.crews):
            self._servers(g, crew, turns)
            own = [turns[i] for i in crew.members]
            if self.rows is not None:
                self.rows.load(own, self.shape.clients)
            else:
                self._states(f"state {g}", own)
        ordered = [turns[i] for i in self.places]
        self._tell(self._numbers(ordered), [self._padded(w.info) for w in _in_one_place(ordered)])
        if not self.shape.room.epochs:
            self._put_rows("order", [self._with_room(t.work.order) for t in ordered])

    def _tell(self, numbers: Tensor, info: list[Tree]) -> None:
        """Write numbers and what is known of clients: in one transfer, where the host has both."""
        together: Tree = tree_map(lambda *v: torch.stack(v), *info)
        told: dict[str, Tree] = {"numbers": numbers, "info": together}
        if self._mail is None:
            self._mail = Mail(told, self.device)
            for name, held in self._mail.trees.items():
                self.buffers.hold(name, held)
        if together.id.device.type == "cpu":
            self._mail.send(told)
        else:
            self._mail.send({"numbers": numbers})
            self._put_rows("info", info)

    def _states(self, name: str, turns: Sequence[Turn]) -> None:
        """Read client states straight into their rows; rows beyond a cohort repeat its first."""
        most = self.shape.clients
        who = [t.work.ids + t.work.ids[:1] * (most - len(t.work.ids)) for t in turns]
        if name not in self.buffers:
            found = [t.store.gather(i) for t, i in zip(turns, who, strict=True)]
            self.buffers.hold(name, self._room(tree_map(lambda *v: torch.stack(v), *found)))
            return
        for e, (turn, ids) in enumerate(zip(turns, who, strict=True)):
            turn.store.gather(ids, out=tree_map(lambda v, e=e: v[e], self.buffers[name]))

    def _servers(self, g: int, crew: Crew, turns: Sequence[Turn]) -> None:
        for h, inside in enumerate(crew.inside):
            known = [self.returned.pop(i, None) for i in inside]
            if not all(turns[i].server is mine for i, mine in zip(inside, known, strict=True)):
                self._put_rows(f"server {g} {h}", [turns[i].server for i in inside])
            self._put_rows(f"told {g} {h}", [self._known(turns[i].known) for i in inside])

    def _known(self, known: Known) -> Known:
        return known._replace(rows=self._padded(known.rows))

    def _put_rows(self, name: str, values: list[Tree]) -> None:
        """Write one tree per experiment, without putting them together elsewhere first."""
        if name not in self.buffers:
            self.buffers.put(name, tree_map(lambda *v: torch.stack(v), *values))
            return
        held = self.buffers[name]
        copy_into([tree_map(lambda v, e=e: v[e], held) for e in range(len(values))], values)

    def _padded(self, rows: Tree) -> Tree:
        def one(v: Tensor) -> Tensor:
            extra = self.shape.clients - len(v)
            return v if not extra else torch.cat([v, v[:1].expand(extra, *v.shape[1:])])

        return tree_map(one, rows)

    def _numbers(self, turns: Sequence[Turn]) -> Tensor:
        """Put what else the host knows into one tensor: seed, cohort, population, round, steps."""
        made = torch.zeros((len(turns), STEPS + self.shape.clients), dtype=torch.int64)
        for row, turn in zip(made, turns, strict=True):
            count = len(turn.work.clients)
            told = (turn.work.seed, count, turn.population, turn.work.round)
            row[:STEPS] = torch.tensor(told)
            row[STEPS : STEPS + count] = turn.work.steps
        return made

    def _with_room(self, order: Tensor) -> Tensor:
        count, num_steps, batch = order.shape
        room = (self.shape.clients, self.shape.room.steps, self.shape.room.batch)
        made = torch.full(room, -1, device=self.device)
        made[:count, :num_steps, :batch] = order
        return made


def _in_one_place(turns: Sequence[Turn]) -> list[Assignment]:
    """Give the work of turns, what is known of clients on the host, or all of it on the device."""
    here = all(t.work.info.id.device.type == "cpu" for t in turns)
    return [t.work if here else t.work.told() for t in turns]
