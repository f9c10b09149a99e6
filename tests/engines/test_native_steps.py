"""Loops in C for stacks of linear layers, against one client at a time."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import undrift as fl
from undrift import native
from undrift.engines import capacity, native_steps, vectorised
from undrift.engines.native_steps import NativeSteps
from undrift.errors import DataError

needs_loops = pytest.mark.skipif(
    native.loops(torch.float32) is None, reason="there is no C compiler, or no AVX2"
)

SIZES = (9, 4, 12, 1, 7)


def stack(*sizes: int, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for a, b in pairwise(sizes):
        made += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*made[:-1])


MODULES = {
    "usual": lambda: stack(6, 5, 3),
    "one layer": lambda: stack(6, 3),
    "no bias": lambda: stack(6, 5, 3, bias=False),
    "whole vectors": lambda: stack(6, 16, 32, 3),
    "a vector and a bit": lambda: stack(6, 17, 3),
    "many vectors": lambda: stack(6, 70, 41, 3),
    "nothing between": lambda: nn.Sequential(stack(6, 9), stack(9, 3)),
    "nested": lambda: nn.Sequential(nn.Identity(), stack(6, 8, 4), nn.ReLU(), stack(4, 3)),
    "wide": lambda: nn.Sequential(nn.Flatten(), stack(150, 20, 3)),
}


def federation(width: int = 6) -> fl.Federation:
    maker = torch.Generator().manual_seed(1)
    shape = (width,) if width == 6 else (width // 10, 10)
    return fl.Federation.of([
        (torch.randn(n, *shape, generator=maker), torch.randint(0, 3, (n,), generator=maker))
        for n in SIZES
    ])  # fmt: skip


def make(module: nn.Module, dtype: torch.dtype = torch.float64, **options: Any) -> fl.Trainer:
    first = next(m for m in module.modules() if isinstance(m, nn.Linear))
    local = fl.Sgd(lr=0.2, weight_decay=0.1, schedule=fl.Exponential(0.9))
    chosen = {"algorithm": fl.fedavg(local=local), "work": fl.Work(epochs=2, batch=4), **options}
    data = chosen.pop("data", None) or federation(first.in_features)
    return fl.Trainer(fl.Task(module, dtype=dtype), data, **chosen)


def paths(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Collect the classes that take local steps."""
    seen: list[type] = []
    chosen = vectorised.Vectorised._path

    def noted(self: Any, *given: Any, **named: Any) -> Any:
        found = chosen(self, *given, **named)
        seen.append(type(found))
        return found

    monkeypatch.setattr(vectorised.Vectorised, "_path", noted)
    return seen


def told(trainer: fl.Trainer, rounds: int = 3) -> list[Any]:
    return [(r.loss, r.scores, r.steps, r.skipped) for r in trainer.run(rounds)]


@needs_loops
@pytest.mark.parametrize("batch", [1, 4, 50])
@pytest.mark.parametrize("name", MODULES)
def test_equals_one_client_at_a_time(
    name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, work = paths(monkeypatch), fl.Work(epochs=2, batch=batch)
    one = make(MODULES[name](), work=work)
    other = make(MODULES[name](), work=work, engine="reference")
    mine, theirs = told(one), told(other)
    assert set(seen) == {NativeSteps}
    torch.testing.assert_close(one.server.w, other.server.w, rtol=0, atol=1e-12)
    for a, b in zip(mine, theirs, strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-12) and a[1] == pytest.approx(b[1], abs=1e-12)
        assert a[2:] == b[2:]


@needs_loops
@pytest.mark.parametrize("name", MODULES)
def test_one_step_in_float32(name: str) -> None:
    """Long enough sums round otherwise; the bound is that of all paths."""
    work = fl.Work(steps=1, batch=9)
    one, other = (
        make(MODULES[name](), torch.float32, work=work, native=native) for native in (True, False)
    )
    start = one.server.w.clone()
    mine, theirs = told(one, 1), told(other, 1)
    assert one.engine.native and not other.engine.native
    assert (one.server.w - other.server.w).norm() < 1e-5 * (other.server.w - start).norm()
    assert mine[0][0] == pytest.approx(theirs[0][0], rel=1e-5) and mine[0][1:] == theirs[0][1:]


@needs_loops
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_chunks_and_workers_change_nothing(chunk: int | None, workers: int) -> None:
    one = make(stack(6, 5, 3), torch.float32)
    other = make(stack(6, 5, 3), torch.float32, chunk=chunk, workers=workers)
    assert told(one) == told(other)
    torch.testing.assert_close(one.server.w, other.server.w, rtol=0, atol=1e-6)


@needs_loops
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_whoever_has_no_number_is_left_out(value: float) -> None:
    found = []
    for engine in ("vectorised", "reference"):
        made = make(stack(6, 5, 3), torch.float32, engine=engine)
        made.federation.x[made.federation.members[10]] = value  # of client 1
        found.append((made.run(2), made.server.w))
    assert [r.skipped for r in found[0][0]] == [r.skipped for r in found[1][0]]
    assert all(r.skipped == [1] for r in found[0][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-6)


@needs_loops
def test_the_first_of_the_largest_is_the_class() -> None:
    """Equal outputs, and outputs that are no numbers, are judged as torch does."""
    made = make(nn.Sequential(nn.Linear(6, 3)), torch.float32, work=fl.Work(steps=1, batch=50))
    with torch.no_grad():
        made.put(made.server._replace(w=torch.zeros_like(made.server.w)))
    labels = made.federation.y
    (result,) = made.run(1)
    sizes, first = torch.tensor(SIZES), torch.tensor([float((y == 0).sum()) for y in
                                                      labels.split(list(SIZES))])  # fmt: skip
    assert result.scores["accuracy"] == pytest.approx(float((first / sizes).mean()))


@needs_loops
def test_large_outputs_are_no_trouble() -> None:
    """What is far below the largest output counts nothing, without a warning."""
    one, other = (
        make(stack(6, 5, 3), torch.float32, engine=e, work=fl.Work(steps=1, batch=4))
        for e in ("vectorised", "reference")
    )
    for trainer in (one, other):
        trainer.put(trainer.server._replace(w=300 * trainer.server.w))
    mine, theirs = told(one, 1), told(other, 1)
    assert mine[0][0] == pytest.approx(theirs[0][0], rel=1e-5) and mine[0][1:] == theirs[0][1:]
    torch.testing.assert_close(one.server.w, other.server.w, rtol=1e-6, atol=1e-5)


@needs_loops
def test_a_label_that_is_no_class_is_named() -> None:
    made = make(stack(6, 5, 3), torch.float32)
    made.run(1)
    made.federation.y[:] = 7
    with pytest.raises(DataError, match="label 7 of example"):
        made.run(1)


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 15, 3))


OTHERS = {
    "another function": lambda: make(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))),
    "cut twice": lambda: make(nn.Sequential(stack(6, 4), nn.ReLU(), nn.ReLU(), stack(4, 3))),
    "cut at the end": lambda: make(nn.Sequential(stack(6, 3), nn.ReLU())),
    "cut first": lambda: make(nn.Sequential(nn.ReLU(), stack(6, 3))),
    "layers at places": lambda: make(sequence(), data=federation(150)),
    "turned off": lambda: make(stack(6, 3), native=False),
    "not in place": lambda: make(stack(6, 3), in_place=False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_loops_do_not_know_takes_another_path(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, made = paths(monkeypatch), OTHERS[name]()
    made.run(1)
    assert NativeSteps not in seen and not made.engine.plan()["native"]


@pytest.mark.parametrize(
    "algorithm",
    [fl.fedavg(local=fl.sgd(0.1, momentum=0.9)), fl.fedprox(mu=0.1), fl.fedavg(local=fl.Adam(0.1))],
)
def test_other_rules_begin_on_another_path(
    algorithm: fl.Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops in C take linear ones later: see test_linear_steps.py."""
    seen, made = paths(monkeypatch), make(stack(6, 3), algorithm=algorithm)
    made.run(1)
    assert NativeSteps not in seen


@needs_loops
def test_a_layer_that_got_a_hook_takes_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, made = paths(monkeypatch), make(stack(6, 5, 3))
    made.run(1)
    made.task.module[0].register_forward_hook(lambda *_: None)
    made.run(1)
    assert seen[0] is NativeSteps and seen[-1] is not NativeSteps


@needs_loops
def test_targets_of_other_types_take_another_path() -> None:
    data = federation()
    chances = nn.functional.one_hot(data.y, 3).double()
    soft = fl.Federation.of([
        (data.x[rows], chances[rows]) for rows in torch.arange(len(data.x)).split(list(SIZES))
    ])  # fmt: skip
    task = fl.Task(stack(6, 3), dtype=torch.float64, metrics={})
    made = fl.Trainer(task, soft, fl.fedavg(0.1))
    made.run(1)
    assert not made.engine.native


@needs_loops
@pytest.mark.parametrize("said", [2, 400])
def test_layers_are_as_wide_as_their_weights(said: int) -> None:
    """Whoever exchanges weights may leave behind what a layer says of itself."""
    found = []
    for engine in ("vectorised", "reference"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, said), nn.ReLU(), nn.Linear(said, 3))
        module[0].weight = nn.Parameter(torch.randn(5, 6))
        module[0].bias = nn.Parameter(torch.randn(5))
        module[2].weight = nn.Parameter(torch.randn(3, 5))
        made = make(module, engine=engine)
        made.run(2)
        found.append(made.server.w)
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("there", [True, False])
def test_a_first_cohort_that_does_not_train(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not there:
        monkeypatch.setattr(native, "loops", lambda dtype: None)
    sampler = fl.Explicit([[1], [2], [1, 2]])
    made, other = (
        make(stack(6, 3), work=fl.Work(batch=9, last="drop"), sampler=sampler, engine=engine)
        for engine in ("vectorised", "reference")
    )
    assert [r.skipped for r in made.run(3)] == [r.skipped for r in other.run(3)] == [[1], [], [1]]
    torch.testing.assert_close(made.server.w, other.server.w, rtol=0, atol=1e-12)


@needs_loops
@pytest.mark.parametrize(
    ("cohort", "threads", "loops"), [(1, 4, False), (1, 1, True), (3, 2, True)]
)
def test_one_large_client_has_all_threads(
    cohort: int, threads: int, loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (vectorised, capacity):
        monkeypatch.setattr(module, "is_small", lambda *_: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    made = make(stack(6, 5, 3), sampler=fl.Uniform(cohort))
    made.run(1)
    assert made.engine.native == loops


# ---- going on ------------------------------------------------------------------------------------
@needs_loops
def test_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole, half = (make(stack(6, 5, 3), torch.float32) for _ in range(2))
    whole.run(4)
    half.run(2)
    half.save(tmp_path)
    again = make(stack(6, 5, 3), torch.float32)
    again.load(tmp_path)
    assert again.engine.plan()["native"]
    again.run(2)
    assert torch.equal(again.server.w, whole.server.w)


def test_a_run_of_before_goes_on_as_it_was() -> None:
    made = make(stack(6, 5, 3))
    plan = made.engine.plan()
    plan["decided"] = True
    del plan["native"]
    made.engine.use_plan(plan)
    made.run(1)
    assert not made.engine.native


def test_a_run_goes_on_where_the_loops_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(stack(6, 5, 3))
    plan = {**made.engine.plan(), "native": True, "decided": True}
    monkeypatch.setattr(native, "loops", lambda dtype: None)
    with caplog.at_level(logging.WARNING, "undrift"):
        made.engine.use_plan(plan)
    assert "bits may differ" in caplog.text
    made.run(1)


# ---- building ------------------------------------------------------------------------------------
@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build once more, in a folder of its own."""
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("UNDRIFT_NATIVE", raising=False)
    native.loops.cache_clear()
    yield tmp_path / "cache" / "native"
    native.loops.cache_clear()


@needs_loops
def test_built_once_for_a_machine(fresh: Path) -> None:
    assert native.loops(torch.float32) is not None
    (file,) = fresh.iterdir()
    before = file.stat().st_mtime_ns
    native.loops.cache_clear()
    assert native.loops(torch.float32) is not None
    assert file.stat().st_mtime_ns == before and list(fresh.iterdir()) == [file]
    assert fresh.stat().st_mode & 0o077 == 0


@needs_loops
@pytest.mark.parametrize(
    "share", [0.5, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 0.9, 0.999))]
)
def test_a_damaged_file_is_built_again(share: float, fresh: Path) -> None:
    """Half a library that is loaded would end the process."""
    file = native._file(native._compiler(), 32)
    native._build(native._compiler(), 32, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    assert native.loops(torch.float32) is not None
    assert file.stat().st_size > 0.9 * len(whole)


@needs_loops
def test_a_folder_that_others_may_write_is_not_used(
    fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    with caplog.at_level(logging.INFO, "undrift"):
        assert native.loops(torch.float32) is None
    assert "may be written by others" in caplog.text


@needs_loops
def test_a_user_without_a_home_has_a_place(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for name in ("UNDRIFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert native.loops(torch.float32) is not None
    assert list(tmp_path.glob("undrift-*/native/dense32-*.so"))


@needs_loops
def test_a_file_that_others_may_write_is_not_executed(fresh: Path) -> None:
    assert native.loops(torch.float32) is not None
    (file,) = fresh.iterdir()
    before = file.stat().st_ino
    file.chmod(0o777)
    native.loops.cache_clear()
    assert native.loops(torch.float32) is not None
    assert file.stat().st_ino != before and not file.stat().st_mode & 0o022


def broken(folder: Path, answer: str) -> Path:
    compiler = folder / "cc"
    compiler.write_text(f"#!/bin/sh\n{answer}\n")
    compiler.chmod(0o755)
    return compiler


@pytest.mark.parametrize(
    "answer", ["echo no space left >&2; exit 1", "exit 0"], ids=["fails", "makes nothing"]
)
def test_a_compiler_that_does_not_work_is_done_without(
    answer: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("CC", str(broken(tmp_path, answer)))
    with caplog.at_level(logging.INFO, "undrift"):
        made = make(stack(6, 5, 3))
        made.run(1)
    assert not made.engine.native and "loops in C are not used" in caplog.text


def test_without_a_compiler_torch_does_it(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert native.loops(torch.float32) is None
    made = make(stack(6, 5, 3))
    made.run(1)
    assert not made.engine.native


def test_nobody_is_made_to_compile(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDRIFT_NATIVE", "0")
    assert native.loops(torch.float32) is None
    assert not fresh.parent.exists()


def test_layers_that_are_known() -> None:
    found = native_steps.layers_in(MODULES["nested"](), (6,))
    assert found is not None and found.sizes == [6, 8, 4, 3] and found.cuts == [1, 1, 0]
    assert native_steps.layers_in(nn.Sequential(nn.ReLU()), (6,)) is None
    assert native_steps.layers_in(stack(6, 3), (2, 3)) is None
