"""On a device evaluation is queued, not waited for, and states are read into given rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import undrift as fl
from experiment.tiny import tiny
from undrift.experiment.world import build
from undrift.rules.observe import LastModel
from undrift.state.store import ClientStateStore
from undrift.testing import tiny_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


@contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def trained(device: str) -> fl.Trainer:
    algorithm = fl.Algorithm((LastModel(), fl.Scaffold()))
    trainer = tiny_world().trainer(algorithm, device=device)
    trainer.run(3)
    return trainer


def test_judging_waits_for_nothing_and_gives_the_numbers_of_a_cpu() -> None:
    here, there = trained("cpu"), trained("cuda")
    x, y, ids = there.federation.x, there.federation.y, [0, 1, 3]
    there.evaluate(x, y, batch=7)  # what is made once is made now
    for own in (False, True):
        there.judge_clients(ids, own=own).result()
    with no_waits():
        whole = there.judge(x, y, batch=7)
        parts = [there.judge_clients(ids, own=own) for own in (False, True)]
    wanted = here.evaluate(here.federation.x, here.federation.y)
    assert whole.result() == pytest.approx(wanted, rel=1e-9)
    for own, part in zip((False, True), parts, strict=True):
        assert part.result() == pytest.approx(here.judge_clients(ids, own=own).result(), rel=1e-9)


def test_a_result_does_not_wait_for_what_is_queued_later() -> None:
    trainer = trained("cuda")
    x, y = trainer.federation.x, trainer.federation.y
    wanted = trainer.evaluate(x, y)
    early = trainer.judge(x, y)
    torch.cuda._sleep(2_000_000_000)  # about a second
    after = torch.cuda.Event()
    after.record()
    assert early.result() == wanted
    assert not after.query()
    after.synchronize()


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("size", [6, 7])
def test_states_are_read_into_given_rows(place: str, size: int) -> None:
    like = {"c": torch.zeros(size), "step": torch.tensor(0)}
    store = ClientStateStore(like, dtype=torch.float32, device="cuda", place=place)
    states = {
        "c": torch.rand(3, size, device="cuda"),
        "step": torch.arange(3, device="cuda"),
    }
    store.stage([5, 1, 8], states)
    store.commit()
    buffer = {"c": torch.full((5, size), 9.0, device="cuda"), "step": torch.full((5,), 9).cuda()}
    rows = {name: values[1:4] for name, values in buffer.items()}
    store.gather([8, 2, 5], out=rows)
    wanted = torch.stack([states["c"][2], torch.zeros(size, device="cuda"), states["c"][0]])
    assert torch.equal(buffer["c"][1:4], wanted)
    assert buffer["step"].tolist() == [9, 2, 0, 0, 9]
    assert (buffer["c"][[0, 4]] == 9).all()


def test_metrics_of_all_outputs_wait_for_nothing_and_are_those_of_a_cpu() -> None:
    changes = ('evaluate.metrics=["auc", "log_loss"]', "evaluate.clients=true", "evaluate.batch=50")
    here, there = (
        build(tiny(*changes, "data.sizes=60", "task.dtype=float64", f"engine.device={device}"))
        for device in ("cpu", "cuda")
    )
    for world in (here, there):
        world.measure.record(world.trainer.round(), last=True)
        world.trainer.round()
    there.measure.judging()()  # what is recorded once is recorded now
    with no_waits():
        later = there.measure.judging()
    found, wanted = later(), here.measure.judged()
    assert {"test_auc", "client_auc_worst", "test_log_loss"} <= set(found)
    assert found == pytest.approx(wanted, rel=1e-9)
    first = later()
    there.trainer.run(2)
    assert there.measure.judged() != first == later()  # a result keeps its numbers
    whole = [world.measure.whole() for world in (here, build(here.experiment))]
    assert whole[0] is not None and whole[0]["metrics"] != whole[1]["metrics"]
    assert there.measure.whole()["examples"] == whole[0]["examples"]
