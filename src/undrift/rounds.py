"""What is known of a round: about to be trained, under way, done."""

from __future__ import annotations

import logging
import math
import time
from typing import NamedTuple

from undrift.core.algorithm import Row, Server
from undrift.core.tree import Tree
from undrift.engines.engine import Assignment
from undrift.engines.traffic import Traffic

log = logging.getLogger("undrift")


class RoundResult(NamedTuple):
    """What is known after a round."""

    round: int  # 1 after the first
    ids: list[int]  # who was asked
    skipped: list[int]  # who was left out: a non-finite update, or nothing to train on
    loss: float  # mean over participants of their mean local loss
    scores: dict[str, float]
    floats_down: int  # sent to the cohort, in all
    floats_up: int
    seconds: float
    steps: int  # local steps of all clients together


class Opened(NamedTuple):
    """A round that is about to be trained."""

    server: Server
    cohort: Assignment
    everyone: Tree
    sent: Traffic  # before it
    holders: frozenset[int]
    started: float


class Advance(NamedTuple):
    """A round that is done, or still under way on a device."""

    round: int
    ids: list[int]
    rows: Row
    sent: Traffic
    started: float

    def result(self) -> RoundResult:
        """Read what is known of it; waits for the device."""
        rows = self.rows
        kept = rows.accepted.cpu()  # sync: once per round
        losses = rows.loss.cpu()[kept]
        scores = {name: float(v.cpu()[kept].mean()) for name, v in rows.scores.items()}
        skipped = sorted(i for i, ok in zip(self.ids, kept.tolist(), strict=True) if not ok)
        if skipped:
            why = "not finite, or no batch to train on"
            log.warning("round %d: left out clients %s (%s)", self.round, skipped, why)
        loss = float(losses.mean()) if len(losses) else math.nan
        seconds, steps = time.perf_counter() - self.started, int(rows.steps.sum())
        return RoundResult(self.round, self.ids, skipped, loss, scores, *self.sent, seconds, steps)
