"""One local step of all clients that are there, of all experiments.

Experiments of one structure share every call; others share forward and backward, where no rule
takes part in it, and differ in their elementwise algebra alone.

Every tree has two leading axes [A, B]: A experiments with their B clients, or A lanes with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from undrift.core.algorithm import Algorithm, Broadcast, Client
from undrift.core.chain import Chain, Chains
from undrift.core.histories import Histories
from undrift.core.linear import Descent
from undrift.core.round import Found, shares_gradient, task_gradient
from undrift.core.task import Batch, Buffers, Task
from undrift.core.tree import Tree, tree_map
from undrift.core.views import Carry
from undrift.engines.branches import Aside, side_by_side
from undrift.engines.fused import Fused
from undrift.engines.group import Group, split
from undrift.engines.head import Head, Said
from undrift.engines.linear_chain import LinearChain, Step
from undrift.engines.plain import PlainSteps, is_sequence
from undrift.engines.whole_step import WholeStep

# Weights times examples of a step that keep a device busy by themselves: groups then run side by
# side, so that one computes while another waits for memory.  With less they share their passes.
ENOUGH = {"cuda": 640e6, "cpu": float("inf")}
WHOLE = {"cuda"}  # where a step is compiled as a whole, unless a module is a sequence


class Seat(NamedTuple):
    """What the steps of one crew read and move."""

    numbers: tuple[Tensor, ...]  # of its algorithms, [A]; none where all have the same
    broadcast: Broadcast  # [A]
    clients: Client
    carry: Carry


class Crew(NamedTuple):
    """Clients of one structure."""

    number: int
    group: Group
    seat: Seat
    own: slice  # of the axis A of all


class Stepping:
    """Takes local steps, in place."""

    def __init__(
        self,
        task: Task,
        device: torch.device,
        in_place: bool,
        histories: Histories | None = None,
    ) -> None:
        self.task, self.in_place, self.histories = task, in_place, histories
        self.device, self._heads, self._paces = device, dict[int, Head](), dict[int, Fused]()
        self._wholes: dict[int, WholeStep] = {}  # by group
        # of groups whose rules are linear: layers take their steps while going back
        self.chains: dict[int, LinearChain] = {}
        self._aside = Aside(device)  # not a round's, whose work may take longer than a step

    def take(
        self, groups: Sequence[Group], seats: Sequence[Seat], models: tuple[Tensor, Buffers],
        batch: Batch, keys: Tensor, k: Tensor, then: Sequence[Callable[[], None]] = (),
    ) -> None:  # fmt: skip
        """Take one step; k [A] is its number, and nobody moves who takes no such step.

        `models` are those of all seats, side by side.  Where layers remember, calls in `then` are
        made when they have, beside what others still do while going back.
        """
        if self.in_place and not self.chains:
            self._take_in_place(groups[0].algo, seats[0], batch, keys, k, then)
            return
        if self.task.augment is not None:
            batch = vmap(vmap(self.task.augmented))(batch, keys)
        crews = list(map(Crew, range(len(groups)), groups, seats, split([g.size for g in groups])))
        parts = [crews[own] for own in split(self.branches(groups, batch))]
        whole = (models, batch, keys, k, then)
        side_by_side([partial(self._some, part, *whole) for part in parts], self.device)

    def branches(self, groups: Sequence[Group], batch: Batch) -> list[int]:
        """Share groups out: each alone where it is enough work for a device, else all together."""
        each = self.task.size * batch.x.shape[1] * batch.x.shape[2]
        fills = min(g.size for g in groups) * each >= ENOUGH[self.device.type]
        return [1] * len(groups) if fills else [len(groups)]

    def _some(
        self, crews: Sequence[Crew], models: tuple[Tensor, Buffers], batch: Batch, keys: Tensor,
        k: Tensor, then: Sequence[Callable[[], None]],
    ) -> None:  # fmt: skip
        """Take the step of some crews; neighbours go forward and back together."""
        for linear, some in groupby(crews, lambda crew: crew.number in self.chains):
            if linear:
                self._take_by_numbers(list(some), models, batch, keys, k, then)
            else:
                self._take_line_by_line(list(some), models, batch, keys, k)

    def _take_line_by_line(
        self, crews: Sequence[Crew], models: tuple[Tensor, Buffers], batch: Batch, keys: Tensor,
        k: Tensor,
    ) -> None:  # fmt: skip
        """Put gradients together and call the rules; those that share passes stand first."""
        if len(crews) == 1 and (precision := self._precision_of_whole) is not None:
            (crew,) = crews
            mine: Any = tree_map(lambda v: v[crew.own], (batch, keys, k))
            self._whole_step(crew.group, precision)(*crew.seat, *mine)
            return
        sharing = [crew for crew in crews if shares_gradient(crew.group.algo)]
        together: Any = None
        if sharing:
            together = self._found(*_theirs(sharing, (*models, batch, keys)))
        for crew, own in zip(crews, split([crew.group.size for crew in crews]), strict=True):
            mine = tree_map(lambda v, crew=crew: v[crew.own], (batch, keys, k))
            if shares_gradient(crew.group.algo):
                found = tree_map(lambda v, own=own: v[own], together)
            else:
                found = crew.group.gradient(crew.seat.numbers, *_at(crew.seat), *mine[:2])
            crew.group.move(*crew.seat, *mine, found)

    @property
    def _precision_of_whole(self) -> str | None:
        """Tell in which precision a step is compiled as a whole; None where it is not."""
        seam = self.task.seam
        if self.device.type not in WHOLE or is_sequence(self.task.module):
            return None
        if seam is None:
            return "float32"
        by_user = seam.choices or seam.default != "triton"
        return None if by_user else seam.precision

    def _whole_step(self, group: Group, precision: str) -> WholeStep:
        """Give the compiled step of a group; where it cannot be traced, it goes line by line."""

        def plain(numbers: Any, sent: Any, clients: Any, held: Any, *rest: Any) -> Tree:
            batch, keys, _ = rest
            at = (sent, clients, held._replace(state=clients.state))
            found = group.gradient(numbers, *at, batch, keys)
            return group.move(numbers, sent, clients, held, *rest, found)

        if id(group) not in self._wholes:
            self._wholes[id(group)] = WholeStep(group, precision, plain)
        return self._wholes[id(group)]

    def _head(self, clients: int) -> Head | None:
        """Give the end of the network for so many clients, or None where torch has to see it all.

        Other modules may do what torch's own backward pass and vmap do not like together.
        """
        if not is_sequence(self.task.module):
            return None
        return self._heads.setdefault(clients, Head(self.task, self.device))

    def _found(
        self, w: Tensor, buffers: Buffers, batch: Batch, keys: Tensor,
        descent: Descent | None = None, between: Callable[[Said], None] | None = None,
    ) -> Found:  # fmt: skip
        """Go forward and back, everybody at once; what is said is told `between` the two."""
        head = self._head(w.shape[0] * w.shape[1])
        if head is None:
            each: Found = vmap(vmap(partial(task_gradient, self.task)))(w, buffers, batch, keys)
            return each
        flat, own, rows, seeds = tree_map(lambda v: v.flatten(0, 1), (w, buffers, batch, keys))

        def whole(tree: Any) -> Any:
            return tree_map(lambda v: v.unflatten(0, w.shape[:2]), tree)

        told = None if between is None else lambda said: between(whole(said))
        found: Found = whole(head.found(flat, own, rows, seeds, descent, told))
        return found

    def _take_by_numbers(
        self, crews: Sequence[Crew], models: tuple[Tensor, Buffers], batch: Batch, keys: Tensor,
        k: Tensor, then: Sequence[Callable[[], None]],
    ) -> None:  # fmt: skip
        """Let layers take the steps of chains while going back, or remember them; move the rest."""
        chains = [self.chains[crew.number] for crew in crews]
        fit = all(chain.fits for chain in chains)
        assert fit or len(chains) == 1, "only one that remembers need not fit"
        steps = [self._prepared(crew, batch, keys, k) for crew in crews]
        scale, parts = self.task.loss_scale, split([crew.group.size for crew in crews])
        ways = [
            c.on_the_way_back(step, scale) for c, step in zip(chains, steps, strict=True) if fit
        ]
        told: list[tuple[Tensor, Tensor]] = []

        def between(said: Said) -> None:
            for chain, step, own in zip(chains, steps, parts, strict=True):
                mine: Any = tree_map(lambda v, own=own: v[own], said)
                told.append(chain.advance(step._replace(found=Found(step.held.w, {}, *mine))))
            for way, (moved, live) in zip(ways, told if fit else (), strict=True):
                way.tell(moved.flatten(1, 2), live.flatten())

        def renew() -> None:
            for chain, step, (moved, _) in zip(chains, steps, told, strict=True):
                chain.renew(moved, step)

        descent = Descent(histories=self.histories, steps=fit, chain=_as_one(ways))
        w, buffers, seen, seeds = _theirs(crews, (*models, batch, keys))
        with self._beside([renew, *then]):
            together = self._found(w, buffers, seen, seeds, descent, between)
            for chain, step, own, (moved, live) in zip(chains, steps, parts, told, strict=True):
                found = tree_map(lambda v, own=own: v[own], together)
                chain.apply(moved, live, step._replace(found=found))

    @contextmanager
    def _beside(self, calls: Sequence[Callable[[], None]]) -> Iterator[None]:
        """Make calls once layers have remembered the step inside, beside the rest of it."""
        if self.histories is None or not calls:
            yield
            return
        waits: list[Callable[[], None]] = []

        def remembered() -> None:
            waits.extend([self._aside.run(call) for call in calls])

        try:
            with self.histories.once_remembered(remembered):
                yield
        finally:  # also where it fails: nobody knows what is still going on aside
            for wait in waits:
                wait()

    def _prepared(self, crew: Crew, batch: Batch, keys: Tensor, k: Tensor) -> Step:
        """Give a crew's step before anybody has gone forward."""
        seat = crew.seat
        mine: Any = tree_map(lambda v: v[crew.own], (batch, keys, k))
        found = Found(seat.carry.w, {}, seat.carry.loss, {}, seat.carry.buffers)
        return Step(*seat, *mine, found)  # type: ignore[call-arg]

    def _take_in_place(
        self, algo: Algorithm, seat: Seat, batch: Batch, keys: Tensor, k: Tensor,
        then: Sequence[Callable[[], None]],
    ) -> None:  # fmt: skip
        """Move the models themselves, everybody in one axis."""
        # one axis for all: a view, for models lie side by side
        carry, batch, keys = tree_map(lambda v: v.flatten(0, 1), (seat.carry, batch, keys))
        count = len(carry.w)
        held = () if self.histories is None else self.histories.held(count)
        pace = self._pace(algo, count)
        live, lr, slots = pace(k, seat.clients.steps, seat.broadcast.round, held)
        if self.histories is not None:
            self.histories.turn_to(slots)
        head = self._head(count)
        steps = PlainSteps(self.task, algo, seat.broadcast, together=True, head=head)
        with self._beside(then):
            steps.step_in_place(carry, batch, keys, lr, live, self.histories)

    def _pace(self, algo: Algorithm, count: int) -> Fused:
        """Give the call that tells who of so many clients steps, and how far."""
        rates = vmap(lambda round, k: torch.zeros_like(round) + algo.local.lr_at(round, k))

        def pace(k: Tensor, steps: Tensor, round: Tensor, held: Any) -> tuple[Any, ...]:
            live = k[:, None] < steps
            none = torch.zeros((), dtype=self.task.dtype, device=k.device)
            lr = torch.where(live, rates(round, k)[:, None], none).flatten()
            if self.histories is None:
                return live.flatten(), lr, ()
            at = k[:, None].expand_as(steps).flatten()
            return live.flatten(), lr, self.histories.place(held, at, lr)

        if count not in self._paces:
            compiled = self.device.type == "cuda"
            self._paces[count] = Fused(pace, "rates of a step", compiled=compiled)
        return self._paces[count]


def _theirs(crews: Sequence[Crew], tree: Any) -> Any:
    """Give what belongs to crews who stand side by side."""
    return tree_map(lambda v: v[crews[0].own.start : crews[-1].own.stop], tree)


def _as_one(ways: Sequence[Chain]) -> Chain | Chains | None:
    """Put the steps of crews who stand side by side together."""
    if len(ways) < 2:
        return ways[0] if ways else None
    return Chains(list(zip(split([len(way.carried[0]) for way in ways]), ways, strict=True)))


def _at(seat: Seat) -> tuple[Broadcast, Client, Carry]:
    return seat.broadcast, seat.clients, seat.carry._replace(state=seat.clients.state)
