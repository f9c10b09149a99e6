"""What runs come to: by the last round, by the last five, by the best so far."""

from __future__ import annotations

import math

import pytest

from undrift.experiment.history import History
from undrift.papers.scores import compared, curve, far, printed, score


def history(*values: float) -> History:
    records = ({"round": i, "test_accuracy": v} for i, v in enumerate(values, 1))
    return History(tuple(records))


RUNS = [history(0.1, 0.4, 0.3, 0.5, 0.6, 0.5), history(0.2, 0.3, 0.5, 0.6, 0.7, 0.7)]


def test_the_last_round_and_rounds_to_targets():
    found = score({"shows": "last", "targets": [0.5, 0.62]}, RUNS, "test_accuracy")
    assert (found["value"], found["each"]) == (60.0, [50.0, 70.0])
    assert found["std"] == pytest.approx(14.142, abs=1e-3)
    assert found["best"]["each"] == [60.0, 70.0]
    first, second = found["rounds_to"]
    assert first == {"target": 50.0, "median": 3, "on_mean": 4, "each": [4, 3]}
    assert second["each"] == [None, 5] and second["median"] == 5 and second["on_mean"] == 5


def test_the_last_five_rounds():
    found = score({"shows": "five"}, RUNS, "test_accuracy")
    assert found["each"] == pytest.approx([46.0, 56.0])
    assert found["within"] == pytest.approx((11.402 + 16.733) / 2, abs=1e-3)
    assert found["last"]["value"] == 60.0


def test_the_best_so_far_at_some_rounds():
    found = score({"shows": "best", "at": [2, 4, 9]}, RUNS, "test_accuracy")
    assert [(c["round"], c["value"]) for c in found["columns"]] == [(2, 35.0), (4, 55.0)]
    assert found["value"] == 55.0


def test_a_run_that_diverged():
    lost = [*RUNS, history(0.3, math.nan)]
    found = score({"shows": "last"}, lost, "test_accuracy")
    assert found["diverged"] == 1 and found["value"] is None
    told = compared(found, {"value": 60.0, "std": 1.0})
    assert told == {"difference": None, "differs": True}


def test_a_run_that_guesses_because_its_model_is_not_finite():
    ends = [{"round": 1, "test_accuracy": 0.1, "test_loss": loss} for loss in (2.3, None)]
    found = score({"shows": "last"}, [History((end,)) for end in ends], "test_accuracy")
    assert (found["value"], found["diverged"]) == (10.0, 1)
    assert compared(found, {"value": 10.0, "std": 1.0})["differs"] is True
    assert "diverged" not in score({"shows": "last"}, [History((ends[0],))], "test_accuracy")


def test_the_difference_counts_by_the_larger_deviation():
    ours = {"value": 61.0, "std": 0.1}
    assert compared(ours, {"value": 60.0, "std": 0.5}) == {"difference": 1.0, "differs": False}
    assert compared(ours, {"value": 60.0, "std": 0.3}) == {"difference": 1.0, "differs": True}
    assert compared(ours, {"value": 60.0, "std": None})["differs"] is True
    assert far(5.0, None, None) is None


def test_columns_differ_one_by_one():
    ours = score({"shows": "best", "at": [2, 6]}, RUNS, "test_accuracy")
    told = compared(ours, printed({"shows": "best"}, [100.0, 64.0]))
    assert told["differences"] == [-65.0, 1.0] and told["differs_at"] == [2]


def test_a_curve_is_thinned_but_keeps_its_end():
    long = History(tuple({"round": i, "test_accuracy": i / 1000} for i in range(1, 751)))
    found = curve([long, long], "test_accuracy")
    assert len(found["rounds"]) <= 100 and found["rounds"][-1] == 750
    assert found["mean"][-1] == 75.0 and found["std"][-1] == 0.0
