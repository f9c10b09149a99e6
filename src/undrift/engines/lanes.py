"""Clients of unequal length on a fixed number of lanes.

Padding everybody to the longest client wastes most of a device when sizes are skewed.  Here a lane
trains one client after the other: those with most steps first, each on the lane that is free first,
so that all lanes end at about the same time and every step has the same width.

The host knows how many steps each client takes, and so the whole timetable; between two steps it
copies those who are done back to their place and the next ones in.  A lane holds a copy of all that
its client's steps read.

Letters: M lanes, C clients of a cohort, T steps of the whole round.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from undrift.core.random import fold, permutation
from undrift.core.transfer import send
from undrift.core.tree import Tree, leaves, tree_map
from undrift.engines.copies import Copies, Pair, Row, row_of
from undrift.engines.examples import Examples
from undrift.engines.graphs import Buffers, aligned
from undrift.engines.group import Group, split
from undrift.engines.reading import Read
from undrift.engines.stepping import Seat, Stepping

# What a device does in the time that a step takes however few train: weights times examples.
# (A CNN of 800,000 weights on one H200: 10 clients of batch 50 take 0.47 ms a step, 100 take 2.2.)
IDLE = {"cuda": 640e6, "cpu": 0.0}
WORTH = 0.8  # lanes are taken where they need less than this part of the time
TRIES = 8  # rounds on which numbers of lanes are tried
PARTS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)  # of those that would end with the longest client
NOBODY = 2**31  # a step that nobody takes


class Stay(NamedTuple):
    """One client on its lane."""

    client: int
    lane: int
    start: int
    steps: int


def timetable(steps: Sequence[int], lanes: int) -> list[Stay]:
    """Give every client a lane: those with most steps first, each where it can begin first."""
    free = [(0, lane) for lane in range(lanes)]
    stays = []
    for client in sorted(range(len(steps)), key=lambda c: -steps[c]):
        if not steps[client]:
            continue
        start, lane = free[0]
        stays.append(Stay(client, lane, start, steps[client]))
        heapq.heapreplace(free, (start + steps[client], lane))
    return stays


def length(stays: Sequence[Stay]) -> int:
    """Tell how many steps a timetable takes."""
    return max((stay.start + stay.steps for stay in stays), default=0)


def cohorts(steps: Sequence[int], count: int) -> list[list[int]]:
    """Draw some cohorts that stand for all."""
    keys = fold(0, "lanes", torch.arange(TRIES))
    drawn = permutation(keys, torch.full((TRIES,), len(steps)), len(steps))[:, :count]
    return [[steps[i] for i in who] for who in drawn.tolist()]


def lanes_for(tries: Sequence[Sequence[Sequence[int]]], idle: float) -> list[int] | None:
    """Choose how many lanes each crew of clients gets; None where padding is as good.

    `tries` are rounds, each the steps of its clients crew by crew; `idle` is what a step costs by
    itself, in clients.
    """
    longest = max((k for crews in tries for steps in crews for k in steps), default=0)
    if not longest:
        return None
    everybody = sum(len(steps) for steps in tries[0])
    padded = sum(max(map(max, crews)) for crews in tries) * (idle + everybody)

    def cost(widths: list[int]) -> float:
        taken = (max(map(_taken, crews, widths)) for crews in tries)
        return sum(taken) * (idle + sum(widths))

    usual = [sum(map(sum, by_try)) / len(tries) / longest for by_try in zip(*tries, strict=True)]
    choices = [[max(1, math.ceil(part * mean)) for mean in usual] for part in PARTS]
    best = min(choices, key=cost)
    return best if cost(best) < WORTH * padded else None


def _taken(steps: Sequence[int], lanes: int) -> int:
    return length(timetable(steps, lanes))


class Lanes:
    """The lanes of all crews, side by side."""

    def __init__(self, groups: Sequence[Group], widths: list[int]) -> None:
        self.widths, self.size = widths, sum(widths)
        self.groups = [g.spread(width) for g, width in zip(groups, widths, strict=True)]
        self.seats: list[Seat] = []
        self._rows: list[tuple[_Rows, _Rows]] = []  # of the cohort, of the lanes

    def take_places(self, cohorts: Sequence[Seat], room: Callable[[Tree], Tree]) -> None:
        """Make the seats, the first time; buffers of cohorts and seats keep their place.

        `room` copies trees to where they will stay.
        """
        if self.seats:
            return
        for cohort, lanes in zip(cohorts, self.widths, strict=True):
            wide = tree_map(lambda v, n=lanes: v.expand(n, *v.shape[1:]), _one(cohort))
            self.seats.append(room(wide))
        parts = [(seat.carry.w, seat.carry.buffers) for seat in self.seats]
        w, own = tree_map(lambda *v: torch.cat(v), *parts)
        self.models = aligned(w), own
        for g, part in enumerate(split(self.widths)):
            w, own = tree_map(lambda v, part=part: v[part], self.models)
            seat = self.seats[g]
            self.seats[g] = seat._replace(carry=seat.carry._replace(w=w, buffers=own))
        self._rows = [(_Rows(a), _Rows(b)) for a, b in zip(cohorts, self.seats, strict=True)]
        self.now = torch.zeros((3, self.size), dtype=torch.int64, device=w.device)

    def run(self, steps: list[list[list[int]]], step: Callable[[], None]) -> None:
        """Train everybody: `steps` by crew, experiment and client."""
        rooms = [rows.clients for rows, _ in self._rows]
        plans = [
            # cohorts lie in rooms of one size, which the smaller do not fill
            timetable([k for own in crew for k in (*own, *[0] * (room - len(own)))], lanes)
            for crew, room, lanes in zip(steps, rooms, self.widths, strict=True)
        ]
        total = max(length(stays) for stays in plans)
        table = send(self._table(plans, total), self.now.device)
        moves = [_moves(stays) for stays in plans]
        times = [[by_time.get(t, ((), ())) for by_time in moves] for t in range(total + 1)]
        exchanges = Copies([pairs for now in times for pairs in self._exchange(now)], table.device)
        for t in range(total + 1):
            exchanges.make(2 * t)
            exchanges.make(2 * t + 1)
            if t < total:
                self.now.copy_(table[t])
                step()

    def _exchange(
        self, moves: Sequence[tuple[Sequence[Stay], Sequence[Stay]]]
    ) -> tuple[list[Pair], list[Pair]]:
        """Pair those who are done with their places, and the next ones with theirs."""
        by_crew = list(zip(self._rows, moves, strict=True))
        back = [(c[s.client][0], m[s.lane][0]) for (c, m), (left, _) in by_crew for s in left]
        into = [(m[s.lane][1], c[s.client][1]) for (c, m), (_, come) in by_crew for s in come]
        return back, into

    def _table(self, plans: list[list[Stay]], total: int) -> Tensor:
        """Say for every step and lane who trains, on which batch, as which step: [T, 3, M].

        Where nobody does, the first client's first batch is looked up.
        """
        made = np.zeros((total, 3, self.size), dtype=np.int64)
        made[:, 2] = NOBODY
        places = split([rows.count for rows, _ in self._rows])
        for stays, lanes, clients in zip(plans, split(self.widths), places, strict=True):
            for stay in stays:
                own = made[stay.start : stay.start + stay.steps, :, lanes.start + stay.lane]
                own[:, 0] = clients.start + stay.client
                own[:, 1:] = np.arange(stay.steps)[:, None]
        return torch.from_numpy(made)

    def step(self, stepping: Stepping, data: Examples, buffers: Buffers) -> None:
        """Let every lane take the step that `now` says."""
        read = self.read(data, buffers, stepping.task.dtype)
        stepping.take(self.groups, self.seats, self.models, *read)

    def read(self, data: Examples, buffers: Buffers, dtype: torch.dtype) -> Read:
        """Give what the step reads that `now` says."""
        who, at, k = self.now
        place = who * buffers["keys"].shape[2] + at
        order, rows, keys = (
            buffers[name].flatten(0, 2).index_select(0, place)[:, None]
            for name in ("order", "rows", "keys")
        )
        return data.batch(rows, order), keys, k.to(dtype)


class _Rows:
    """The clients of a seat, tensor by tensor; kept, for the memory keeps its place."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        experiments, self.clients = seat.carry.w.shape[:2]
        self.count = experiments * self.clients
        self._kept: dict[int, tuple[Row, Row]] = {}

    def __getitem__(self, place: int) -> tuple[Row, Row]:
        """Give what moves, and everything."""
        if place not in self._kept:
            a, b = divmod(place, self.clients)
            moving = [v[a, b] for v in leaves(self.seat.carry)]
            rest = [v[a] for v in leaves((self.seat.numbers, self.seat.broadcast))]
            rest += [v[a, b] for v in leaves(self.seat.clients)]
            self._kept[place] = row_of(moving), row_of(moving + rest)
        return self._kept[place]


def _moves(stays: Sequence[Stay]) -> dict[int, tuple[list[Stay], list[Stay]]]:
    """List who leaves and who comes, by the step before which they do."""
    found: dict[int, tuple[list[Stay], list[Stay]]] = {}
    for stay in stays:
        found.setdefault(stay.start, ([], []))[1].append(stay)
        found.setdefault(stay.start + stay.steps, ([], []))[0].append(stay)
    return found


def _one(cohort: Seat) -> Seat:
    """Take the first client of the first experiment, with the axes of a lane: [1, 1, ...]."""
    shared, own = (cohort.numbers, cohort.broadcast), (cohort.clients, cohort.carry)
    return Seat(*tree_map(lambda v: v[:1], shared), *tree_map(lambda v: v[:1, :1], own))
