"""The end of a round for a layer that remembers, by kernels.  See ending.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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

MOST = 2  # vectors of each client, states, and sums of one launch
ALL = 128  # clients of a program at most: it adds them up in float32
MOST_SHARED = 3
# Weights are made from as many rows.  On an H200 that took 346 us with 500 of them for 61 million
# weights, where writing and reading took about 500; with 50, 109 instead of 387 for 80 million.
MOST_ROWS = 600


def takes(p: LinearProblem, size: Size) -> bool:
    """Whether the kernels do this."""
    few = max(size.own, size.states) <= MOST and size.shared <= MOST_SHARED
    return few and p.rows <= MOST_ROWS and rebuilds(p)


def close(p: LinearProblem, g: Tensor, x: Tensor, e: Ending, scale: float) -> Tensor:
    """Write states and sums where weights have moved by scale * g^T x.

    Gives what is added up over each client's weights, [summed, E, C, 1].  g [E * C, R, out] and
    x [E * C, R, in] have two bytes a number.
    """
    with on_device(g):
        added = _close(p, g, x, e, scale, 0)
        added = added[..., :1] if e.again is not None else add_up(added)
        for at in range(MOST, len(e.sums), MOST):
            _close(p, g, x, e._replace(squares=(), states=[], before=[]), scale, at)
        return added


def add_up(parts: Tensor) -> Tensor:
    """Add up the last axis, [..., parts] to [..., 1], in float32."""
    total = torch.empty((*parts.shape[:-1], 1), dtype=parts.dtype, device=parts.device)
    if total.numel():
        arguments = (parts, total, parts.shape[-1])
        constants = dict(BLOCK=16384, num_warps=16)
        Launch(programs.add_parts, (total.numel(),), arguments, constants).run()
    return total


def _close(p: LinearProblem, g: Tensor, x: Tensor, e: Ending, scale: float, at: int) -> Tensor:
    """Do so with two of the sums, from number `at` on."""
    q = as_tuned(p)
    counts = (len(e.shared), len(e.own), len(e.squares), len(e.states), len(sums_from(e, at)))
    name = f"the end of clients {' '.join(map(str, counts))}"
    config = configuration(name, q, g.device, _candidates(), lambda: _trial(q, g.device, e, at))
    launches, added = _launches(p, config, g, x, e, scale, at)
    for launch in launches:
        launch.run()
    return added


def _launches(
    p: LinearProblem, config: Configuration, g: Tensor, x: Tensor, e: Ending, scale: float, at: int
) -> tuple[list[Launch], Tensor]:
    experiments, each = e.taken.shape
    if config.get("DIRECT") and not _lies_in_pairs(p, config, e):
        config = PLAIN
    pieces = -(-each // config["BC"])
    grid = (-(-p.outputs // config["BO"]), experiments * pieces, -(-p.inputs // config["BI"]))
    rows = grid[0] * grid[2] * config["BO"] // programs.ROWS_OF_WARP.value
    added = torch.empty((len(e.squares), *e.taken.shape, rows), device=g.device)
    vectors = [v for w in _theirs(e) for v in filled(w, g)]
    common = filled(e.shared, g, MOST_SHARED)
    wanted = totals = sums_from(e, at)
    piece = 0
    if pieces > 1:
        room = (len(wanted), experiments, pieces, p.outputs, p.inputs)
        totals = list(torch.empty(room, dtype=torch.float64, device=g.device))
        piece = p.outputs * p.inputs
    both, again = filled(totals, g), g if e.again is None else e.again
    arguments = (
        g, x, *common, e.used, *vectors[:2], e.table.contiguous(), e.taken.contiguous(),
        *vectors[2:], *both, added, again, scale, p.rows, each, g.stride(0), x.stride(0),
        *(v.stride(0) for v in (*common, *vectors, *both)), piece,
    )  # fmt: skip
    constants = dict(
        _constants(p, e, config), SUMMED=len(e.squares), STATES=len(e.states), SUMS=len(wanted),
        AGAIN=e.again is not None, **packed(e, at),
    )  # fmt: skip
    made = [Launch(programs.close_clients, grid, arguments, constants)]
    if pieces > 1:
        made += [_adding(a, b, e.again) for a, b in zip(totals, wanted, strict=True)]
    return made, added


def _lies_in_pairs(p: LinearProblem, config: Configuration, e: Ending) -> bool:
    """Whether tiles are whole, and every two numbers of a row lie at a multiple of 8 bytes."""
    whole = p.inputs % config["BI"] == 0 and p.outputs % config["BO"] == 0
    vectors = list(e.shared)
    if e.placed is None:
        vectors += [v.flatten(0, 1) for v in (*e.own, *e.states)]
    elif not e.placed.aligned or e.placed.column % 2:
        return False
    return whole and all(v.data_ptr() % 8 == 0 and v.stride(0) % 2 == 0 for v in vectors)


def packed(e: Ending, at: int) -> dict[str, int]:
    """Give a kernel what values read, the sums from number `at` on among them, and which square."""
    values, first = len(e.squares) + len(e.states), len(e.needs) - len(e.sums) + at
    needs = (*e.needs[:values], *e.needs[first : first + len(sums_from(e, at))])
    return dict(
        FIRST=first,
        NEEDS=sum(_mask(one) << (8 * j) for j, one in enumerate(needs)),
        SQUARES=sum(1 << j for j, square in enumerate(e.squares) if square),
    )


def _theirs(e: Ending) -> list[list[Tensor]]:
    """Give clients' own vectors, states and those before, or tables of where they lie."""
    if e.placed is not None:
        return [list(v) for v in (e.placed.own, e.placed.states, e.placed.before)]
    return [[v.flatten(0, 1) for v in w] for w in (e.own, e.states, e.before)]


def _adding(parts: Tensor, total: Tensor, again: Tensor | None) -> Launch:
    """Add up the pieces of a sum, parts [E, pieces, out, in]."""
    size, block = parts[0, 0].numel(), 1024
    arguments = (
        parts, total, parts if again is None else again, parts.shape[1], parts.stride(1),
        parts.stride(0), total.stride(0),
    )  # fmt: skip
    constants = dict(SIZE=size, AGAIN=again is not None, BLOCK=block, num_warps=4)
    return Launch(programs.add_pieces, (-(-size // block), len(parts)), arguments, constants)


def _constants(p: LinearProblem, e: Ending, config: Configuration) -> dict[str, Any]:
    rows = min(power(p.rows), 64)
    return dict(
        IN=p.inputs, OUT=p.outputs, SHARED=len(e.shared), OWN=len(e.own), ONE=p.rows <= rows,
        BS=rows, PLACED=e.placed is not None, ALIGNED=e.placed is not None and e.placed.aligned,
        COLUMN=0 if e.placed is None else e.placed.column, **{"DIRECT": False, **config},
    )  # fmt: skip


def sums_from(e: Ending, at: int) -> Sequence[Tensor]:
    """Give a sum and the one behind it."""
    return e.sums[at : at + MOST]


def _mask(needs: Sequence[int]) -> int:
    return sum(1 << t for t in needs)


def filled(vectors: Sequence[Tensor], none: Tensor, most: int = MOST) -> list[Tensor]:
    """Give so many tensors to a kernel that looks at as many as there are."""
    return [*vectors, *[none] * most][:most]


# ---------------------------------------------------------------------------------------- trials
PLAIN = dict(BI=32, BO=64, BC=ALL, num_warps=4, num_stages=3)
# Two programs of most registers are on a processor at once; with less of them, three.
DIRECT = dict(PLAIN, DIRECT=True, maxnreg=168)


def _candidates() -> list[Configuration]:
    # (inputs and outputs of a tile, clients of a program, warps, stages)
    tiles = [(64, 64, ALL, 4, 3), (64, 64, ALL, 4, 2), (32, 64, ALL, 4, 3), (64, 32, ALL, 4, 3)]
    tiles += [(64, 64, ALL, 8, 3), (128, 64, ALL, 8, 2), (64, 64, 25, 4, 3), (64, 64, 10, 4, 3)]
    tiles += [(128, 64, 25, 8, 2), (128, 64, 10, 8, 3), (32, 64, 25, 4, 3), (64, 64, ALL, 4, 4)]
    if interpreted():  # which knows no assembler
        tiles = [(32, 32, 2, 4, 2), (32, 32, ALL, 4, 2)]
    found = [dict(BI=i, BO=o, BC=c, num_warps=w, num_stages=s) for i, o, c, w, s in tiles]
    direct = [DIRECT, dict(DIRECT, BC=25)]
    return found if interpreted() else [*found, *direct]


def _random(p: LinearProblem, device: torch.device, like: Ending) -> tuple[Tensor, Tensor, Ending]:
    """Make random numbers, with as many vectors and values as `like` has."""
    source = torch.Generator(device).manual_seed(7)

    def some(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=source, device=device)

    weights, count = (p.outputs, p.inputs), p.clients
    states = [torch.empty((1, count, *weights), device=device) for _ in like.states]
    ending = like._replace(
        table=some(len(like.needs), 1, count, like.table.shape[-1]),
        shared=[some(1, *weights) for _ in like.shared],
        used=torch.ones(len(like.shared), dtype=torch.bool, device=device),
        own=[some(1, count, *weights) for _ in like.own],
        taken=torch.ones((1, count), dtype=torch.bool, device=device),
        states=states, before=states,
        sums=[torch.empty((1, *weights), device=device, dtype=torch.float64) for _ in like.sums],
        again=None, placed=None,
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
        shared=[v.double() for v in e.shared], own=[v[:, c : c + 1].double() for v in e.own],
        states=[torch.empty_like(moved) for _ in e.states], before=[moved for _ in e.states],
        sums=[torch.empty_like(v) for v in e.sums],
    ), moved  # fmt: skip


def _totals(p: LinearProblem, g: Tensor, x: Tensor, e: Ending, at: int) -> list[Tensor]:
    """Add up over clients, one after the other."""
    wanted = [torch.zeros_like(v) for v in sums_from(e, at)]
    for c in range(p.clients):
        one, moved = _one(g, x, e._replace(states=[], before=[], squares=()), c)
        one.close(moved)
        for total, value in zip(wanted, one.sums[at:], strict=False):
            total += value
    return wanted


def _trial(p: LinearProblem, device: torch.device, like: Ending, at: int) -> Trial:
    g, x, e = _random(p, device, like)
    last, sums = list[Tensor](), sums_from(e, at)
    totals = cache(lambda: _totals(p, g, x, e, at))

    def launches(config: Configuration) -> list[Launch]:
        made, added = _launches(p, config, g, x, e, 0.5, at)
        last[:] = [added.fill_(torch.nan)]
        return made

    def error() -> float:
        if not all(bool(v.sum().isfinite()) for v in (*e.states, *last, *sums)):
            return float("inf")
        worst = list(map(relative, sums, totals()))
        for c in some_of(p.clients):
            one, moved = _one(g, x, e, c)
            added = one.close(moved)[:, 0, 0, 0]
            pairs = zip(e.states, one.states, strict=True)
            worst += [relative(found[:, c], wanted[:, 0]) for found, wanted in pairs]
            away = (last[0][:, 0, c].sum(-1) - added).abs() / (1 + added.abs())
            worst += away.tolist()
        return max(worst)

    return Trial(_candidates(), launches, [*e.states, *sums], error, p.precision)
