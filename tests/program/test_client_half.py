"""A traced function runs the operations of the function: the same bits for all that trains."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from undrift.core.tree import structure
from undrift.program import programs
from undrift.program.client_half import ClientHalf
from undrift.program.programs import Program, Programs
from undrift.rules.named import catalogue
from undrift.testing.world import numbers

SIZES = (9, 14, 5, 20, 11, 7, 1)
# settings that a small world needs
SPECIAL: dict[str, dict[str, Any]] = {
    "qfedsgd": {"work": fl.Work(steps=1, batch=None)},
    "vrlsgd": {"sampler": fl.Everyone()},
    "fedpd": {"sampler": fl.Everyone()},
}
BUILDS = {"fedvra_u": lambda: fl.fedvra_u(0.05, objective=fl.PseudoLabels(classes=3, every=2))}


class Residual(nn.Module):
    """A forward of its own, with a norm, dropout, and weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.norm, self.drop = nn.LayerNorm(5), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        h = h + self.drop(self.middle(self.norm(h)))
        return self.last(h + torch.tanh(self.middle(h)))


def world(algorithm: fl.Algorithm, net: nn.Module | None = None, **settings: Any) -> fl.Trainer:
    maker = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(n, 6, generator=maker), torch.randint(0, 3, (n,), generator=maker))
        for n in SIZES
    ]
    torch.manual_seed(3)
    feature = "first" if net is None else None
    task = fl.Task(net or Residual(), feature=feature)
    chosen = {"work": fl.Work(epochs=(1, 2), batch=5), "sampler": fl.Uniform(4), **settings}
    return fl.Trainer(task, fl.Federation.of(clients), algorithm, seed=5, in_place=False, **chosen)


def both(build: Any, monkeypatch: pytest.MonkeyPatch, rounds: int = 3) -> tuple[Any, Any]:
    """Train untraced, then with everything traced at its second call."""
    found = []
    for worth in (1e9, 0.0):
        monkeypatch.setattr(programs, "WORTH", worth)
        trainer = build()
        told = [r._replace(seconds=0.0) for r in trainer.run(rounds)]
        found.append((trainer, told))
    (plain, said), (traced, told) = found
    assert told == said
    wanted = numbers(plain)
    for name, value in numbers(traced).items():
        assert torch.equal(value, wanted[name]), name
    return plain, traced


def graphs(trainer: fl.Trainer) -> dict[str, int]:
    """Count programs that were traced, by the function's name."""
    found: dict[str, int] = {}
    for worker in trainer.engine._crew:
        for (key, *_), program in worker._programs._known.items():
            found[key[0]] = found.get(key[0], 0) + (program.graph is not None)
    return found


ALIKE = ("fedadagrad", "fedyogi", "fedamsgrad", "fedavgm", "slowmo", "mimelite", "feddc", "fedadmm")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in ALIKE else ())  # another has its structure
        for n in catalogue()
        if not n.startswith("comfed:")
    ],
)
def test_every_algorithm_keeps_its_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = BUILDS.get(name, lambda: catalogue()[name].build(lr=0.05))
    _, traced = both(lambda: world(build(), **SPECIAL.get(name, {})), monkeypatch)
    assert graphs(traced)["step"], "nothing was traced"


@pytest.mark.parametrize("settings", [{"chunk": 1}, {"chunk": 2, "workers": 2}, {"chunk": 3}])
def test_chunks_and_workers(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    both(lambda: world(fl.scaffold(0.05), **settings), monkeypatch)


class Calls(nn.Module):
    """Counts its calls in Python: every time another network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + 1e-6 * self.calls)


class Draws(nn.Module):
    """Draws from Python's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + 1e-6 * random.random())


class Hooked(nn.Module):
    """Has a hook that looks at what passes."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.layer.register_forward_hook(lambda *_: seen.append(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("make", [Calls, Draws])
def test_what_depends_on_more_than_its_arguments_is_called(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "WORTH", 0.0)
    one = world(fl.scaffold(0.05), make())
    one.run(3)
    assert not graphs(one)["step"]


def test_hooks_are_called_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "WORTH", 0.0)
    seen: list[int] = []
    one = world(fl.scaffold(0.05), Hooked(seen))
    counts = []
    for _ in range(3):
        before = len(seen)
        one.round()
        counts.append(len(seen) - before)
    assert min(counts) > 0 and not graphs(one)["step"]


def test_a_module_that_is_changed_between_rounds_is_traced_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 3), 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    found = []
    for worth in (1e9, 0.0):
        monkeypatch.setattr(programs, "WORTH", worth)
        one = world(fl.scaffold(0.05), Scaled())
        one.run(2)
        one.task.module.scale = 3.0
        one.run(2)
        found.append(one.server.w)
    assert torch.equal(*found)


def test_several_algorithms_of_one_engine_keep_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "WORTH", 0.0)
    one, other = world(fl.fedprox(0.05, mu=0.1)), world(fl.fedprox(0.05, mu=3.0))
    one.run(3)
    other.round()
    (mine,), (theirs,) = other.engine._crew, one.engine._crew
    mine._programs, mine.task = theirs._programs, theirs.task  # the same structure and shapes
    other.run(2)
    monkeypatch.setattr(programs, "WORTH", 1e9)
    wanted = world(fl.fedprox(0.05, mu=3.0))
    wanted.run(3)
    assert torch.equal(other.server.w, wanted.server.w)


def test_programs_of_many_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MOST", 3)
    known = Programs()
    for n in range(1, 7):
        assert torch.equal(known.call("double", lambda v: 2 * v, torch.ones(n)), 2 * torch.ones(n))
    assert len(known._known) == 3


def test_what_cannot_be_traced_is_called(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(programs, "WORTH", 0.0)

    def branch(v: Tensor) -> Tensor:
        return v + 1 if float(v.sum()) > 0 else v

    program = Program(branch, structure((torch.ones(2),)), ())
    with caplog.at_level("INFO", "undrift"):
        for _ in range(3):
            (found,) = program.run([torch.ones(2)])
    assert torch.equal(found, torch.full((2,), 2.0))
    assert caplog.text.count("runs untraced") == 1


def test_stretches_are_traced_by_their_number_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "WORTH", 0.0)
    one = world(fl.scaffold(0.05), nn.Linear(6, 3), sampler=fl.Everyone(), work=fl.Work(batch=5))
    one.run(3)
    assert graphs(one)["step"] == len({-(-n // 5) for n in SIZES})
    assert isinstance(one.engine._path(one.algorithm, None, together=True), ClientHalf)
