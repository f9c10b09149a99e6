"""Training from a file gives the bits of training from memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import undrift as fl
from undrift.data import spool
from undrift.errors import DataError
from undrift.testing.world import numbers

SIZES = (9, 4, 12, 1, 7)


def clients(dtype: torch.dtype = torch.float32) -> list[TensorDataset]:
    draw = torch.Generator().manual_seed(1)
    return [
        TensorDataset(
            torch.randn(n, 6, generator=draw).to(dtype), torch.randint(0, 3, (n,), generator=draw)
        )
        for n in SIZES
    ]


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def make(keep: Any, algorithm: fl.Algorithm, **options: Any) -> fl.Trainer:
    dtype = options.pop("dtype", torch.float32)
    data = fl.Federation.from_datasets(
        clients(options.pop("stored", torch.float32)),
        keep=keep,
        arrival=options.pop("arrival", None),
    )
    work = options.pop("work", fl.Work(epochs=2, batch=4))
    return fl.Trainer(fl.Task(network(), dtype=dtype), data, algorithm, work=work, **options)


def assert_same_bits(one: fl.Trainer, other: fl.Trainer) -> None:
    mine, theirs = numbers(one), numbers(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(v, theirs[n]) for n, v in mine.items())


WAYS: dict[str, dict[str, Any]] = {
    "reference": {"engine": "reference"},
    "vectorised": {},
    "chunks": {"chunk": 2},
    "alone": {"chunk": 1},
    "two workers": {"workers": 2, "chunk": 2},
    "general path": {"in_place": False},
    "float64": {"dtype": torch.float64},
    "half precision in the file": {"stored": torch.float16},
    "float64 in the file": {"stored": torch.float64},
    "arriving": {"arrival": fl.Arrival(rounds=3)},
    "as on a device": {"graph": True},
    "as on a device, some": {"graph": True, "sampler": fl.Uniform(count=3)},
    "as on a device, arriving": {"graph": True, "arrival": fl.Arrival(rounds=3)},
}


@fl.record
class Looks(fl.Rule):
    """Looks at own data whenever it can."""

    def init_client(self, w: Tensor, sizes: fl.Sizes) -> Tensor:
        return torch.zeros_like(w)

    def begin(self, view: fl.ClientView) -> Tensor:
        return view.mine + 0.1 * view.grad_at(view.w0)

    def direction(self, g: Tensor, view: fl.ClientView) -> Tensor:
        return g + 0.1 * view.mine

    def review(self, view: fl.ClientView) -> Tensor:
        return view.grad_at(view.w)

    def finish(self, delta: Tensor, view: fl.ClientView) -> tuple[Tensor, Tensor, fl.Tree]:
        return delta, view.review, fl.EMPTY


ALGORITHMS = {
    "fedavg": fl.fedavg(0.1),
    "fednova": fl.fednova(0.1),
    "probing": fl.catalogue()["comfed:scaf-adam"].build(),
    "looking": fl.Algorithm((Looks(),)),
}


@pytest.mark.parametrize(
    ("way", "name"),
    [*((way, "looking") for way in WAYS), *(("vectorised", name) for name in ALGORITHMS)],
)
def test_the_bits_are_those_of_memory(way: str, name: str) -> None:
    algorithm = ALGORITHMS[name]
    held, streamed = (make(keep, algorithm, **WAYS[way]) for keep in ("memory", "disk"))
    assert isinstance(streamed.federation.x, spool.Streamed)
    for _ in range(2):
        one, other = (trainer.round()._replace(seconds=0.0) for trainer in (held, streamed))
        assert one == other
    assert_same_bits(held, streamed)
    assert held.describe() == streamed.describe()


def test_a_recorded_round_reads_a_window_of_the_file(recorded: list[Any]) -> None:
    """Other clients stand in it in every round; what was recorded reads the same memory."""
    sampler, work = fl.Uniform(count=3), fl.Work(steps=3, batch=4)
    held, streamed = (
        make(keep, ALGORITHMS["probing"], graph=True, sampler=sampler, work=work)
        for keep in ("memory", "disk")
    )
    held.run(5)
    streamed.run(5)
    assert recorded, "nothing was recorded"
    assert_same_bits(held, streamed)


@pytest.mark.parametrize("keep", ["memory", "disk"])
def test_a_cohort_that_memory_does_not_hold_is_fetched_batch_by_batch(
    keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("undrift.engines.vectorised.HELD", 0.0)
    trainer = make(keep, fl.fedavg(0.1), graph=True)
    trainer.round()
    assert bool(trainer.engine._rounds) == (keep == "memory")


def test_only_batches_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make("disk", fl.fedavg(0.1), sampler=fl.Uniform(count=2))
    seen = []
    fetch = spool.Streamed.index_select

    def watched(self: spool.Streamed, dim: int, rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return fetch(self, dim, rows)

    monkeypatch.setattr(spool.Streamed, "index_select", watched)
    monkeypatch.setattr(spool.Streamed, "pieces", None)
    trainer.round()
    assert seen and max(seen) <= 2 * 4  # two clients, batches of four


def test_held_out_examples_may_lie_in_a_file() -> None:
    trainer = make("disk", fl.fedavg(0.1))
    trainer.round()
    tests = trainer.federation
    inside = fl.Federation.of([c.tensors for c in clients()])
    judged = trainer.evaluate(tests.x, tests.y, batch=5)
    # a batch in memory is a view: where it begins in a line of the cache may change the rounding
    assert judged == pytest.approx(trainer.evaluate(inside.x, inside.y, batch=5), rel=1e-6)


@pytest.mark.parametrize("keep", ["memory", "disk"])
def test_a_label_without_an_output_names_its_client(keep: Any) -> None:
    data = clients()
    data[2].tensors[1][5] = 3
    federation = fl.Federation.from_datasets(data, keep=keep)
    with pytest.raises(DataError, match="client 2 has the label 3, but the module has 3 outputs"):
        fl.Trainer(fl.Task(network(), dtype=torch.float64), federation, fl.fedavg())


@pytest.mark.parametrize(("first", "second"), [("memory", "disk"), ("disk", "memory")])
def test_a_checkpoint_goes_on_wherever_the_examples_lie(
    first: str, second: str, tmp_path: Path
) -> None:
    whole = make("memory", fl.scaffold(0.1))
    whole.run(4)
    begun = make(first, fl.scaffold(0.1))
    begun.run(2)
    begun.save(tmp_path)
    resumed = make(second, fl.scaffold(0.1))
    assert resumed.load(tmp_path)
    resumed.run(2)
    assert_same_bits(resumed, whole)


def test_a_failing_client_of_a_file_is_named() -> None:
    @fl.record
    class Breaks(fl.Rule):
        def direction(self, g: Tensor, view: fl.ClientView) -> Tensor:
            return g.view(3)

    trainer = make("disk", fl.Algorithm((Breaks(),)))
    with pytest.raises(fl.UndriftError, match="client 0, stage 'direction', rule 'Breaks'"):
        trainer.round()


# ---- on a GPU ------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("way", "name"), [("vectorised", "looking"), ("reference", "fedavg"), ("float64", "probing")]
)
def test_cuda_gets_its_batches_from_the_file(way: str, name: str) -> None:
    held, streamed = (
        make(keep, ALGORITHMS[name], device="cuda", **WAYS[way]) for keep in ("memory", "disk")
    )
    assert streamed.federation.device.type == "cuda"
    assert streamed.federation.x._rows.device.type == "cpu"
    held.run(2)
    streamed.run(2)
    assert_same_bits(held, streamed)
    assert held.describe() == streamed.describe()
    tests = streamed.federation
    assert tests.x[:3].device.type == tests.client(1)[0].device.type == "cuda"
    assert streamed.evaluate(tests.x, tests.y) == held.evaluate(
        held.federation.x, held.federation.y
    )
