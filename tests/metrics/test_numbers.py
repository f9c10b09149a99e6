"""Metrics of numbers against scikit-learn; what outputs mean; names and directions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from undrift.errors import ConfigError
from undrift.metrics import (
    METRICS,
    Meaning,
    all_metrics,
    in_percent,
    lower_is_better,
    metric_named,
    metrics_for,
)

EQUAL = 1e-9


def drawn(seed: int, n: int = 97):
    draw = np.random.default_rng(seed)
    return draw.gamma(2.0, 3.0, n), draw.poisson(4.0, n).astype(float)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_metric_is_scikit_learns(seed: int) -> None:
    mu, y = drawn(seed)
    expected = {
        "rmse": sk.root_mean_squared_error(y, mu),
        "mae": sk.mean_absolute_error(y, mu),
        "r2": sk.r2_score(y, mu),
        "pinball": sk.mean_pinball_loss(y, mu, alpha=0.5),
        "poisson_deviance": sk.mean_poisson_deviance(y, mu),
    }
    assert set(expected) == {m.name for m in all_metrics("counts")}
    pair = torch.from_numpy(mu), torch.from_numpy(y)
    for name, value in expected.items():
        assert METRICS[name](*pair) == pytest.approx(value, rel=EQUAL), name
    for q in (0.1, 0.9):
        (chosen,) = metrics_for(["pinball"], "numbers", "here", quantile=q)
        by_name = metric_named(f"pinball_{q}")
        assert by_name is not None and chosen(*pair) == by_name(*pair)
        assert chosen(*pair) == pytest.approx(sk.mean_pinball_loss(y, mu, alpha=q), rel=EQUAL)


def test_what_is_not_defined_is_none() -> None:
    y = torch.full((5,), 3.0)
    assert METRICS["r2"](y + 1, y) is None and METRICS["r2"](y[:1], y[:1]) is None
    assert METRICS["rmse"](y[:0], y[:0]) is None
    assert METRICS["poisson_deviance"](y - 3, y) is None
    assert METRICS["poisson_deviance"](y, y - 4) is None
    assert METRICS["mae"](torch.tensor([float("inf")]), torch.ones(1)) is None
    assert METRICS["rmse"](torch.tensor([1e200], dtype=torch.float64), y[:1]) is None


def test_outputs_are_read_in_the_targets_own_units() -> None:
    mu, y = drawn(4)
    outputs, targets = torch.from_numpy((mu - 7) / 2.5), torch.from_numpy((y - 7) / 2.5)
    meaning = Meaning("numbers", mean=7.0, std=2.5)
    scores, truths = meaning.scores(outputs[:, None]), meaning.truths(targets[:, None])
    expected = sk.root_mean_squared_error(y, mu)
    assert METRICS["rmse"](scores, truths) == pytest.approx(expected, rel=EQUAL)
    counts = Meaning("counts", log=True)
    found = counts.scores(torch.from_numpy(np.log(mu))[:, None])
    assert found.tolist() == pytest.approx(mu.tolist(), rel=EQUAL)


def test_outputs_of_classes_are_chances() -> None:
    outputs = torch.tensor([[0.0, 1000.0], [2.0, 2.0]])
    assert Meaning("classes", 2).scores(outputs).tolist() == [[0.0, 1.0], [0.5, 0.5]]


def test_metrics_that_targets_do_not_have_are_refused_with_those_that_they_have() -> None:
    with pytest.raises(ConfigError, match=r"\['auc', 'f1'\].*choose from rmse, mae, r2, pinball$"):
        metrics_for(["auc", "rmse", "f1"], "numbers", "evaluate.metrics")
    with pytest.raises(ConfigError, match="Did you mean 'balanced_accuracy'"):
        metrics_for(["balanced_acuracy"], "classes", "evaluate.metrics")
    with pytest.raises(ConfigError, match="poisson_deviance"):
        metrics_for(["poisson_deviance"], "numbers", "evaluate.metrics")
    assert [m.name for m in metrics_for(["pr_auc", "roc_auc"], "classes", "")] == [
        "average_precision",
        "auc",
    ]


LESS = (
    *("test_loss", "all_test_log_loss", "client_brier_worst", "test_ece", "own_rmse", "test_mae"),
    *("client_auc_std", "client_auc_undefined", "test_pinball_0.9", "norm_model", "drift"),
    *("bytes_up", "seconds", "test_poisson_deviance", "test_own_error"),
)
MORE = (
    *("test_accuracy", "client_accuracy_worst10", "avg_test_auc", "validation_f1", "test_r2"),
    *("client_balanced_accuracy_mean", "test_average_precision", "test_own_score"),
)


@pytest.mark.parametrize("name", [*LESS, *MORE])
def test_a_name_tells_which_direction_is_better(name: str) -> None:
    assert lower_is_better(name) is (name in LESS)


def test_shares_read_in_percent() -> None:
    shown = ("test_accuracy", "client_balanced_accuracy_std", "train_accuracy", "own_top5_accuracy")
    assert all(in_percent(name, [0.5, None]) for name in shown)
    assert not any(map(in_percent, ("test_auc", "test_f1", "client_accuracy_undefined")))
    assert not in_percent("test_accuracy", [0.5, 50.0])


def test_every_metric_has_its_own_name_and_a_direction() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name and metric.better in ("more", "less")
        assert lower_is_better(f"test_{name}") is (metric.better == "less")
