"""Records become groups; averages leave out what was not measured."""

import math

import numpy as np
import pytest

from undrift.errors import DataError
from undrift.experiment.comparison import comparison_of
from undrift.experiment.comparison import mean_curve as variant_curve
from undrift.experiment.history import History
from undrift.report.page_data import (
    Group,
    Partition,
    RunCurves,
    Table,
    TableRow,
    finite,
    groups_from,
    in_percent,
    known_metrics,
    mean_curve,
)


def group(*values):
    runs = [RunCurves(s, tuple(range(1, len(v) + 1)), {"x": v}) for s, v in enumerate(values)]
    return Group("g", tuple(runs))


def test_labels_keep_their_first_order_and_collect_their_seeds():
    runs = [("b", 0, [{"round": 1}]), ("a", 0, []), ("b", 1, [{"round": 1}])]
    groups = groups_from(runs)
    assert [(g.label, [r.seed for r in g.runs]) for g in groups] == [("b", [0, 1]), ("a", [0])]


def test_only_plain_numbers_become_metrics():
    line = {
        "round": 1,
        "loss": np.float32(0.5),
        "steps": 3,
        "clients": [1],
        "name": "n",
        "ok": True,
    }
    (made,) = groups_from([("a", 0, [line])])
    assert made.runs[0].values == {"loss": (0.5,), "steps": (3.0,)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, 10**400])
def test_what_is_not_finite_or_not_measured_is_none(value):
    lines = [{"round": 1, "loss": 1.0}, {"round": 2, "loss": value}, {"round": 3}]
    (made,) = groups_from([("a", 0, lines)])
    assert made.runs[0].values["loss"] == (1.0, None, None)


def test_a_repeated_round_counts_as_it_came_out_last_and_rounds_are_sorted():
    lines = [{"round": 2, "loss": 5.0}, {"round": 1, "loss": 1.0}, {"round": 2, "loss": 2.0}]
    (made,) = groups_from([("a", 0, lines)])
    assert made.runs[0].rounds == (1, 2) and made.runs[0].values["loss"] == (1.0, 2.0)


@pytest.mark.parametrize("number", [None, "1", 1.5, True])
def test_a_record_without_its_round_is_refused(number):
    with pytest.raises(DataError, match="fedavg, seed 7, record 0: round is"):
        groups_from([("fedavg", 7, [{"round": number}])])


def test_no_records_make_no_groups():
    assert groups_from([]) == ()


def test_the_mean_is_taken_where_all_runs_have_a_value():
    curve = mean_curve(group((1.0, None, 5.0, math.nan), (3.0, 4.0, 5.0, None)), "x")
    assert curve.rounds == (1, 3) and curve.mean == (2.0, 5.0)
    assert curve.std == (pytest.approx(math.sqrt(2)), 0.0)
    assert curve.low[0] == pytest.approx(2 - math.sqrt(2)) and curve.high[1] == 5.0


def test_runs_of_different_length_are_averaged_as_far_as_the_shortest():
    curve = mean_curve(group((1.0,), (3.0, 5.0)), "x")
    assert (curve.rounds, curve.mean) == ((1,), (2.0,))


def test_the_mean_is_that_of_the_tables():
    values = ((0.1, 0.4, 0.5), (0.3, 0.7))
    runs = [("g", s, [{"round": i + 1, "x": v} for i, v in enumerate(one)])
            for s, one in enumerate(values)]  # fmt: skip
    named = [(n, s, History(tuple(h))) for n, s, h in runs]
    (variant,) = comparison_of("c", named, metric="x").variants
    (made,) = groups_from(runs)
    curve = mean_curve(made, "x")
    assert (list(curve.rounds), list(curve.mean)) == variant_curve(variant, "x").curve("x")


def test_values_that_would_overflow_a_sum_count_as_infinite():
    assert mean_curve(group((1.7e308, 1.0), (1e300, 3.0)), "x").mean == (2.0,)


def test_a_metric_without_a_common_round_is_not_offered():
    made = group((1.0, None), (None, 2.0))
    assert mean_curve(made, "x").rounds == () and known_metrics([made]) == ()
    assert known_metrics([made, group((1.0,))]) == ("x",)


def test_a_metric_that_nobody_has_is_an_empty_curve():
    assert mean_curve(group((1.0,)), "other").rounds == ()


def test_metrics_without_any_value_are_not_known():
    runs = (RunCurves(0, (1,), {"a": (None,), "b": (1.0,), "c": (math.nan,)}),)
    assert known_metrics([Group("g", runs)]) == ("b",)


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [("test_accuracy", 0.5, True), ("test_accuracy", 50.0, False), ("loss", 0.5, False)],
)
def test_only_accuracies_between_0_and_1_read_in_percent(metric, value, expected):
    groups = [Group("g", (RunCurves(0, (1, 2), {metric: (value, None)}),))]
    assert in_percent(groups, metric) is expected


def test_finite_takes_numbers_only():
    assert [finite(v) for v in (np.int64(2), 1.5, "2", None, False)] == [2.0, 1.5, None, None, None]


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="seed 3: 'loss' has 1 values for 2 rounds"):
        RunCurves(3, (1, 2), {"loss": (1.0,)})
    with pytest.raises(DataError, match="table row 0: 1 cells and 2 sort keys for 2 columns"):
        Table(("a", "b"), (TableRow(("x",), ("x", 1.0)),))
    with pytest.raises(DataError, match="client 1: 1 counts for 2 classes"):
        Partition([[1, 2], [3]], ("a", "b"), "")
