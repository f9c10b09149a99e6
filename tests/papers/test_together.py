"""Batches that are stopped between two rounds, and runs that leave nothing to go on from."""

from __future__ import annotations

import json

from experiment.tiny import tiny
from undrift.experiment.batch import OutOfTime, run_together
from undrift.experiment.world import build


def tasks(folder, rounds=4):
    names = ("fedavg", "scaffold")
    changes = [f"rounds={rounds}", "engine.device=cpu"]
    return [(tiny(f"algorithm.use={n}", *changes), folder / n) for n in names]


def losses(folder):
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line)["test_loss"] for line in lines]


class Countdown:
    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __call__(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_batch_stops_between_rounds_and_goes_on(tmp_path):
    heard = []

    class Ear:
        def started(self, run, past): ...
        def round(self, run, record): ...
        def finished(self, run, history):
            heard.append(("finished", run.label))

        def failed(self, run, error):
            heard.append((type(error), run.label))

        def close(self): ...

    found = run_together(tasks(tmp_path), listeners=[Ear()], stop=Countdown(3))
    assert [len(h) for h in found] == [2, 2]
    assert heard == [(OutOfTime, "fedavg"), (OutOfTime, "scaffold")]
    assert not list(tmp_path.rglob("summary.json"))
    found = run_together(tasks(tmp_path), listeners=[Ear()])
    assert [len(h) for h in found] == [4, 4]
    assert heard[2:] == [("finished", "fedavg"), ("finished", "scaffold")]
    run_together(tasks(tmp_path / "whole"))
    for name in ("fedavg", "scaffold"):
        assert losses(tmp_path / name) == losses(tmp_path / "whole" / name)


def test_lean_runs_save_only_what_is_not_complete(tmp_path):
    run_together(tasks(tmp_path), lean=True, checkpoint_seconds=1e9)
    assert len(list(tmp_path.rglob("summary.json"))) == 2
    assert not list(tmp_path.rglob("checkpoint"))
    longer = run_together(tasks(tmp_path, rounds=6), lean=True, stop=Countdown(2))
    assert [len(h) for h in longer] == [1, 1]  # from the start: there was nothing to go on from
    assert len(list(tmp_path.rglob("checkpoint"))) == 2


def test_runs_on_the_same_data_share_them(tmp_path):
    worlds = [build(tiny(f"algorithm.lr={lr}", "engine.device=cpu")) for lr in (0.1, 0.2)]
    one, other = (world.trainer.federation for world in worlds)
    assert one is other
    apart = build(tiny("engine.device=cpu", "partition={use='iid',clients=4}")).trainer.federation
    assert apart is not one and apart.num_clients == 4 and apart.x is one.x
    later = build(tiny("engine.device=cpu", "arrival={rounds=9}")).trainer.federation
    assert later.arrival is not None and one.arrival is None
