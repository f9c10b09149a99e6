"""Whole rounds on a device, of one experiment or several, without a decision on the host.

    begin    models and states in, notes and probes made, everybody at the received model
    step     one local step of everybody, or of those on the lanes (lanes.py)
    finish   reports summed, states out, the server's half of the round

Everything between two pieces lives in buffers that keep their place, so each piece is recorded once
and replayed; the host only says who takes part.  On a CPU the pieces are called as they are.

Letters: S experiments, C clients of a cohort and the padding behind them, K local steps, B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm, Broadcast, Client, Row
from undrift.core.histories import Histories
from undrift.core.history import Extent
from undrift.core.round import shares_gradient
from undrift.core.rule import ClientInfo
from undrift.core.task import Batch, Task
from undrift.core.tree import EMPTY, Tree, tree_map, where_rows
from undrift.core.views import Carry
from undrift.data.work import Work
from undrift.engines.beginning import Beginning
from undrift.engines.branches import Aside, nothing
from undrift.engines.deciding import Deciding
from undrift.engines.drawing import Drawing
from undrift.engines.engine import Engine, Outcome, Trained
from undrift.engines.examples import Examples
from undrift.engines.graphs import Buffers, Piece, copied, graph_pool
from undrift.engines.group import Group, Servers, client_structure, split
from undrift.engines.lanes import IDLE, Lanes, cohorts, lanes_for
from undrift.engines.likeness import Likeness
from undrift.engines.linear_end import LinearEnd, Opened
from undrift.engines.loading import STEPS, Loading
from undrift.engines.looks import Looks
from undrift.engines.reading import Read
from undrift.engines.seating import Seating
from undrift.engines.state_rows import StateRows
from undrift.engines.turns import Crew, Done, Shape, Turn, grouped

MOST_STEPS = 16  # that are recorded as one


class DeviceRound:
    """Runs the rounds of some experiments with one task, for cohorts up to one shape."""

    def __init__(
        self,
        engines: Sequence[Engine],
        algos: Sequence[Algorithm],
        plan: Work,
        shape: Shape,
        *,
        in_place: bool = True,
    ) -> None:
        self.task: Task = engines[0].task
        self.algos, self.shape, self.device = list(algos), shape, engines[0].device
        # those whose forward and backward no rule takes part in stand first, and go together
        order = sorted(range(len(algos)), key=lambda i: not shares_gradient(algos[i]))
        self.crews = [
            Crew(inside, Group([algos[i] for part in inside for i in part], self.task, self.device))
            for inside in (
                grouped(crew, lambda i: Likeness(algos[i]))
                for crew in grouped(order, lambda i: client_structure(algos[i]))
            )
        ]
        alone = len(self.crews) == len(self.crews[0].inside) == 1  # a compiler takes seconds each
        for crew in self.crews:
            some = [[algos[i] for i in p] for p in crew.inside]
            crew.servers += [Servers(those, self.device, fused=alone) for those in some]
        self.groups = [crew.group for crew in self.crews]
        self.plan = plan
        room = shape.room
        self.buffers = Buffers()
        self.loading = Loading(self.crews, shape, self.buffers, self.device, self._room)
        self.data = Examples([engines[i] for i in self.loading.places], shape.clients)
        piece = max(engine.piece for engine in engines)
        self.looks = Looks(self.task, self.data, self.buffers, shape.examples, piece)
        for g, crew in enumerate(self.crews):
            self.looks.spread(g, crew.group, [engines[i] for i in crew.members], shape.clients)
        self.lanes = self._make_lanes(engines)
        self.drawing = Drawing(
            self.task, plan, room, self.data, self.buffers, ready=self._lies_ready()
        )
        self.reading = self.drawing.reading
        extent = Extent(len(algos), shape.clients, room.steps, room.batch)
        about = (self.task, self.algos, self.groups, extent, self.device)
        self.deciding = Deciding(*about, lanes=self.lanes is not None, in_place=in_place)
        self.stepping = self.deciding.stepping
        self.seating = Seating(self.groups, self.buffers, self.deciding)
        self._aside = Aside(self.device)
        held = (self.buffers, self.loading, self.drawing, self.seating)
        self.beginning = Beginning(self.crews, self.deciding, *held, self._aside)
        self.end: LinearEnd | None = None  # of layers that remember: without writing their weights
        self._written = True  # whether the models that clients ended with are
        self._under_way = False  # whether a round has begun and not ended
        self._opened: Opened | None = None  # an end that has been begun in the last step
        self.pool = graph_pool(self.device)
        self._pieces: dict[Any, Piece] = {}
        self._held: dict[Any, dict[str, Tree]] = {}  # by piece
        self._shown: dict[tuple[int, int, int], tuple[Any, Outcome]] = {}  # of which result

    def _make_lanes(self, engines: Sequence[Engine]) -> Lanes | None:
        """Use lanes where clients' steps differ so much that padding them would take longer."""
        if not self.shape.room.epochs:
            return None  # how far clients go is not known beforehand
        steps = [self.plan.most_steps(e.federation.sizes).tolist() for e in engines]
        drawn = [cohorts(own, self.shape.clients) for own in steps]
        some = [
            [[k for i in crew.members for k in rounds[i]] for crew in self.crews]
            for rounds in zip(*drawn, strict=True)
        ]
        each = self.task.size * self.shape.room.batch
        widths = lanes_for(some, IDLE[self.device.type] / each)
        return None if widths is None else Lanes(self.groups, widths)

    def _room(self, tree: Tree) -> Tree:
        return self.deciding.room(tree)

    @property
    def histories(self) -> Histories | None:
        """What wide layers remember, if they do."""
        return self.stepping.histories

    # -- one round ---------------------------------------------------------------------------
    def run(self, turns: Sequence[Turn]) -> list[Done]:
        """Train the cohorts of all experiments for one round."""
        if self._under_way and self.histories is not None:
            self.histories.spoiled.fill_(True)  # the last round ended nobody knows where
        self._under_way, self._opened = True, None
        if self.loading.rows is None:
            self.loading.rows = self._find_rows(turns)
        self.loading.load(turns)
        self.data.load(turns[0].work.ids)
        steps = [[turns[i].work.steps.tolist() for i in crew.members] for crew in self.crews]
        if self._is_one_piece(steps):
            self._piece("round", self._whole_round)
        else:
            self._open_round(turns)
            self._take_steps(steps)
            self._look("review", turns)
            self._piece("finish", self._finish)
        self._written = self.end is None
        found = {i: done for g in range(len(self.crews)) for i, done in self._results(g, turns)}
        self._under_way = False
        return [found[i] for i in range(len(turns))]

    def _find_rows(self, turns: Sequence[Turn]) -> StateRows | None:
        """Leave states where they lie, once it is known that kernels alone read them as a whole."""
        histories, end = self.histories, self.end
        if histories is None or end is None or not (histories.known and histories.by_kernels):
            return None
        state, size = self.buffers["state 0"], self.task.size
        own = [turns[i] for i in self.loading.places]
        if not end.reads_states_alone(self.buffers["clients 0"], state):
            return None
        if not StateRows.possible(own, state, size):
            return None
        return StateRows(own, state, size, histories.rest(size))

    def _is_one_piece(self, steps: list[list[list[int]]]) -> bool:
        """Whether a round has nothing that depends on who takes part: then it is one recording."""
        waits = self.deciding.pending or self.looks.lanes or self.lanes is not None
        if waits or not self.reading.ready:
            return False
        return _most(steps) == self.shape.room.steps

    def _whole_round(self) -> None:
        """Run a round; where layers remember, what they need and leave is moved beside passes."""
        if self.beginning.at_once:
            begun, ready = self.beginning.write(), nothing
            try:
                if not self.beginning.may_be_late:
                    begun()
                first = self.reading.at(0)  # before those of other steps, which would slow it down
                self.beginning.narrow(on_the_way=True)
                fetches = self.reading.may_fetch()
                if fetches:
                    ready = self._aside.run(self.reading.fetch)
                last = [self._open_end] if self._ends_early() else []
                self._all_steps(begun, ready, last, first, fetched=fetches)
            except BaseException:
                begun()
                ready()
                raise
        else:
            self._open_and_begin()
            self._all_steps()
        self._finish()

    def _open_round(self, turns: Sequence[Turn]) -> None:
        if self.looks.lanes:
            self._piece("open", self._open)
            self._look("probe", turns)
            self._piece("begin", self._begin)
        else:
            self._piece("begin", self._open_and_begin)

    def _open_and_begin(self) -> None:
        if self.beginning.at_once:
            self.beginning.write()()
            self.beginning.narrow()
            return
        if self.loading.rows is not None:
            self.loading.rows.fetch()
        self._open()
        self._begin()

    def _look(self, hook: str, turns: Sequence[Turn]) -> None:
        """Let those who look at their data on lanes do so."""
        for g, lanes in self.looks.lanes.items():
            if self.groups[g].uses(hook):
                ids = [turns[i].work.ids for i in self.crews[g].members]
                step = partial(self._piece, (hook, g), partial(self._look_step, hook, g))
                lanes.run(hook, ids, self.shape.clients, step)

    def _look_step(self, hook: str, g: int) -> None:
        if hook == "probe":
            broadcast, clients = self.buffers[f"opened {g}"]
            self.looks.lanes[g].step(hook, broadcast, clients, None)
            return
        _, broadcast, clients, carry = self.seating.seat(g)
        self.looks.lanes[g].step(hook, broadcast, clients, carry)

    def _take_steps(self, steps: list[list[list[int]]]) -> None:
        """Take the local steps of everybody, given by crew, experiment and client."""
        if self.lanes is not None:
            self.lanes.take_places(self.seating.seats(), self._room)
            if self.deciding.pending:
                read = self.lanes.read(self.data, self.buffers, self.task.dtype)
                self.deciding.decide(self.lanes.groups, self.lanes.seats, read)
            self.lanes.run(steps, lambda: self._piece("step", self._lanes_step))
            return
        left = _most(steps)
        if self.reading.ready and left == self.shape.room.steps:
            self._piece("all steps", self._all_steps)
            return
        while left:
            # of any number of steps: few recordings, and few gaps between them
            some = min(MOST_STEPS, 1 << (left.bit_length() - 1))
            self._piece(("steps", some), partial(self._steps, some))
            left -= some

    def _lies_ready(self) -> bool:
        """Whether what steps read is laid out for each.

        Only where the room does not depend on the round that asked for it first: a run that goes
        on after a stop must add up in the same order.
        """
        room = self.shape.room
        return self.lanes is None and room.epochs > 0 and room.steps <= MOST_STEPS

    def _all_steps(
        self,
        begun: Callable[[], None] = nothing,
        ready: Callable[[], None] = nothing,
        last: Sequence[Callable[[], None]] = (),
        first: Read | None = None,
        *,
        fetched: bool = False,
    ) -> None:
        """Take as many steps as there may be, from the first one on.

        All that the `first` one reads before a layer that remembers is there; for the rest that
        layer waits.  Examples of later steps, where they are `fetched`, are waited for behind it.
        What is to be done beside the `last` one is done when layers have remembered it.
        """
        histories, count = self.histories, self.shape.room.steps
        for k in range(count):
            with ExitStack() as inside:
                if histories is not None:
                    inside.enter_context(histories.after(k))
                    if k == 0:
                        inside.enter_context(histories.awaiting(begun))
                found = first if k == 0 else None
                found = found or self.reading.at(k, fetched=fetched)
                self._step(*found, last if k == count - 1 else ())
            if k == 0:
                begun()
                ready()

    def _ends_early(self) -> bool:
        """Whether numbers of clients are known before the last step has gone all the way back."""
        # plain steps write the buffers of modules last
        by_numbers = bool(self.stepping.chains) or not self.seating.has_buffers
        return self.end is not None and by_numbers

    def _open_end(self) -> None:
        assert self.end is not None and self.histories is not None, "asked for before"
        sent, clients, held, before = (
            self.buffers[f"{name} 0"] for name in ("broadcast", "clients", "carry", "state")
        )
        rows = self.loading.rows
        self._opened = self.end.open(self.histories, sent, clients, held, before, rows)

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._step(*self.reading.next())

    def _lanes_step(self) -> None:
        assert self.lanes is not None, "asked for before"
        self.lanes.step(self.stepping, self.data, self.buffers)

    def _piece(self, key: Any, function: Callable[[], None]) -> None:
        if self.histories is not None and not self.histories.known:
            function()  # what is recorded depends on which layers remember
            return
        # what a round does must be the same when it is recorded as when it was first called
        key = (key, self.loading.rows is not None, self.beginning.at_once)
        if key not in self._pieces:
            self._pieces[key] = Piece(function, self.pool)
            self._held[key] = {}
        with self.buffers.held_by(self._held[key]):
            self._pieces[key]()

    def _results(self, g: int, turns: Sequence[Turn]) -> Iterator[tuple[int, Done]]:
        crew = self.crews[g]
        states, _, rows = self.buffers[f"result {g}"]
        servers = [self.buffers[f"server {g} {h}"] for h in range(len(crew.inside))]
        told = (rows._replace(notes=(), counters=EMPTY), servers, self.buffers[f"sound {g}"])
        said, all_after, sound = copied(told)
        for inside, after in zip(crew.inside, all_after, strict=True):
            for at, i in enumerate(inside):
                self.loading.returned[i] = tree_map(lambda v, at=at: v[at], after)
        for e, i in enumerate(crew.members):
            count = len(turns[i].work.clients)
            shown = self._outcome(g, e, count)
            one, mine = tree_map(lambda v, e=e, n=count: v[e, :n], (said, states))
            own: Row = one._replace(notes=shown.rows.notes, counters=shown.rows.counters)
            assert shown.trained is not None
            trained = shown.trained._replace(ids=turns[i].work.ids)
            outcome = shown._replace(rows=own, trained=trained)
            placed = None if self.loading.rows is None else self.loading.rows.reserved[e]
            yield i, Done(self.loading.returned[i], mine, outcome, sound[e], placed)

    def _outcome(self, g: int, e: int, count: int) -> Outcome:
        """Show the buffers as an outcome; they will be written again."""
        found, key = self.buffers[f"result {g}"], (g, e, count)
        if key not in self._shown or self._shown[key][0] is not found:
            _, report, rows = found
            clients, broadcast = self.buffers[f"clients {g}"], self.buffers[f"broadcast {g}"]
            carry = self.buffers[f"carry {g}"]
            rows, clients, own = tree_map(lambda v: v[e, :count], (rows, clients, carry.buffers))
            report, broadcast = tree_map(lambda v: v[e], (report, broadcast))
            trained = Trained([], partial(self._models, g, e, count), own)
            self._shown[key] = found, Outcome(report, rows, broadcast, clients, trained)
        return self._shown[key][1]

    def _models(self, g: int, e: int, count: int) -> Tensor:
        """Give the models that clients ended with [C, P]; they are written when somebody asks."""
        if not self._written:
            self._write_models()  # not recorded: another graph's scratch may be this one's results
            self._written = True
        found: Tensor = self.buffers[f"carry {g}"].w[e, :count]
        return found

    # -- pieces ------------------------------------------------------------------------------
    def _open(self) -> None:
        """Write to everybody."""
        buffers = self.buffers
        every = buffers["numbers"][:, STEPS:].to(self.task.dtype)
        for g, (group, part) in enumerate(self.seating.parts()):
            info: ClientInfo = tree_map(lambda v, part=part: v[part], buffers["info"])
            seeds, counts = buffers["numbers"][part, 0], buffers["numbers"][part, 1]
            server, state = self.beginning.seen_servers(g), buffers[f"state {g}"]
            size = counts.to(every)
            broadcast, clients = group.open(server, info, state, every[part], size, seeds)
            if self.looks.lanes:
                # looks are recorded before this is, and would write over what is only held
                broadcast = buffers.put(f"written {g}", broadcast)
                rest = buffers.put(f"personal {g}", clients._replace(state=EMPTY))
                clients = rest._replace(state=state)
            if g in self.looks.lanes:
                self.looks.lanes[g].look_up(info, part)
            buffers.hold(f"opened {g}", (broadcast, clients))

    def _begin(self) -> None:
        buffers = self.buffers
        drawn, carries = [], []
        for g, (group, part) in enumerate(self.seating.parts()):
            broadcast, clients = self._probed(g, group, part)
            for number, batch in self.looks.walk(clients.info, part) if group.uses("begin") else ():
                clients = group.begin(broadcast, clients, batch, number)
            buffers.put(f"broadcast {g}", broadcast)
            self.seating.put_clients(g, clients)
            drawn.append((broadcast.round, broadcast.seed))
            carries.append(group.start(broadcast, clients))
        buffers.put("k", torch.zeros((), dtype=self.task.dtype, device=self.device))
        self.drawing.draw(drawn)
        self.seating.put_carries(carries)
        if self.deciding.pending and self.lanes is None and self.shape.room.steps:
            self.end = self.deciding.decide(self.groups, self.seating.seats(), self.reading.next())
            buffers["k"].zero_()  # nobody has taken a step
        if self.histories is not None:
            start, steps = buffers["broadcast 0"].w, buffers["clients 0"].steps
            self.histories.begin(start, *self.beginning.vectors(), steps)

    def _probed(self, g: int, group: Group, part: slice) -> tuple[Broadcast, Client]:
        """Add to what was written what everybody finds at the received model."""
        broadcast, clients = self.buffers[f"opened {g}"]
        if not group.uses("probe"):
            return broadcast, clients
        probes = self._measured("probe", g, part, broadcast, clients)
        count = self.buffers["numbers"][part, 1]
        place = torch.arange(self.shape.clients, device=self.device)
        weights = torch.where(place < count[:, None], clients.info.size, 0)  # none for the padding
        shared = group.shared_probes(probes, weights)
        return broadcast._replace(cohort=shared), clients._replace(probe=probes)

    def _measured(
        self, hook: str, g: int, part: slice, broadcast: Broadcast, clients: Client,
        at: Carry | None = None,
    ) -> tuple[Tree, ...]:  # fmt: skip
        """Give what a hook finds over everybody's own data: means with leading axes S, C."""
        if g in self.looks.lanes:
            return self.looks.lanes[g].means(hook)
        group = self.groups[g]
        if at is None:
            at = group.start(broadcast, clients)._replace(state=clients.state)
        return self.looks.side_by_side(hook, group, part, broadcast, clients, at)

    def _step(
        self, batch: Batch, keys: Tensor, number: Tensor, then: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Let everybody take one step who still does."""
        models, seats = self.buffers["models"], self.seating.seats()
        self.stepping.take(self.groups, seats, models, batch, keys, number, then)

    def _write_models(self) -> None:
        """Write the models that clients ended with, where layers only remember their steps."""
        assert self.histories is not None, "asked for before"
        models, start = self.buffers["models"][0].flatten(0, 1), self.buffers["broadcast 0"].w
        more, own = self.beginning.vectors()
        if self.loading.rows is not None:
            self.loading.rows.fill()
            own = self.stepping.chains[0].own(self.buffers["clients 0"])
        self.histories.finish(models, start, more, own)

    def _finish(self) -> None:
        if self.histories is not None and self.end is None:
            self._write_models()
        for g, (group, part) in enumerate(self.seating.parts()):
            clients, carry = self.buffers[f"clients {g}"], self.buffers[f"carry {g}"]
            broadcast, review = self.buffers[f"broadcast {g}"], clients.review
            if group.uses("review"):
                at = carry._replace(state=clients.state)
                review = self._measured("review", g, part, broadcast, clients, at)
            ended = (broadcast, clients._replace(review=review), carry)
            before = self.buffers[f"state {g}"]
            if self.end is not None and self.histories is not None:
                if self._opened is None:
                    self._open_end()
                assert self._opened is not None
                opened, self._opened, placed = self._opened, None, self.loading.rows
                states, report, rows = self.end.take(opened, self.histories, carry)
                if placed is not None:
                    placed.put(states, vectors=not self.end.wrote_rows)
                    states = before = EMPTY
            else:
                rows = group.judge(*ended)
                states, report = group.sum(*ended, before, rows.accepted)
                if self.histories is not None:
                    self.histories.spoiled.copy_((rows.accepted != (clients.steps > 0)).any())
            told = (report, rows, clients.info.id, self.buffers["numbers"][part, 2])
            self._close(g, states, before, told)

    def _close(self, g: int, states: Tree, before: Tree, told: Any) -> None:
        """Run the server's half; where it is not finite, nobody's report counts."""
        sound, rows = self._serve(g, told), told[1]
        if self.loading.rows is not None:
            self.loading.rows.keep(sound)
        rows = rows._replace(accepted=rows.accepted & sound[:, None])
        # held, not copied: nothing else uses its memory before it is read
        self.buffers.hold(f"result {g}", (where_rows(sound, states, before), told[0], rows))
        self.buffers.hold(f"sound {g}", sound)

    def _serve(self, g: int, told: Any) -> Tensor:
        """Run the server's half of a crew's experiments; tell which of them [E] are finite."""
        all_servers = self.crews[g].servers
        parts, found = split([servers.size for servers in all_servers]), list[Tensor]()
        for h, (servers, part) in enumerate(zip(all_servers, parts, strict=True)):
            total, own, who, people = tree_map(lambda v, part=part: v[part], told)
            held, known = (self.buffers[f"{name} {g} {h}"] for name in ("server", "told"))
            found.append(servers.round(held, total, own, who, people, known))
        return torch.cat(found)


def _most(steps: list[list[list[int]]]) -> int:
    """Tell how many steps anybody takes, given by crew, experiment and client."""
    return max(k for crew in steps for own in crew for k in own)
