"""Compiled local steps: numbers of the reference, chosen by counting, the same bits twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from undrift.engines import vectorised
from undrift.errors import ConfigError
from undrift.program import compile as compiling
from undrift.program.compile import has_cpp_compiler
from undrift.rules.named import catalogue

from .test_client_half import BUILDS, SPECIAL, Residual

needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="no compiler is installed")
SIZES = (9, 14, 5, 20, 11, 7, 1)


class Small(nn.Module):
    """Two layers and a norm, with a forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def world(
    algorithm: fl.Algorithm, net: Callable[[], nn.Module] = Small, **settings: Any
) -> fl.Trainer:
    maker = torch.Generator().manual_seed(1)
    clients = [
        (
            torch.randn(n, 6, generator=maker, dtype=torch.float64),
            torch.randint(0, 3, (n,), generator=maker),
        )
        for n in SIZES
    ]
    torch.manual_seed(3)
    feature = "first" if net is Residual else None
    task = fl.Task(net(), dtype=torch.float64, feature=feature)
    chosen = {"work": fl.Work(epochs=(1, 2), batch=5), "sampler": fl.Uniform(4), **settings}
    return fl.Trainer(task, fl.Federation.of(clients), algorithm, seed=5, **chosen)


def apart(one: fl.Trainer, other: fl.Trainer, rounds: int = 3) -> float:
    one.run(rounds)
    other.run(rounds)
    return float((one.server.w - other.server.w).abs().max())


def scaffold() -> fl.Algorithm:
    return fl.scaffold(local=fl.sgd(0.05, momentum=0.9))


@needs_compiler
@pytest.mark.parametrize("chunk", [None, 1])
def test_compiled_steps_give_the_numbers_of_the_reference(chunk: int | None) -> None:
    ours = world(scaffold(), compiled=True, chunk=chunk)
    assert apart(ours, world(scaffold(), engine="reference")) < 1e-12
    assert compiled_programs(ours), "nothing was compiled"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in catalogue() if not n.startswith("comfed:")])
def test_every_algorithm_gives_the_numbers_of_the_reference(name: str) -> None:
    build = BUILDS.get(name, lambda: catalogue()[name].build(lr=0.05))
    sides = [
        world(build(), Residual, **settings, **SPECIAL.get(name, {}))
        for settings in ({"compiled": True, "in_place": False}, {"engine": "reference"})
    ]
    assert apart(*sides) < 1e-12
    assert compiled_programs(sides[0]), "nothing was compiled"


def compiled_programs(trainer: fl.Trainer) -> int:
    """Count programs that run as compiled code."""
    programs = [p for w in trainer.engine._crew for p in w._programs._known.values()]
    return sum(any(p.graph is run for run in compiling._made.values()) for p in programs)


@needs_compiler
def test_steps_are_counted_until_compiling_pays(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setattr(vectorised, "WORTH_COMPILING", 20)
    whole, first = world(scaffold()), world(scaffold())
    found = []
    for _ in range(5):
        whole.round()
        found.append((whole.engine.compiled, whole.engine.plan()["calls"]))
    flags, calls = zip(*found, strict=True)
    change = flags.index(True)
    assert 0 < change < 4 and flags[:change] == (None,) * change and all(flags[change:])
    assert calls[change - 1] < 20 <= calls[change]
    # a run that is resumed before, and one that is resumed after the change
    for stop in (change, change + 1):
        first = world(scaffold())
        first.run(stop)
        first.save(tmp_path / str(stop))
        second = world(scaffold())
        second.load(tmp_path / str(stop))
        second.run(5 - stop)
        assert torch.equal(second.server.w, whole.server.w)


def test_without_a_compiler_steps_run_as_traced(
    monkeypatch: Any, tmp_path: Any, caplog: Any
) -> None:
    monkeypatch.setattr(vectorised, "WORTH_COMPILING", 1)
    monkeypatch.setattr(vectorised, "has_cpp_compiler", lambda: False)
    one = world(scaffold())
    one.run(2)
    assert one.engine.compiled is False
    plan = {**one.engine.plan(), "compiled": True}  # of a machine that had one
    one.engine.use_plan(plan)
    assert one.engine.compiled is False and "bits may differ" in caplog.text


def test_a_run_from_before_goes_on_without(tmp_path: Any) -> None:
    one = world(scaffold())
    plan = {k: v for k, v in one.engine.plan().items() if k not in ("compiled", "calls")}
    one.engine.use_plan(plan)
    assert one.engine.compiled is False


def test_loops_in_c_are_never_compiled_over(monkeypatch: Any) -> None:
    monkeypatch.setattr(vectorised, "WORTH_COMPILING", 1)
    one = world(fl.fedavg(0.05), lambda: nn.Linear(6, 3))
    one.run(2)
    assert one.engine.compiled is (None if one.engine.native else has_cpp_compiler())


@needs_compiler
def test_code_with_other_numbers_is_not_used(monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level("INFO", "undrift")
    monkeypatch.setattr(
        compiling, "compile_recorded", lambda graph, given: lambda *v: [x + 1e-3 for x in graph(*v)]
    )
    sides = [world(fl.fedprox(0.05, mu=0.125), compiled=which) for which in (True, False)]
    assert apart(*sides) == 0.0
    assert "runs uncompiled (RuntimeError: compiled, it gives other numbers)" in caplog.text


def test_the_switch_is_checked() -> None:
    with pytest.raises(ConfigError, match="compiled is true or false, got 3"):
        world(scaffold(), compiled=3)
