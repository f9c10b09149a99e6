"""A step of a chain of rules, taken where a linear layer makes its gradient.  See settling.py."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.kernels import interpreted
from undrift.kernels.linear import LinearProblem, constants_of, half_of, random_of, wanted_of
from undrift.kernels.programs import linear as programs
from undrift.kernels.settling import ChainStep
from undrift.kernels.settling import arguments as of_step
from undrift.kernels.trials import largest, relative
from undrift.kernels.tuner import Configuration, Launch, Trial, as_tuned, configuration


def run(
    p: LinearProblem, g: Tensor, x: Tensor, w: Tensor, b: Tensor | None, step: ChainStep,
    rectify: bool,
) -> None:  # fmt: skip
    """Move w and b, and what else moves with them, by the gradients g^T x."""
    _launch(p, _config(p, g.device, step), g, x, w, b, step, rectify).run()


def _launch(
    p: LinearProblem, config: Configuration, g: Tensor, x: Tensor, w: Tensor, b: Tensor | None,
    step: ChainStep, rectify: bool = False,
) -> Launch:  # fmt: skip
    half, bias = p.precision == "tf32", w if b is None else b
    strides = (x.stride(0), x.stride(1), w.stride(0), bias.stride(0))
    memory, numbers, flags = of_step(step, w)
    arguments = (g, x, w, bias, *memory, largest(g) if half else g, p.rows, *strides, *numbers)
    constants = dict(
        constants_of(p, half_of(p), config), BIAS=b is not None, HALF=half, RECTIFY=rectify, **flags
    )
    grid = (-(-p.inputs // config["BI"]), p.clients, -(-p.outputs // config["BO"]))
    return Launch(programs.linear_step, grid, arguments, constants)


def _config(p: LinearProblem, device: torch.device, step: ChainStep) -> Configuration:
    counts, p = (1 + len(step.more), len(step.shared), len(step.own)), as_tuned(p)
    name = f"linear chain {' '.join(map(str, counts))}"
    options = _candidates(p)
    return configuration(name, p, device, options, lambda: _trial(p, device, counts))


def _candidates(p: LinearProblem) -> list[Configuration]:
    # (inputs and outputs of a tile, warps)
    tiles = [(64, 32, 4), (64, 64, 4), (64, 64, 8), (128, 32, 4), (128, 32, 8), (128, 64, 8)]
    tiles += [(128, 16, 4), (32, 64, 4), (256, 16, 4), (256, 16, 8)]
    if p.precision == "float32":
        tiles = [(64, 32, 4), (32, 32, 4)]
    if interpreted():
        tiles = [(32, 32, 4)]
    return [dict(BI=bi, BO=bo, num_warps=w, num_stages=1) for bi, bo, w in tiles]


def _trial(p: LinearProblem, device: torch.device, counts: tuple[int, int, int]) -> Trial:
    x, w, b, g = random_of(p, device)
    first = torch.cat([w.flatten(1), b], 1)
    carried, shared, own = counts
    source = torch.Generator(device).manual_seed(8)

    def some(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=source, device=device)

    whole = [some(*first.shape) for _ in range(carried - 1)]
    moved, more = torch.empty_like(first), [torch.empty_like(v) for v in whole]
    size = first.shape[1]
    given, mine = (
        [some(rows, size) for _ in range(count)] for rows, count in ((1, shared), (p.clients, own))
    )
    number = carried + 1 + shared + own
    table, live = some(carried, p.clients, number), torch.ones(p.clients, device=device)
    needs = tuple(tuple(range(number)) for _ in range(carried))
    step = ChainStep(more, given, mine, table, live.bool(), needs, 0.5, w[0].numel())
    weights, bias = moved[:, : step.behind].view_as(w), moved[:, step.behind :]

    def launches(config: Configuration) -> list[Launch]:
        return [_launch(p, config, g, x, weights, bias, step)]

    def error() -> float:
        _, by_weight, by_bias = wanted_of(p, g, x, w)
        gradient = 0.5 * torch.cat([by_weight.flatten(1), by_bias], 1)
        read = torch.stack([v.expand_as(first) for v in (first, *whole, gradient, *given, *mine)])
        wanted = torch.einsum("icj,jcp->icp", table.double(), read.double()).unbind()
        if not all(bool(v.isfinite().all()) for v in (moved, *more)):
            return float("inf")
        return max(map(relative, (moved, *more), wanted))

    def prepare() -> None:
        moved.copy_(first)
        for old, new in zip(more, whole, strict=True):
            old.copy_(new)

    outputs = (moved, *more)
    return Trial(_candidates(p), launches, outputs, error, p.precision, prepare)
