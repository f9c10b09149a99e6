"""Experiments of one structure: the same sentence of rules, perhaps with other numbers.

A `Group` has the clients' half of its experiments, in which the server optimizer plays no part;
`Servers` the server's half of those that have the same one.  Neither knows where data lie.  Every
tree has the axes [E, C, ...]: experiments, clients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from undrift.core import tree
from undrift.core.algorithm import (
    Algorithm,
    Broadcast,
    Client,
    Report,
    Row,
    Server,
    write_broadcast,
    write_personal,
)
from undrift.core.noise import Known
from undrift.core.round import (
    client_begin,
    client_finish,
    client_gradient,
    client_move,
    client_start,
    finite_rows,
    measure,
)
from undrift.core.rule import ClientInfo, Rule
from undrift.core.server import checked_round
from undrift.core.task import Batch, Task
from undrift.core.tree import EMPTY, Tree, leaves, stack, tree_map
from undrift.core.views import Carry
from undrift.engines.engine import by_client
from undrift.engines.fused import Fused
from undrift.engines.graphs import apart, copy_into, write_over
from undrift.engines.likeness import Likeness, all_the_same
from undrift.errors import TaskError

MOST_TERMS = 64  # of a sum that is written out: the compiler takes a minute for a hundred


class NoPasses(Task):
    """A task that refuses to be run: marks what needs more than elementwise algebra."""

    @classmethod
    def of(cls, task: Task) -> Task:
        """Copy a task without its passes."""
        twin = copy.copy(task)
        twin.__class__ = cls
        return twin

    def forward_named(self, *args: Any, **settings: Any) -> Any:
        """Refuse."""
        raise TaskError("a rule runs the model in its own half of a step")


class Alike:
    """Maps a function of one experiment over E of them."""

    def __init__(self, algos: Sequence[Algorithm], device: torch.device) -> None:
        self.algo, self.size = algos[0], len(algos)
        same = all_the_same(list(algos))
        # numbers that differ become tensors with an axis for experiments
        self.numbers = None if same else tree_map(lambda v: v.to(device), stack(list(algos)))

    def each(
        self, function: Callable[..., Any], numbers: Sequence[Tensor] = ()
    ) -> Callable[..., Any]:
        """Map function(algo, ...) of one experiment over all of them.

        `numbers` stand in for the experiments' own, tensor by tensor.
        """
        given = iter(numbers)
        own = tree_map(lambda v: next(given), self.numbers) if numbers else self.numbers
        if own is not None:
            axes = tree_map(lambda v: 0, own)  # what is not set has none
            return lambda *trees: vmap(function, in_dims=(axes, *[0] * len(trees)))(own, *trees)
        if self.size == 1:
            return lambda *trees: tree_map(
                lambda v: v[None], function(self.algo, *tree_map(lambda v: v[0], trees))
            )
        return vmap(partial(function, self.algo))


class Servers(Alike):
    """The server's half of some experiments."""

    def __init__(self, algos: Sequence[Algorithm], device: torch.device, fused: bool) -> None:
        super().__init__(algos, device)
        compiled = fused and device.type == "cuda"
        self._whole = self.each(checked_round)
        self._round = Fused(
            self._renewed, "the server's half", compiled=compiled, plain=self._copied, proven=True
        )

    def round(
        self, server: Server, total: Report, rows: Row, ids: Tensor, population: Tensor,
        known: Known,
    ) -> Tensor:  # fmt: skip
        """Turn the cohorts' sums into the next servers, which take the place of these.

        A population [E] is a whole number, of which rules make fractions.  Tells which servers [E]
        are finite; the others are refused and stay as they were.
        """
        sound: Tensor = self._round(server, population, total, rows, ids, known)
        return sound

    def _renewed(self, server: Server, *told: Any) -> Tree:
        after, sound = self._next(server, *told)
        write_over(server, after)
        return sound

    def _copied(self, server: Server, *told: Any) -> Tree:
        after, sound = self._next(server, *told)
        copy_into(server, after)
        return sound

    def _next(self, server: Server, population: Tensor, *told: Any) -> tuple[Server, Tensor]:
        *cohort, known = told
        after, sound = self._whole(server, *cohort, population.to(server.w.dtype), known)
        return apart(server, after), sound


class Group(Alike):
    """The clients' half of some experiments, in calls that see all of them."""

    def __init__(self, algos: Sequence[Algorithm], task: Task, device: torch.device) -> None:
        super().__init__([with_server(algo, algos[0].server) for algo in algos], device)
        self.task, self.compiled = task, device.type == "cuda"
        self.judge = self._fused(self._judged, "the end of local training")
        self.sum = self._fused(self._summed, "the sums of a round")
        self.move = self._fused_move()

    def spread(self, lanes: int) -> Group:
        """Copy it for the steps of single clients on so many lanes, each with its own numbers."""
        twin = copy.copy(self)
        twin.size = lanes
        twin.move = twin._fused_move()
        return twin

    def uses(self, hook: str) -> bool:
        """Whether some rule has this hook."""
        return self.algo.uses(hook)

    # -- before the steps --------------------------------------------------------------------
    def open(
        self, server: Server, info: ClientInfo, state: Tree, steps: Tensor, size: Tensor,
        seed: Tensor,
    ) -> tuple[Broadcast, Client]:  # fmt: skip
        """Write the broadcast."""

        def one(
            algo: Algorithm, server: Server, info: ClientInfo, size: Tensor, seed: Tensor
        ) -> Any:
            broadcast = write_broadcast(algo, server, size, seed)
            return broadcast, vmap(lambda c: write_personal(algo, server, c))(info)

        broadcast, notes = self.each(one)(server, info, size, seed)
        nothing = tuple(EMPTY for _ in self.algo.parts)
        return broadcast, Client(info, notes, state, nothing, nothing[:-1], steps)

    def start(self, broadcast: Broadcast, clients: Client, numbers: Sequence[Tensor] = ()) -> Carry:
        """Bring everybody to the received model."""

        def one(algo: Algorithm, sent: Broadcast, clients: Client) -> Carry:
            begun: Carry = vmap(lambda c: client_start(algo, self.task, sent, c))(clients)
            return begun._replace(state=EMPTY)  # clients keep theirs

        started: Carry = self.each(one, numbers)(broadcast, clients)
        return started

    def begin(self, broadcast: Broadcast, clients: Client, batch: Batch, piece: Tensor) -> Client:
        """Let rules prepare their states on one piece of everybody's data, number `piece` [E]."""

        def one(
            algo: Algorithm, sent: Broadcast, clients: Client, batch: Batch, piece: Tensor
        ) -> Client:
            begin = lambda c, b: client_begin(algo, self.task, sent, c, b, piece)  # noqa: E731
            begun: Client = vmap(begin)(clients, batch)
            return begun

        return self.each(one)(broadcast, clients, batch, piece)

    def look(
        self, hook: str, numbers: Sequence[Tensor], broadcast: Broadcast, clients: Client,
        carry: Carry, batch: Batch, piece: Tensor, gradient: dict[str, Tensor] | None = None,
    ) -> tuple[Tree, ...]:  # fmt: skip
        """Evaluate a hook on one piece of everybody's data, times its examples.

        Gradients at the received models may be known.
        """

        def one(
            algo: Algorithm, sent: Broadcast, clients: Client, carry: Carry, batch: Batch,
            piece: Tensor, *known: dict[str, Tensor],
        ) -> Tree:  # fmt: skip
            def look(client: Client, at: Carry, batch: Batch, *known: dict[str, Tensor]) -> Tree:
                return measure(hook, algo, self.task, sent, client, at, batch, piece, *known)

            return vmap(look)(clients, carry, batch, *known)

        known = () if gradient is None else (gradient,)
        return self.each(one, numbers)(broadcast, clients, carry, batch, piece, *known)

    def without_passes(self) -> Group:
        """Copy it with a task that refuses to be run."""
        twin = copy.copy(self)
        twin.task = NoPasses.of(self.task)
        return twin

    def shared_probes(self, probes: tuple[Tree, ...], size: Tensor) -> tuple[Tree, ...]:
        """Average the probes that are shared, by size."""
        return self.each(cohort_mean)(probes, size)

    # -- steps -------------------------------------------------------------------------------
    def gradient(
        self, numbers: Sequence[Tensor], broadcast: Broadcast, clients: Client, carry: Carry,
        batch: Batch, keys: Tensor,
    ) -> Any:  # fmt: skip
        """Take the first half of a step, where rules take part in it."""

        def one(
            algo: Algorithm, sent: Broadcast, clients: Client, carry: Carry, batch: Batch, keys: Any
        ) -> Any:
            def own(client: Client, carry: Carry, batch: Batch, key: Tensor) -> Any:
                return client_gradient(algo, self.task, sent, client, carry, batch, key)

            return vmap(own)(clients, carry, batch, keys)

        return self.each(one, numbers)(broadcast, clients, carry, batch, keys)

    def moved(self, task: Task) -> Callable[..., Carry]:
        """Make the second half of a step: what clients hold after it."""

        def one(
            algo: Algorithm, sent: Broadcast, clients: Client, held: Carry, batch: Batch,
            keys: Tensor, k: Tensor, found: Any,
        ) -> Carry:  # fmt: skip
            def own(client: Client, carry: Carry, batch: Batch, key: Tensor, found: Any) -> Carry:
                carry = carry._replace(state=client.state)
                moved = client_move(algo, task, sent, client, carry, batch, key, k, found)
                return moved._replace(state=EMPTY)

            moved: Carry = vmap(own)(clients, held, batch, keys, found)
            return tree.where_rows(k < clients.steps, moved, held)

        def moved(numbers: Sequence[Tensor], *rest: Any) -> Carry:
            after: Carry = self.each(one, numbers)(*rest)
            return after

        return moved

    def _fused_move(self) -> Fused:
        """Make the second half of a step: it moves what clients hold in place."""
        return Fused(
            self._moving(NoPasses.of(self.task)),
            "a local step",
            compiled=self.compiled,
            plain=self._moving(self.task),
        )

    def _moving(self, task: Task) -> Callable[..., Tree]:
        after = self.moved(task)

        def move(
            numbers: Sequence[Tensor], sent: Broadcast, clients: Client, held: Carry, *rest: Any
        ) -> Tree:
            moved = after(numbers, sent, clients, held, *rest)
            write_over(held, moved)
            return EMPTY

        return move

    # -- after the steps ---------------------------------------------------------------------
    # Two calls, each of which passes over [C, P] for what it gives alone: who is accepted must be
    # known of a whole client before its numbers are added.
    def _judged(self, algo: Algorithm, sent: Broadcast, clients: Client, carry: Carry) -> Row:
        """Say of everybody what is not summed."""
        return self._finished(algo, sent, clients, carry)[2]

    def _summed(
        self, algo: Algorithm, sent: Broadcast, clients: Client, carry: Carry, before: Tree,
        accepted: Tensor,
    ) -> tuple[tuple[Tree, ...], Report]:  # fmt: skip
        """Sum the reports; what a client that is refused had `before` the round, it keeps."""
        states, reports, _ = self._finished(algo, sent, clients, carry)
        kept = tree.where_rows(accepted, states, before)
        return kept, tree_map(lambda v: masked_sum(v, accepted), reports)

    def finished(
        self, broadcast: Broadcast, clients: Client, carry: Carry
    ) -> tuple[tuple[Tree, ...], Report, Row]:
        """Close everybody's local training; nothing is summed yet."""
        ended: tuple[tuple[Tree, ...], Report, Row] = self.each(self._finished)(
            broadcast, clients, carry
        )
        return ended

    def _finished(
        self, algo: Algorithm, sent: Broadcast, clients: Client, carry: Carry
    ) -> tuple[tuple[Tree, ...], Report, Row]:
        def finish(client: Client, at: Carry) -> tuple[tuple[Tree, ...], Report, Row]:
            return client_finish(algo, self.task, sent, client, at)

        ended: tuple[tuple[Tree, ...], Report, Row] = vmap(finish)(
            clients, carry._replace(state=clients.state)
        )
        return ended

    def _fused(self, function: Callable[..., Any], name: str) -> Fused:
        return Fused(self.each(function), name, compiled=self.compiled, vectors=True)


def with_server(algo: Algorithm, server: Rule) -> Algorithm:
    """Copy a sentence with another server optimizer, which clients do not see."""
    twin = copy.copy(algo)
    object.__setattr__(twin, "server", server)  # not `replace`: nobody will run it as a whole
    return twin


def client_structure(algo: Algorithm) -> Any:
    """Describe what clients see of an algorithm; equal descriptions can share a `Group`."""
    return Likeness((algo.rules, algo.local, algo.aggregate)), algo.needs_path


def masked_sum(rows: Tensor, accepted: Tensor) -> Tensor:
    """Add the rows of accepted clients in float64, in their order."""
    kept = torch.where(by_client(accepted, rows), rows, 0)
    if not (rows.is_cuda and rows.dim() > 1 and len(rows) <= MOST_TERMS):
        return kept.sum(0, dtype=torch.float64)
    # written out, a compiler makes one pass of it: 96 us instead of 261 for 50 rows of 1.6 million
    first, *others = kept.unbind()
    total = first.double()
    for row in others:
        total = total + row
    return total


def cohort_mean(algo: Algorithm, probes: tuple[Tree, ...], size: Tensor) -> tuple[Tree, ...]:
    """Average the probes that are shared, by size; what is not finite is left out."""

    def mean(probe: Tree) -> Tree:
        weighted = tree_map(lambda v: by_client(size, v) * v, probe)
        sound = finite_rows(weighted)
        weight = masked_sum(size, sound)

        def one(rows: Tensor, like: Tensor) -> Tensor:
            return (masked_sum(rows, sound) / weight).to(like.dtype)

        return tree_map(one, weighted, probe)

    pairs = zip(algo.parts, probes, strict=True)
    return tuple(mean(probe) if p.shares_probe and leaves(probe) else EMPTY for p, probe in pairs)


def split(sizes: Sequence[int]) -> list[slice]:
    """Cut an axis into consecutive parts of these sizes."""
    ends = list(accumulate(sizes, initial=0))
    return [slice(a, b) for a, b in pairwise(ends)]
