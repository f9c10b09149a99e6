"""The clients' half of a round for a chunk of clients, as programs: any module, any chain of rules.

Letters: C clients, those with most steps first; K steps; B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from undrift.core.algorithm import Algorithm, Broadcast, Client, Report, Row
from undrift.core.round import client_begin, client_finish, client_start, client_step, measure
from undrift.core.task import Batch, Task
from undrift.core.tree import Tree, leaves, rebuild, structure, tree_map
from undrift.core.views import Carry
from undrift.program.programs import Programs

Fetch = Callable[[int, int], Batch]  # what the first so many clients read at step k


class ClientHalf:
    """The functions of `core/round.py`, mapped over clients."""

    def __init__(
        self, task: Task, algo: Algorithm, broadcast: Broadcast, programs: Programs,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        self._shared, self.compiled = (algo, task), compiled
        self._broadcast, self._programs = broadcast, programs

    def begin(self, clients: Client, batch: Batch, piece: Tensor) -> Client:
        """Let rules prepare their states on one piece of everybody's own data."""

        def begin(broadcast: Broadcast, piece: Tensor, client: Client, batch: Batch) -> Tree:
            return client_begin(*self._shared, broadcast, client, batch, piece)

        found: Client = self._call("begin", begin, (self._broadcast, piece), (clients, batch))
        return found

    def measure(
        self, hook: str, clients: Client, carry: Carry, batch: Batch, piece: Tensor
    ) -> tuple[Tree, ...]:
        """Evaluate a hook on one piece of everybody's own data."""

        def look(
            broadcast: Broadcast, piece: Tensor, client: Client, carry: Carry, batch: Batch
        ) -> Tree:
            return measure(hook, *self._shared, broadcast, client, carry, batch, piece)

        found: tuple[Tree, ...] = self._call(
            hook, look, (self._broadcast, piece), (clients, carry, batch)
        )
        return found

    def start(self, clients: Client) -> Carry:
        """Begin local training."""

        def start(broadcast: Broadcast, client: Client) -> Tree:
            return client_start(*self._shared, broadcast, client)

        found: Carry = self._call("start", start, (self._broadcast,), (clients,))
        return found

    def finish(self, clients: Client, carry: Carry) -> tuple[tuple[Tree, ...], Report, Row]:
        """Close local training."""

        def finish(broadcast: Broadcast, client: Client, carry: Carry) -> Tree:
            return client_finish(*self._shared, broadcast, client, carry)

        found: tuple[tuple[Tree, ...], Report, Row] = self._call(
            "finish", finish, (self._broadcast,), (clients, carry)
        )
        return found

    def take_steps(self, clients: Client, steps: list[int], fetch: Fetch) -> Carry:
        """Take the local steps of everybody; those who have taken theirs leave."""
        carry, finished = self.start(clients), []
        training = len(carry.w)  # clients who have steps to take
        for first, last, live in stretches(steps):
            if live < training:
                finished.append(tree_map(lambda v, a=live, b=training: v[a:b], carry))
                training = live
            width = few_widths(live, len(carry.w)) if self.compiled else live
            if width < len(carry.w):
                carry, clients = tree_map(lambda v, n=width: v[:n], (carry, clients))
            carry = self._stretch(clients, carry, range(first, last), fetch)
        if not finished:
            return carry
        rest = tree_map(lambda v: v[:training], carry)
        joined: Carry = tree_map(lambda *v: torch.cat(v), rest, *reversed(finished))
        return joined

    def _stretch(self, clients: Client, carry: Carry, numbers: range, fetch: Fetch) -> Carry:
        """Take some steps of clients who all take them.

        The program is looked up once, and what steps hand on stays a flat list.
        """

        def step(
            broadcast: Broadcast, k: Tensor, client: Client, carry: Carry, batch: Batch
        ) -> Tree:
            return client_step(*self._shared, broadcast, client, carry, batch, k)

        live, kind = len(carry.w), carry.w
        mapped = over_clients(step, shared=2)
        fixed, moving = leaves(clients), [v.contiguous() for v in leaves(carry)]
        common, program = leaves(self._broadcast), None
        for k in numbers:
            number, batch = kind.new_tensor(float(k)), fetch(k, live)
            given = [*common, number, *fixed, *moving, *leaves(batch)]
            if program is None:
                shape = structure((self._broadcast, number, clients, carry, batch))
                key, compiled = self._key("step"), self.compiled
                program = self._programs.find(key, mapped, shape, given, compiled)
            moving = [v.contiguous() for v in program.run(given)]
        assert program is not None, "a stretch has at least one step"
        moved: Carry = rebuild(program.result, moving)
        return moved

    def _call(
        self, name: str, one: Callable[..., Tree], common: tuple[Tree, ...], own: tuple[Tree, ...]
    ) -> Tree:
        mapped = over_clients(one, shared=len(common))
        return self._programs.call(self._key(name), mapped, *common, *own)

    def _key(self, name: str) -> tuple[str, Any]:
        return name, self._programs.number(self._shared[0])


def over_clients(one: Callable[..., Tree], shared: int) -> Callable[..., Tree]:
    """Map a function over clients; its first so many arguments are the same for all.

    A single client is called plainly, which is faster.
    """

    def mapped(*trees: Tree) -> Tree:
        common, own = trees[:shared], trees[shared:]
        if len(leaves(own)[0]) > 1:
            return vmap(lambda *mine: one(*common, *mine))(*own)
        found = one(*common, *tree_map(lambda v: v[0], own))
        return tree_map(lambda v: v[None], found)

    return mapped


def few_widths(live: int, most: int) -> int:
    """Choose how many clients a compiled step takes, of whom `live` still train: code is made for
    every number, so those who have ended stay along, up to the next power of two.

    >>> [few_widths(n, most=7) for n in (1, 2, 3, 5, 7)]
    [1, 2, 4, 7, 7]
    """
    return int(min(most, 1 << (live - 1).bit_length()))


def stretches(steps: list[int]) -> Iterator[tuple[int, int, int]]:
    """Cut steps where clients leave: (first, last + 1, clients that take them).

    >>> list(stretches([5, 5, 2, 0]))
    [(0, 2, 3), (2, 5, 2)]
    """
    first = 0
    for live in range(len(steps), 0, -1):
        if steps[live - 1] > first:
            yield first, steps[live - 1], live
            first = steps[live - 1]
