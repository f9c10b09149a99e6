"""Exams that are recorded as on a device keep the outputs that their metrics need."""

from __future__ import annotations

import torch
from replaying import Replayed

from experiment.tiny import tiny
from undrift.experiment.exam import Marks
from undrift.experiment.world import build


def test_metrics_are_those_of_their_own_judgement(recorded, monkeypatch) -> None:
    """They are computed on the host, when other judgements have run since."""
    monkeypatch.setattr("undrift.judging.Piece", Replayed)
    changes = ("evaluate.metrics=auc,brier", "evaluate.clients=true", "evaluate.batch=32")
    world = build(tiny(*changes, "data.sizes=60"))
    exam, wanted, queued = world.measure.exams["test"], [], []
    for _ in range(4):
        world.trainer.round()
        at = world.trainer.server.w, world.trainer.server.buffers
        wanted.append(exam.judge(*at))
        with torch.no_grad():
            queued.append(Marks(exam, exam._recorded(*at)))
    assert recorded and [marks.result() for marks in queued] == wanted
    assert len({found["brier"] for found in wanted}) == 4
