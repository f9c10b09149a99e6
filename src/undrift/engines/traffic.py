"""What a round sends, in floats: counted from what is really there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm
from undrift.core.rule import Rule, overrides
from undrift.core.task import Vec
from undrift.core.tree import Tree, leaves, size_in_bytes, size_in_floats
from undrift.engines.engine import Outcome


class Traffic(NamedTuple):
    """Floats sent to and by all clients of a round together."""

    down: int
    up: int

    def plus(self, other: Traffic) -> Traffic:
        """Add two exchanges."""
        return Traffic(self.down + other.down, self.up + other.up)


NOTHING = Traffic(0, 0)


def training_traffic(algo: Algorithm, outcome: Outcome, holders: int = 0) -> Traffic:
    """Count the exchange around local training, shared probes included.

    `holders` of the clients have the model already, because they looked at it after the last round.
    """
    sent, report, count = outcome.broadcast, outcome.report, len(outcome.rows.steps)
    shared = [
        probe
        for part, probe in zip(algo.parts, outcome.clients.probe, strict=True)
        if part.shares_probe
    ]
    each_down = size_in_floats((sent.w, sent.buffers.floats, sent.notes, sent.cohort))
    model = size_in_floats((sent.w, sent.buffers.floats))
    uploads, told = _counted(algo, report.uploads), _counted(algo, outcome.rows.notes)
    notes = [v for rule, v in zip(_counting(algo), told, strict=True) if not rule.rows_known]
    uploads = [rule.sent(v) for rule, v in zip(_counting(algo), uploads, strict=True)]
    each_up = _report_size(algo, sent.w, report.total)
    each_up += size_in_floats((uploads, report.buffers[0]))
    down = each_down * count - model * holders + size_in_floats(outcome.clients.notes)
    return Traffic(down, each_up * count + size_in_floats((shared, notes)))


def _report_size(algo: Algorithm, w: Vec, total: Tree) -> int:
    """Count what an aggregate sums, where the last rule that compresses deltas has packed them."""
    packers = [rule for rule in _counting(algo) if overrides(rule, "sent_delta")]
    if not packers:
        return size_in_floats(total)
    packed = size_in_bytes(packers[-1].sent_delta(torch.zeros_like(w)))
    each = -(-packed // w.element_size())
    vectors = [v for v in leaves(total) if isinstance(v, Tensor) and v.shape == w.shape]
    return size_in_floats(total) + len(vectors) * (each - w.numel())


def _counted(algo: Algorithm, sent: tuple[Tree, ...]) -> list[Tree]:
    """Leave out what is sent for the sake of measurement alone."""
    return [v for rule, v in zip(algo.rules, sent, strict=True) if not rule.observes]


def _counting(algo: Algorithm) -> list[Rule]:
    return [rule for rule in algo.rules if not rule.observes]


def look_traffic(sent: Tree, rows: Tree, clients: int) -> Traffic:
    """Count the exchange after a round: model and notes down, what was measured up."""
    return Traffic(size_in_floats(sent) * clients, size_in_floats(rows))
