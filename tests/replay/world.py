"""A small problem, and how to compare a replay with a loop in plain torch, round by round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import undrift as fl
from undrift.replay import letters, replay

SIZES = (5, 8, 6, 7)
N = len(SIZES)
MEAN = sum(SIZES) / N
SOME = [[2, 0], [3, 1, 2], [1], [0, 1, 3]]  # in the order in which that code serves them
ALL = [[0, 1, 2, 3]] * 4
LR, FALL, DECAY, CLIP = 0.2, 0.9, 0.02, 0.4
SGD = fl.sgd(LR, lr_decay=FALL, weight_decay=DECAY)
CLIPPED = fl.sgd(LR, lr_decay=FALL, weight_decay=DECAY, clip=CLIP)
HEAVY = fl.sgd(LR, 0.8, lr_decay=FALL, weight_decay=DECAY)
Batches = dict[tuple[int, int], list[list[int]]]


class Told(NamedTuple):
    """What a loop tells after a round; letters and own states in the papers' letters."""

    server: Tensor
    clients: dict[int, Tensor]
    average: Tensor
    letters: Mapping[str, Tensor] = MappingProxyType({})
    own: Mapping[int, dict[str, Tensor]] = MappingProxyType({})
    everybody: Tensor | None = None


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 4, generator=draw).double() + 0.3 * i, torch.arange(n) * (i + 1) % 3)
        for i, n in enumerate(SIZES)
    ]


DATA = data()


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(cohorts: Sequence[Sequence[int]], steps: Callable[[int], int] | None = None) -> Batches:
    """Unequal numbers of steps and unequal batches, unless told otherwise."""
    count = (lambda i: 2 + i % 3) if steps is None else steps
    return {
        (r, i): [[(r + 2 * k + j) % SIZES[i] for j in range(3 + k % 2)] for k in range(count(i))]
        for r, ids in enumerate(cohorts)
        for i in ids
    }


def vec(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach().clone()


def model_at(x: Tensor) -> nn.Module:
    made = net()
    vector_to_parameters(x.clone(), made.parameters())
    return made


def flat(model: nn.Module) -> Tensor:
    """The parameters as one vector that gradients flow through, as that code concatenates them."""
    return torch.cat([p.reshape(-1) for p in model.parameters()])


def loss_of(model: nn.Module, client: int, batch: Any = slice(None)) -> Tensor:
    inputs, labels = DATA[client]
    return F.cross_entropy(model(inputs[batch]), labels[batch])


def full_gradient(x: Tensor, client: int, decay: float = DECAY) -> Tensor:
    model = model_at(x)
    grads = torch.autograd.grad(loss_of(model, client), list(model.parameters()))
    return torch.cat([g.reshape(-1) for g in grads]) + decay * x


def add_to_grads(model: nn.Module, extra: Tensor) -> None:
    at = 0
    for p in model.parameters():
        p.grad += extra[at : at + p.numel()].view_as(p)
        at += p.numel()


def train(
    model: nn.Module,
    client: int,
    order: Iterable[list[int]],
    optimizer: torch.optim.Optimizer,
    *,
    more: Callable[[nn.Module], Tensor] | None = None,
    change: Callable[[nn.Module], None] | None = None,
    after: Callable[[nn.Module], None] | None = None,
    clip: float | None = None,
) -> int:
    """The local loop of all that code; tells how often clipping acted.

    `more` is added to the loss, `change` touches gradients after backward, `after` the model
    after the optimizer's step.
    """
    acted = 0
    for batch in order:
        optimizer.zero_grad()
        loss = loss_of(model, client, batch)
        (loss if more is None else loss + more(model)).backward()
        if change is not None:
            change(model)
        if clip is not None:
            acted += int(clip_grad_norm_(model.parameters(), max_norm=clip) > clip)
        optimizer.step()
        if after is not None:
            after(model)
    return acted


def torch_sgd(model: nn.Module, r: int, momentum: float = 0.0, **more: Any) -> torch.optim.SGD:
    """A new optimizer for every client and round, with the round's learning rate."""
    settings = {"weight_decay": DECAY, **more}
    return torch.optim.SGD(model.parameters(), lr=LR * FALL**r, momentum=momentum, **settings)


def mean_of(models: dict[int, Tensor], by_size: bool) -> Tensor:
    weights = {i: float(SIZES[i]) if by_size else 1.0 for i in models}
    return sum(weights[i] * y for i, y in models.items()) / sum(weights.values())


def heavy_length(steps: int, rho: float) -> float:
    """||a||_1 of heavy ball, step by step."""
    count = total = 0.0
    for _ in range(steps):
        count = rho * count + 1
        total += count
    return total


def keep(values: Any) -> Any:
    """Copy what a loop tells, so that it cannot change later."""
    return copy.deepcopy(values)


def check(
    algorithm: fl.Algorithm,
    told: list[Told],
    cohorts: Sequence[Sequence[int]],
    order: Batches,
    tolerance: float = 1e-10,
    **options: Any,
) -> None:
    """Replay and compare everything that the loop tells, after every round."""
    moments = replay(net(), DATA, algorithm, cohorts, batches=order, **options)
    assert len(moments) == len(told) == len(cohorts) >= 3
    assert float((told[-1].server - vec(net())).abs().max()) > 1e-2  # it went somewhere
    for r, (moment, seen, ids) in enumerate(zip(moments, told, cohorts, strict=True)):

        def same(what: str, mine: Tensor, other: Tensor, r: int = r) -> None:
            assert mine.shape == other.shape, what
            away = float((mine - other).abs().max())
            assert away < tolerance, f"round {r}, {what}: {away:.1e}"

        same("server", _vector(moment.server), seen.server)
        same("average", _vector(moment.average), seen.average)
        assert set(moment.clients) == set(seen.clients) == set(ids)
        for i, y in seen.clients.items():
            same(f"client {i}", _vector(moment.clients[i]), y)
        if seen.everybody is not None:
            same("everybody", _vector(moment.everybody), seen.everybody)
        mine = letters(algorithm, moment)
        for letter, value in seen.letters.items():
            same(letter, mine.server[letter], value)
        for i, state in seen.own.items():
            for letter, value in state.items():
                same(f"{letter} of client {i}", mine.clients[i][letter], value)


def _vector(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([v.reshape(-1) for v in named.values()])
