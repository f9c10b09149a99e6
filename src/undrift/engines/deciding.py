"""Which rules of a round are linear, found out once: their layers step by themselves or remember.

Under plain SGD it is known beforehand.  Under other rules there must be something to look at: the
first round, once everybody has a seat, and before anybody takes a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from undrift.core.algorithm import Algorithm
from undrift.core.histories import Histories
from undrift.core.history import PLAIN, Extent, Vectors
from undrift.core.local import Sgd
from undrift.core.round import Found
from undrift.core.task import Task
from undrift.core.tree import Tree, tree_map
from undrift.engines.graphs import aligned, own
from undrift.engines.group import Group, split
from undrift.engines.linear_chain import LinearChain, Step
from undrift.engines.linear_end import LinearEnd
from undrift.engines.plain import is_plain, is_sequence
from undrift.engines.reading import Read
from undrift.engines.stepping import Seat, Stepping

STEPS_INSIDE = {"cuda"}  # where layers take the steps of any linear chain while going back


class Deciding:
    """Makes the steps of some groups, and decides how they are taken."""

    def __init__(
        self,
        task: Task,
        algos: Sequence[Algorithm],
        groups: Sequence[Group],
        extent: Extent,
        device: torch.device,
        *,
        lanes: bool,
        in_place: bool,
    ) -> None:
        self.task, self.extent, self.device = task, extent, device
        self._local, self._lanes, self._alone = algos[0].local, lanes, len(groups) == 1
        one = self._alone and groups[0].numbers is None
        plain = in_place and one and is_plain(algos[0]) and is_sequence(task.module)
        self.stepping = Stepping(task, device, plain, self._histories() if plain else None)
        remembers = self.stepping.histories is not None
        self.pending = remembers or (in_place and self._may_be_linear())

    def _histories(self, vectors: Vectors = PLAIN) -> Histories | None:
        """Let wide layers remember their steps where that moves less memory."""
        if self._lanes:
            return None  # there clients end at different times
        assert isinstance(self._local, Sgd), "asked for before"
        return Histories.for_task(self.task, self._local, self.extent, self.device, vectors)

    def _may_be_linear(self) -> bool:
        """Whether it is worth a look: finding out takes a second."""
        if not is_sequence(self.task.module) or self.task.seam is None:
            return False
        alone = self._alone and not self._lanes
        return self._may_step_inside or (alone and Histories.could_pay(self.task, self.extent))

    @property
    def _may_step_inside(self) -> bool:
        """Whether layers could take the steps of rules while going back."""
        return self.device.type in STEPS_INSIDE and not self.stepping.in_place

    def room(self, tree: Tree) -> Tree:
        """Copy clients' trees [..., C, ...] to where they will stay.

        If kernels may move or close them, vectors begin where they load best: it is not known yet,
        but almost.  Elsewhere the compiler loads best what has no gaps.
        """
        if not self.pending:
            return tree_map(own, tree)
        size = self.task.size
        return tree_map(lambda v: aligned(v) if v.shape[-1:] == (size,) else own(v), tree)

    def decide(
        self, groups: Sequence[Group], seats: Sequence[Seat], read: Read
    ) -> LinearEnd | None:
        """Find out what can be; gives the end of a round where layers remember, if it is linear."""
        self.pending = False
        steps, stepping = self._examples(seats, read), self.stepping
        if stepping.histories is None:
            self._find_chains(groups, steps)
        if stepping.histories is None and self._alone and stepping.chains:
            self._remember(stepping.chains[0], steps[0])
        if stepping.histories is None:
            return None
        return LinearEnd.find(groups[0], steps[0], stepping.chains.get(0), stepping.histories)

    def _examples(self, seats: Sequence[Seat], read: Read) -> list[Step]:
        """Give a step of every group, to be looked at."""
        made = []
        for seat, part in zip(seats, split([len(s.carry.w) for s in seats]), strict=True):
            mine: Any = tree_map(lambda v, part=part: v[part], read)
            nothing = torch.zeros_like(seat.carry.loss)
            scores = dict.fromkeys(self.task.metrics, nothing)
            found = Found(seat.carry.w, {}, nothing, scores, seat.carry.buffers)
            made.append(Step(*seat, *mine, found))  # type: ignore[call-arg]
        return made

    def _find_chains(self, groups: Sequence[Group], steps: Sequence[Step]) -> None:
        """Look at the rules of groups."""
        for g, (group, step) in enumerate(zip(groups, steps, strict=True)):
            chain = LinearChain.find(group, step, self.task.size)
            # others may still remember, where that is possible at all
            if chain is not None and (chain.fits or (self._alone and not self._lanes)):
                self.stepping.chains[g] = chain

    def _remember(self, chain: LinearChain, step: Step) -> None:
        """Let wide layers remember their steps where that pays, or forget a chain of no use."""
        inside = chain.fits and self._may_step_inside
        vectors = chain.vectors._replace(in_place=self.stepping.in_place, inside=inside)
        if not self._lanes and chain.may_remember(step):
            self.stepping.histories = self._histories(vectors)
        if self.stepping.histories is not None:
            chain.remember(self.stepping.histories)
        elif not inside:
            self.stepping.chains.clear()
