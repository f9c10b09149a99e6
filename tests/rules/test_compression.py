"""Rules that compress deltas: the bytes that are counted are those that have to travel."""

from __future__ import annotations

import pytest
import torch

import undrift as fl
from undrift import Algorithm, Rule, Sgd, record, static
from undrift.core.tree import EMPTY
from undrift.testing import check_rule, tiny_task, tiny_world

P, C = tiny_task().size, 4  # parameters, clients of a cohort; float64


@record
class TopK(Rule):
    """Send the largest entries of a delta and where they stand."""

    k: int = static(default=5)

    def finish(self, delta, view):
        where = delta.abs().topk(self.k).indices
        kept = torch.zeros_like(delta).scatter(0, where, delta.gather(0, where))
        return kept, view.mine, EMPTY

    def sent_delta(self, delta):
        return {"values": delta[: self.k], "where": torch.zeros(self.k, dtype=torch.int32)}


@record
class Quantised(Rule):
    """Send a delta as whole numbers of 8 bits and one scale."""

    def finish(self, delta, view):
        scale = delta.abs().max().clamp(min=1e-30) / 127
        return (delta / scale).round() * scale, view.mine, EMPTY

    def sent_delta(self, delta):
        return {"whole": delta.to(torch.int8), "scale": delta[:1]}


@record
class Signs(Rule):
    """Send one bit per parameter, eight to a byte, and a length."""

    def finish(self, delta, view):
        return delta.sign() * delta.abs().mean(), view.mine, EMPTY

    def sent_delta(self, delta):
        return {"bits": torch.zeros(-(-delta.numel() // 8), dtype=torch.uint8), "by": delta[:1]}


BYTES = {
    TopK(5): 5 * 8 + 5 * 4,
    TopK(1): 8 + 4,
    Quantised(): P + 8,
    Signs(): -(-P // 8) + 8,
}


def up(*rules: Rule, aggregate=None, **options) -> int:
    algorithm = Algorithm(rules, Sgd(lr=0.1), *([] if aggregate is None else [aggregate]))
    return tiny_world().trainer(algorithm, **options).round().floats_up


@pytest.mark.parametrize("rule", BYTES, ids=repr)
@pytest.mark.parametrize("engine", ["vectorised", "reference"])
def test_what_is_counted_is_what_travels(rule, engine):
    floats = -(-BYTES[rule] // 8)
    assert up(rule, engine=engine) == C * (floats + 1) < C * (P + 1)
    assert up(rule, engine=engine, aggregate=fl.Nova()) == C * (floats + 2)


def test_the_last_compression_counts_whatever_stands_between():
    assert up(TopK(5), Signs()) == up(Signs())
    assert up(Signs(), fl.Prox(0.1)) == up(Signs())
    assert up(fl.Prox(0.1)) == C * (P + 1)


def test_uploads_of_other_rules_are_counted_as_they_are():
    plain, packed = (up(*rules, fl.Scaffold()) for rules in ((), (TopK(5),)))
    assert plain - packed == C * (P - 8)


def test_float32_counts_in_floats_of_four_bytes():
    world = tiny_world(tiny_task(torch.float32))
    result = world.trainer(Algorithm((TopK(5),), Sgd(lr=0.1))).round()
    assert result.floats_up == C * (5 + 5 + 1)


def test_what_goes_down_is_not_compressed():
    both = [tiny_world().trainer(Algorithm(r, Sgd(lr=0.1))).round() for r in ((), (TopK(5),))]
    assert both[0].floats_down == both[1].floats_down


@pytest.mark.parametrize("rule", [TopK(5), Quantised()], ids=repr)
def test_rules_that_compress_keep_all_promises(rule):
    check_rule(rule, rounds=2)
