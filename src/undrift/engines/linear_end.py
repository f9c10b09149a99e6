"""The end of a round by numbers, where rules are linear there, too.

Closing local training gives each client's next state, its report and the length of its update.  If
the vectors among them are combinations of model, c, c_i, ..., weight by weight, and numbers are
made of sums over such combinations, then a few numbers say how (as in linear_chain.py), and layers
that remember their steps need not write the weights that clients ended with (kernels/ending.py).

A recorded end is cut in two: what is added up and what the vectors are, as numbers of short
vectors; and what is made of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.func import vmap

from undrift import kernels
from undrift.core.algorithm import Broadcast, Client, Report, Row
from undrift.core.histories import Histories
from undrift.core.history import LayerEnd
from undrift.core.tree import Tree, leaves, rebuild, structure
from undrift.core.views import Carry
from undrift.engines.engine import by_client
from undrift.engines.fused import Fused
from undrift.engines.graphs import room_for
from undrift.engines.group import Group, masked_sum
from undrift.engines.linear_chain import LinearChain, Places, Short, Step, recorded
from undrift.engines.linearity import SUMS, Made, alike, chooses, follow, is_zero, outputs
from undrift.engines.state_rows import NEW, StateRows, are_states
from undrift.kernels.ending import Ending, Placed, Size, combination

Needs = tuple[tuple[int, ...], ...]  # by value: which columns of a table it reads


class Recording(NamedTuple):
    """A recorded end, cut in two."""

    values: fx.GraphModule  # gives the combinations: those that are added up, states, reports
    rest: fx.GraphModule  # takes their sums besides, and gives what is no vector
    squares: tuple[bool, ...]  # by sum: whether it is the root of that of squares
    made: list[set[int]]  # by value: of which vectors
    vectors: dict[int, int]  # by place among all results that are vectors: which value
    shape: Any  # of all results
    states: int  # how many of them are states: the first ones
    reports: int  # those behind


class Columns(NamedTuple):
    """Vectors where no layer remembers: some columns of them."""

    read: list[Tensor]  # the model [E, C, n], shared [E, 1, n], own [E, C, n]
    states: list[Tensor]
    before: list[Tensor]
    sums: list[Tensor]

    def write(self, values: Sequence[Tensor], accepted: Tensor) -> None:
        """Write states, of the refused as before, and sums over the others."""
        for state, old, value in zip(self.states, self.before, values, strict=False):
            state.copy_(torch.where(accepted[..., None], value, old))
        for total, value in zip(self.sums, values[len(self.states) :], strict=True):
            total.copy_(_summed(value, accepted))


class Opened(NamedTuple):
    """An end that is prepared: all that is known once layers have remembered the last step."""

    given: list[Tensor]  # what the recording reads, with short vectors
    plain: Tensor  # of what values are made where weights have moved
    kept: list[Tensor]  # states before the round
    ending: Ending
    layers: list[LayerEnd]


class LinearEnd:
    """The end of a round of one group, whose wide layers remember their steps."""

    def __init__(
        self, group: Group, short: Short, recording: Recording, chain: LinearChain | None
    ) -> None:
        self._short, self._recording, self._alone = short, recording, group.size == 1
        carried, shared, own = short.places
        first = len(carried) + 1
        number = {("shared", p): first + j for j, p in enumerate(shared)}
        number |= {("own", p): first + len(shared) + j for j, p in enumerate(own)}
        # the model is made of the vectors of a step besides; under plain SGD of the received one
        of_step = [("shared", p) for p in (chain.places.shared if chain else shared[:1])]
        of_step += [("own", p) for p in (chain.places.own if chain else ())]
        read = set().union(*recording.made) | {number[v] for v in of_step}
        self._shared = [p for p in shared if number["shared", p] in read]
        self._own = [p for p in own if number["own", p] in read]
        kept = [number["shared", p] for p in self._shared] + [number["own", p] for p in self._own]
        self._numbers_read = [0, *kept]  # of short vectors: the columns of a table
        column = {j: at for at, j in enumerate(self._numbers_read)}
        self._of_step = [column[number[v]] for v in of_step]
        self._moving: Needs = tuple(tuple(sorted(column[j] for j in of)) for of in recording.made)
        self._remembered: Needs = tuple(
            tuple(sorted({*of, *(self._of_step if 0 in of else ())})) for of in self._moving
        )
        self._numbers = Fused(self._numbered, "the numbers of an end", compiled=group.compiled)
        self._close = Fused(self._closed, "the end of a round", compiled=group.compiled)
        self._blocks: Any = None  # of columns that no layer remembers
        self.wrote_rows = False  # whether states as a whole lie where the store has them

    @classmethod
    def find(
        cls, group: Group, step: Step, chain: LinearChain | None, histories: Histories
    ) -> LinearEnd | None:
        """Find out whether the end is linear, and can be one pass."""
        if group.uses("review"):
            return None  # which runs the model
        short = Short(Places.of(step, group.task.size), step)
        recording = _recorded_end(group, short, step)
        if recording is None:
            return None
        end = cls(group, short, recording, chain)
        layers = histories.layers.values()
        return end if all(layer.concludes(end.size) for layer in layers) else None

    def reads_states_alone(self, clients: Client, state: Tree) -> bool:
        """Whether all vectors of clients that it reads are those of their states."""
        held = leaves(clients)
        return are_states([held[p] for p in self._own], state)

    @property
    def size(self) -> Size:
        """Tell how many vectors there are."""
        places, states = self._recording.vectors, self._recording.states
        own = sum(place < states for place in places)
        return Size(len(self._shared), len(self._own), own, len(places) - own)

    def open(
        self, histories: Histories, sent: Broadcast, clients: Client, held: Carry, before: Tree,
        rows: StateRows | None = None,
    ) -> Opened:  # fmt: skip
        """Prepare the end; layers that do not remember may still move in their last step.

        Who is refused keeps the state from `before` the round.  Where `rows` are given, layers
        that remember read and write states there.
        """
        given = leaves(self._short.ended(sent, clients, held))
        table, plain, used = self._numbers(given, histories.terms)
        shared = [leaves(sent)[p] for p in self._shared]
        own = [leaves(clients)[p] for p in self._own]
        kept = leaves(before)
        states_at = [p for p in self._recording.vectors if p < self._recording.states]
        olds = [kept[p] for p in states_at]
        rooms = rows.after if rows is not None else {p: room_for(kept[p]) for p in states_at}
        states = [rooms[p] for p in states_at]
        room = (len(held.w), held.w.shape[-1])
        sums = [
            torch.empty(room, dtype=torch.float64, device=held.w.device)
            for _ in range(self.size.sums)
        ]
        ending = Ending(
            table, self._remembered, self._recording.squares, shared, used, own,
            clients.steps > 0, states, olds, sums,
            placed=None if rows is None else _placed(rows, own, olds),
        )  # fmt: skip
        layers = [layer.end() for layer in histories.layers.values() if layer.used]
        return Opened(given, plain, kept, ending, layers)

    def take(
        self, opened: Opened, histories: Histories, held: Carry
    ) -> tuple[tuple[Tree, ...], Report, Row]:
        """Close a round: next states, sums over clients and what is not summed."""
        given, plain, kept, ending, layers = opened
        added, columns = [layer.close(ending) for layer in layers], list[Columns]()
        rest = ending._replace(table=plain, needs=self._moving)
        by_kernel = self._closes_columns(held.w, rest, histories)
        self.wrote_rows = by_kernel and ending.placed is not None
        if by_kernel:
            added.append(self._close_columns(held.w, rest, histories))
        else:
            columns = [_columns(held.w, rest, c) for c in histories.rest(held.w.shape[-1])]
        asked = (ending.taken, histories.spoiled)
        small, accepted = self._close(given, plain, added, columns, kept, *asked)
        # seldom: if somebody's numbers are not finite
        redone = {"taken": accepted, "again": histories.spoiled}
        for layer in layers:
            layer.close(ending._replace(**redone))
        if by_kernel:
            self._close_columns(held.w, rest._replace(**redone), histories)
        return self._put_together(small, [*ending.states, *ending.sums])

    def _closes_columns(self, model: Tensor, rest: Ending, histories: Histories) -> bool:
        """Whether kernels close what no layer remembers; else compiled code does."""
        if not kernels.available(model.device):
            return False
        from undrift.kernels import columns as by_kernel

        return by_kernel.takes(model, rest, histories.rest(model.shape[-1]))

    def _close_columns(self, model: Tensor, rest: Ending, histories: Histories) -> Tensor:
        from undrift.kernels import columns as by_kernel

        if self._blocks is None:  # the first time: nothing is recorded yet
            places = histories.rest(model.shape[-1])
            self._blocks = by_kernel.Blocks.of(places, model.device)
        return by_kernel.close_columns(model, rest, self._blocks)

    def _numbered(self, given: Sequence[Tensor], terms: Tensor | None) -> tuple[Tensor, ...]:
        """Say of what values are made: where layers remember, and where weights have moved.

        And which vectors that are shared have a part in the first.
        """
        found = torch.stack([self._whole(v) for v in self._recording.values(*given)])
        columns = [found[..., j] for j in self._numbers_read]
        plain = torch.stack(columns, -1)
        of_model = columns[0]
        for at, column in enumerate(self._of_step):
            part = of_model if terms is None else of_model * terms[0, ..., at]
            columns[column] = columns[column] + part
        table = torch.stack(columns, -1)
        # the received model most often has none: it is in the weights, and is taken off
        of_shared = table[..., 1 : 1 + len(self._shared)]
        return table, plain, (of_shared != 0).flatten(0, 2).any(0)

    def _whole(self, value: Tensor) -> Tensor:
        """Give a combination both axes: what is recorded of one experiment may lack the first."""
        return value[None] if value.dim() == 2 else value

    def _closed(
        self, given: Sequence[Tensor], plain: Tensor, added: Sequence[Tensor],
        columns: Sequence[Columns], before: Sequence[Tensor], taken: Tensor, spoiled: Tensor,
    ) -> tuple[list[Tensor], Tensor]:  # fmt: skip
        """Close what no layer remembers; gives all results but vectors, and who is accepted.

        Writes down whether anybody is refused who took part.
        """
        values = [
            [combination(*one, part.read) for one in zip(plain, self._moving, strict=True)]
            for part in columns
        ]
        sums = self._sums(added, values)
        found = self._recording.rest(*given, *(v[0] if self._alone else v for v in sums))
        row = self._put_together(found, [plain] * len(self._recording.vectors))[2]
        accepted: Tensor = row.accepted
        for part, of in zip(columns, values, strict=True):
            part.write(of[len(sums) :], accepted)
        spoiled.copy_((accepted != taken).any())
        return self._kept(found, before, accepted), accepted

    def _sums(self, added: Sequence[Tensor], values: Sequence[list[Tensor]]) -> list[Tensor]:
        """Add up over a client's weights: of layers, and of all other columns."""
        made = []
        for j, square in enumerate(self._recording.squares):
            parts = [part[j].sum(-1) for part in added]
            parts += [(of[j] * of[j] if square else of[j]).sum(-1) for of in values]
            total = torch.stack(parts).sum(0)
            made.append(total.sqrt() if square else total)
        return made

    def _kept(
        self, found: Sequence[Tensor], before: Sequence[Tensor], accepted: Tensor
    ) -> list[Tensor]:
        """Give all that is no vector: states of the refused as before, reports summed, rows."""
        states, reports = self._recording.states, self._recording.reports
        vectors = self._recording.vectors
        count = len(found) + len(vectors)
        places = [place for place in range(count) if place not in vectors]
        made = []
        for place, value in zip(places, found, strict=True):
            if place < states:
                value = torch.where(by_client(accepted, value), value, before[place])
            elif place < states + reports:
                value = _summed(value, accepted)
            made.append(value)
        return made

    def _put_together(self, small: Sequence[Tensor], vectors: Sequence[Tensor]) -> Any:
        """Make the results of their vectors and all else, in order."""
        one, other = iter(small), iter(vectors)
        count = len(small) + len(vectors)
        places = self._recording.vectors
        found = [next(other) if place in places else next(one) for place in range(count)]
        return rebuild(self._recording.shape, found)


def _columns(model: Tensor, rest: Ending, c: slice) -> Columns:
    """Lay out some columns for compiled code."""
    some = [[v[..., c] for v in of] for of in (rest.own, rest.states, rest.before, rest.sums)]
    read = [model[..., c], *(v[:, None, c] for v in rest.shared), *some[0]]
    return Columns(read, *some[1:])


def _placed(rows: StateRows, own: Sequence[Tensor], olds: Sequence[Tensor]) -> Placed:
    """Tell where vectors of clients are read and written."""
    mine, before = ([rows.lying(v).at for v in some] for some in (own, olds))
    return Placed(mine, [rows.lying(v, NEW).at for v in olds], before, rows.aligned)


def _summed(values: Tensor, accepted: Tensor) -> Tensor:
    """Add up the accepted clients of each experiment."""
    if len(values) == 1:
        return masked_sum(values[0], accepted[0])[None]
    made: Tensor = vmap(masked_sum)(values, accepted)
    return made


def _recorded_end(group: Group, short: Short, step: Step) -> Recording | None:
    """Record the end of a round with short vectors; None if it is not linear."""
    shapes: list[Any] = []

    def finished(*ended: Any) -> Any:
        found = group.finished(*ended)
        shapes.append((structure(found), *(len(leaves(part)) for part in found)))
        return found

    ended = (step.sent, step.clients, step.held)
    given = short.ended(*ended)
    inputs = leaves(given)
    made, whole = recorded(finished, given, [v.clone() for v in inputs]), recorded(finished, ended)
    lengths = (short.length, step.held.w.shape[-1])
    if made is None or whole is None or not alike(made, whole, lengths):
        return None
    shape, states, reports, _ = shapes[0]
    sums: list[Any] = []  # nodes
    known = follow(made.graph, short.marks(inputs), short.length, sums)
    results, wholes = outputs(made.graph), outputs(whole.graph)
    if not known or any(node not in known for node in results) or chooses(made.graph, known):
        return None
    vectors, long = (
        [i for i, node in enumerate(nodes) if length in node.meta["val"].shape]
        for nodes, length in zip((results, wholes), lengths, strict=True)
    )
    others = [node for i, node in enumerate(results) if i not in vectors]
    values = [*(node.args[0] for node in sums), *(results[i] for i in vectors)]
    lead = tuple(step.held.w.shape[:2])
    each = (*(lead if lead[0] > 1 else lead[1:]), short.length)  # as `Group.each` calls it
    sound = (
        all(known[node] == set() for node in others)
        and all(_is_combination(node, known[node], short) for node in values)
        and not _behind(made.graph, sums).intersection(values)  # numbers that are such sums
        and vectors == long  # others have a length of their own, by chance the same
        and all(i < states + reports for i in vectors)
        and all(node.args[0].meta["val"].shape == each for node in sums)
        and all(results[i].meta["val"].shape == (*lead, short.length) for i in vectors)
    )
    if not sound:
        return None
    return Recording(
        _cut(made, values),
        _cut(made, others, sums),
        tuple("ord" in SUMS[node.target] for node in sums),
        [known[node] or set() for node in values],
        {place: len(sums) + at for at, place in enumerate(vectors)},
        shape,
        states,
        reports,
    )


def _is_combination(node: fx.Node, of: Made, short: Short) -> bool:
    """Whether it is one of the model and what does not move: neither momentum nor gradient."""
    carried, number = len(short.places.carried), short.places.number
    if not of:
        return of is not None and is_zero(node)
    return of <= {0, *range(carried + 1, number)}


def _behind(graph: fx.Graph, sums: Sequence[fx.Node]) -> set[fx.Node]:
    """Collect all that is made of sums."""
    found = set(sums)
    for node in graph.nodes:
        if found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def _cut(
    made: fx.GraphModule, wanted: Sequence[fx.Node], known: Sequence[fx.Node] = ()
) -> fx.GraphModule:
    """Copy what some results need; what is known is taken as further inputs."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    given = [node for node in made.graph.nodes if node.op == "placeholder"]
    for node in given:
        copies[node] = graph.node_copy(node)
    for at, node in enumerate(known):
        copies[node] = graph.placeholder(f"sum_{at}")
    graph.graph_copy(made.graph, copies)
    graph.output([copies[node] for node in wanted])
    graph.eliminate_dead_code()
    return fx.GraphModule(made, graph)
