"""The end of a round for a layer that remembers, by kernels.  See ending.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from undrift.kernels import interpreted
from undrift.kernels.ending import Ending, Size
from undrift.kernels.interpreter import mend
from undrift.kernels.linear import LinearProblem, rebuilds
from undrift.kernels.problem import power
from undrift.kernels.programs import closing as programs
from undrift.kernels.trials import relative, some_of
from undrift.kernels.tuner import Configuration, Launch, Trial, as_tuned, configuration, on_device

if interpreted():
    mend()

MOST = 2  # vectors of each client, and states
MOST_SHARED = 3
# Weights are made twice, from as many rows.  On an H200 that took 118 us instead of the 387 of
# writing and reading 80 million weights with 50 rows, but 618 instead of 620 with 500, and all
# other weights 130 more.
MOST_ROWS = 256


def takes(p: LinearProblem, size: Size) -> bool:
    """Whether the kernels do this."""
    few = max(size.own, size.states) <= MOST and size.shared <= MOST_SHARED
    return few and p.rows <= MOST_ROWS and rebuilds(p)


def close(p: LinearProblem, g: Tensor, x: Tensor, e: Ending, scale: float) -> Tensor:
    """Write states where weights have moved by scale * g^T x; gives [summed, E, C, tiles].

    g [E * C, R, out] and x [E * C, R, in] have two bytes a number.
    """
    with on_device(g):
        q = as_tuned(p)
        counts = (e.shared.shape[1], len(e.own), len(e.squares), len(e.states))
        name = f"the end of clients {' '.join(map(str, counts))}"
        config = configuration(
            name, q, g.device, _closing_candidates(), lambda: _closing_trial(q, g.device, e)
        )
        launch, parts = _closing(p, config, g, x, e, scale)
        launch.run()
        return parts


def add_up(p: LinearProblem, g: Tensor, x: Tensor, e: Ending, scale: float) -> None:
    """Write the sums over clients, likewise, two at a time."""
    with on_device(g):
        q = as_tuned(p)
        for at in range(0, len(e.sums), MOST):
            own = {t for needs in _needs(e, at) for t in needs if t > e.shared.shape[1]}
            name = f"sums of clients {e.shared.shape[1]} {len(own)} {len(_needs(e, at))}"
            trial = partial(_adding_trial, q, g.device, e, at)
            config = configuration(name, q, g.device, _adding_candidates(), trial)
            _adding(p, config, g, x, e, scale, at).run()


def _closing(
    p: LinearProblem, config: Configuration, g: Tensor, x: Tensor, e: Ending, scale: float
) -> tuple[Launch, Tensor]:
    pieces = e.taken.shape[0] * -(-e.taken.shape[1] // config["BC"])
    grid = (-(-p.inputs // config["BI"]), pieces, -(-p.outputs // config["BO"]))
    summed = len(e.squares)
    parts = torch.empty((summed, *e.taken.shape, grid[0] * grid[2]), device=g.device)
    own, states, before = ([v.flatten(0, 1) for v in w] for w in (e.own, e.states, e.before))
    vectors = [v for w in (own, states, before) for v in _two(w, g)]
    again = g if e.again is None else e.again
    values = summed + len(states)
    arguments = (
        g, x, e.shared, e.used, *vectors[:2], e.table.contiguous(), e.taken.contiguous(),
        *vectors[2:], parts, again, scale, p.rows, e.taken.shape[1], g.stride(0), x.stride(0),
        *e.shared.stride()[:2], *(v.stride(0) for v in vectors),
    )  # fmt: skip
    constants = dict(
        _constants(p, e, config), SUMMED=summed, STATES=len(states), AGAIN=e.again is not None,
        NEEDS=sum(_mask(needs) << (8 * j) for j, needs in enumerate(e.needs[:values])),
        SQUARES=sum(1 << j for j, square in enumerate(e.squares) if square),
    )  # fmt: skip
    return Launch(programs.close_clients, grid, arguments, constants), parts


def _adding(
    p: LinearProblem, config: Configuration, g: Tensor, x: Tensor, e: Ending, scale: float, at: int
) -> Launch:
    grid = (-(-p.inputs // config["BI"]), -(-p.outputs // config["BO"]), len(e.taken))
    own, needs = _two([v.flatten(0, 1) for v in e.own], g), _needs(e, at)
    totals = _two(e.sums[at : at + len(needs)], g)
    first = len(e.needs) - len(e.sums) + at
    arguments = (
        g, x, e.shared, *own, e.table[first : first + len(needs)].contiguous(),
        e.taken.contiguous(), *totals, scale, p.rows, e.taken.shape[1], g.stride(0), x.stride(0),
        *e.shared.stride()[:2], *(v.stride(0) for v in (*own, *totals)),
    )  # fmt: skip
    constants = dict(
        _constants(p, e, config), SUMS=len(needs), BC=power(e.taken.shape[1]),
        NEEDS=sum(_mask(one) << (8 * j) for j, one in enumerate(needs)),
    )  # fmt: skip
    return Launch(programs.add_clients, grid, arguments, constants)


def _constants(p: LinearProblem, e: Ending, config: Configuration) -> dict[str, Any]:
    rows = min(power(p.rows), 64)
    return dict(
        IN=p.inputs, OUT=p.outputs, SHARED=e.shared.shape[1], OWN=len(e.own), ONE=p.rows <= rows,
        BS=rows, **config,
    )  # fmt: skip


def _needs(e: Ending, at: int) -> Sequence[Sequence[int]]:
    """Tell which vectors a sum and the one behind it read."""
    first = len(e.needs) - len(e.sums)
    return e.needs[first:][at : at + MOST]


def _mask(needs: Sequence[int]) -> int:
    return sum(1 << t for t in needs)


def _two(vectors: Sequence[Tensor], none: Tensor) -> list[Tensor]:
    """Give two tensors to a kernel that looks at as many as there are."""
    return [*vectors, none, none][:MOST]


# ---------------------------------------------------------------------------------------- trials
def _closing_candidates() -> list[Configuration]:
    # (inputs and outputs of a tile, clients of a program, warps, stages)
    tiles = [(64, 64, 10, 4, 3), (64, 64, 5, 4, 3), (32, 64, 10, 4, 2), (64, 64, 2, 4, 2)]
    tiles += [(128, 64, 10, 8, 2), (32, 64, 25, 4, 2)]
    if interpreted():
        tiles = [(32, 32, 2, 4, 2)]
    return [dict(BI=i, BO=o, BC=c, num_warps=w, num_stages=s) for i, o, c, w, s in tiles]


def _adding_candidates() -> list[Configuration]:
    # (inputs and outputs of a tile, warps, stages)
    tiles = [(64, 64, 4, 3), (32, 64, 4, 3), (64, 32, 4, 3), (64, 64, 8, 3), (64, 64, 4, 4)]
    if interpreted():
        tiles = [(32, 32, 4, 2)]
    return [dict(BI=bi, BO=bo, num_warps=w, num_stages=s) for bi, bo, w, s in tiles]


def _random(p: LinearProblem, device: torch.device, like: Ending) -> tuple[Tensor, Tensor, Ending]:
    """Make random numbers, with as many vectors and values as `like` has."""
    source = torch.Generator(device).manual_seed(7)

    def some(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=source, device=device)

    weights, count = (p.outputs, p.inputs), p.clients
    states = [torch.empty((1, count, *weights), device=device) for _ in like.states]
    ending = like._replace(
        table=some(len(like.needs), 1, count, like.table.shape[-1]),
        shared=some(1, like.shared.shape[1], *weights),
        used=torch.ones(like.shared.shape[1], dtype=torch.bool, device=device),
        own=[some(1, count, *weights) for _ in like.own],
        taken=torch.ones((1, count), dtype=torch.bool, device=device),
        states=states, before=states,
        sums=[torch.empty((1, *weights), device=device, dtype=torch.float64) for _ in like.sums],
        again=None,
    )  # fmt: skip
    operands = (some(count, p.rows, n).to(p.operand) for n in weights)
    return (*operands, ending)  # type: ignore[return-value]


def _one(g: Tensor, x: Tensor, e: Ending, c: int) -> tuple[Ending, Tensor]:
    """Give one client's part in float64, and how its weights have moved.

    In float64 all of them take more room than there may be.
    """
    moved = 0.5 * (g[c].double().T @ x[c].double())[None, None]
    return e._replace(
        table=e.table[:, :, c : c + 1].double(), taken=e.taken[:, :1],
        shared=e.shared.double(), own=[v[:, c : c + 1].double() for v in e.own],
        states=[torch.empty_like(moved) for _ in e.states], before=[moved for _ in e.states],
        sums=[torch.empty_like(v) for v in e.sums],
    ), moved  # fmt: skip


def _closing_trial(p: LinearProblem, device: torch.device, like: Ending) -> Trial:
    g, x, e = _random(p, device, like)
    by_weight: list[Tensor] = []  # of the last launch

    def launches(config: Configuration) -> list[Launch]:
        launch, parts = _closing(p, config, g, x, e, 0.5)
        by_weight[:] = [parts.fill_(torch.nan)]
        return [launch]

    def error() -> float:
        if not all(bool(v.sum().isfinite()) for v in (*e.states, *by_weight)):
            return float("inf")
        worst = []
        for c in some_of(p.clients):
            one, moved = _one(g, x, e, c)
            added = one.close(moved)[:, 0, 0, 0]
            pairs = zip(e.states, one.states, strict=True)
            worst += [relative(found[:, c], wanted[:, 0]) for found, wanted in pairs]
            away = (by_weight[0][:, 0, c].sum(-1) - added).abs() / (1 + added.abs())
            worst += away.tolist()
        return max(worst)

    return Trial(_closing_candidates(), launches, e.states, error, p.precision)


def _adding_trial(p: LinearProblem, device: torch.device, like: Ending, at: int) -> Trial:
    g, x, e = _random(p, device, like._replace(states=[]))
    outputs, wanted = e.sums[at : at + MOST], list[Tensor]()

    def error() -> float:
        if not wanted:
            wanted.extend(torch.zeros_like(v) for v in outputs)
            for c in range(p.clients):
                one, moved = _one(g, x, e, c)
                one.add_up(moved)
                for total, value in zip(wanted, one.sums[at:], strict=False):
                    total += value
        return max(map(relative, outputs, wanted))

    return Trial(
        _adding_candidates(), lambda config: [_adding(p, config, g, x, e, 0.5, at)], outputs, error,
        p.precision,
    )  # fmt: skip
