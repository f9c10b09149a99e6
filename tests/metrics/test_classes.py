"""Metrics of classes against scikit-learn, with ties, sites of one class and missing classes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import calibration as sk_calibration
from sklearn import metrics as sk

from undrift.metrics import METRICS, all_metrics, calibration, confusion, precision_recall, roc

EQUAL = 1e-9
CASES = [(classes, seed, grain) for classes in (2, 3, 5) for seed in (0, 1) for grain in (0, 4)]


def drawn(classes: int, seed: int, grain: int, n: int = 211):
    """Probabilities, rounded to a coarse grid so that many are equal, and unlike classes."""
    draw = np.random.default_rng(seed)
    scores = draw.normal(size=(n, classes)) * 2
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    if grain:
        whole = np.round(p * grain)
        whole[:, 0] += (whole.sum(1) == 0) + 0.0
        p = whole / whole.sum(1, keepdims=True)
    share = np.arange(1, classes + 1) / sum(range(1, classes + 1))
    return p, draw.choice(classes, n, p=share)


def ours(name: str, p, y):
    return METRICS[name](torch.from_numpy(p), torch.from_numpy(y))


@pytest.mark.parametrize(("classes", "seed", "grain"), CASES)
def test_every_metric_is_scikit_learns(classes: int, seed: int, grain: int) -> None:
    p, y = drawn(classes, seed, grain)
    labels, guess, one_hot = range(classes), p.argmax(1), np.eye(classes)[y]
    two = classes == 2
    expected = {
        "accuracy": sk.accuracy_score(y, guess),
        "balanced_accuracy": sk.balanced_accuracy_score(y, guess),
        "f1": sk.f1_score(y, guess, average="macro"),
        "auc": sk.roc_auc_score(y, p[:, 1] if two else p, multi_class="ovr"),
        "average_precision": sk.average_precision_score(y, p[:, 1])
        if two
        else sk.average_precision_score(one_hot, p, average="macro"),
        "log_loss": sk.log_loss(y, p, labels=labels),
        "brier": sk.brier_score_loss(y, p[:, 1]) if two else ((p - one_hot) ** 2).sum(1).mean(),
        "ece": ece_by_hand(p, y),
    }
    assert set(expected) == {m.name for m in all_metrics("classes")}
    for name, value in expected.items():
        assert ours(name, p, y) == pytest.approx(value, rel=EQUAL, abs=EQUAL), name
    table = confusion(torch.from_numpy(p), torch.from_numpy(y))
    assert table.tolist() == sk.confusion_matrix(y, guess, labels=labels).tolist()


def ece_by_hand(p, y) -> float:
    said, true = (p[:, 1], y == 1) if p.shape[1] == 2 else (p.max(1), p.argmax(1) == y)
    edges, total = np.linspace(0, 1, 16), 0.0
    for k in range(15):
        low = said > edges[k] if k else said >= 0
        inside = low & (said <= edges[k + 1])
        if inside.any():
            total += inside.sum() * abs(said[inside].mean() - true[inside].mean())
    return total / len(y)


@pytest.mark.parametrize("grain", [0, 4])
def test_the_calibration_curve_is_scikit_learns(grain: int) -> None:
    p, y = drawn(2, 3, grain)
    found, said = sk_calibration.calibration_curve(y, p[:, 1], n_bins=15)
    bins = calibration(torch.from_numpy(p), torch.from_numpy(y))
    assert bins.said.tolist() == pytest.approx(said.tolist(), abs=EQUAL)
    assert bins.found.tolist() == pytest.approx(found.tolist(), abs=EQUAL)
    assert int(bins.examples.sum()) == len(y)


@pytest.mark.parametrize("grain", [0, 4])
def test_curves_are_scikit_learns(grain: int) -> None:
    p, y = drawn(2, 5, grain)
    score, true = torch.from_numpy(p[:, 1].copy()), torch.from_numpy(y) == 1
    curve = roc(score, true)
    assert curve is not None
    for mine, theirs in zip(curve, sk.roc_curve(y, p[:, 1], drop_intermediate=False), strict=True):
        assert mine.tolist() == pytest.approx(theirs.tolist(), abs=EQUAL)
    curve = precision_recall(score, true)
    assert curve is not None
    precision, recall, thresholds = sk.precision_recall_curve(y, p[:, 1])
    assert curve.y.tolist() == pytest.approx(precision[::-1].tolist(), abs=EQUAL)
    assert curve.x.tolist() == pytest.approx(recall[::-1].tolist(), abs=EQUAL)
    assert curve.thresholds[1:].tolist() == pytest.approx(thresholds[::-1].tolist(), abs=EQUAL)


@pytest.mark.parametrize("curve_of", [roc, precision_recall])
def test_thin_curves_are_points_of_the_whole_one(curve_of) -> None:
    p, y = drawn(2, 1, 0, n=5000)
    score, true = torch.from_numpy(p[:, 1].copy()), torch.from_numpy(y) == 1
    whole, thin = curve_of(score, true), curve_of(score, true, 200)
    assert whole is not None and thin is not None and 100 < len(thin.x) <= 200
    points = set(zip(whole.x.tolist(), whole.y.tolist(), strict=True))
    kept = list(zip(thin.x.tolist(), thin.y.tolist(), strict=True))
    assert set(kept) <= points
    assert kept[0] == (float(whole.x[0]), float(whole.y[0]))
    assert kept[-1] == (float(whole.x[-1]), float(whole.y[-1]))
    areas = [float(torch.trapezoid(c.y, c.x)) for c in (whole, thin)]
    assert areas[0] == pytest.approx(areas[1], abs=0.01)


@pytest.mark.parametrize("classes", [2, 4])
def test_one_class_only_has_no_ranking(classes: int) -> None:
    p, _ = drawn(classes, 0, 0, 20)
    y = np.ones(20, dtype=np.int64)
    values = {m.name: ours(m.name, p, y) for m in all_metrics("classes")}
    assert {n for n, v in values.items() if v is None} == {"auc", "average_precision"}
    assert roc(torch.from_numpy(p[:, 1].copy()), torch.from_numpy(y) == 1) is None
    assert values["accuracy"] == values["balanced_accuracy"]


def test_a_class_that_the_examples_lack_is_left_out_of_means_over_classes() -> None:
    p, y = drawn(4, 2, 4)
    p, y = p[y != 2], y[y != 2]
    each = [sk.roc_auc_score(y == c, p[:, c]) for c in (0, 1, 3)]
    assert ours("auc", p, y) == pytest.approx(np.mean(each), rel=EQUAL)
    each = [sk.average_precision_score(y == c, p[:, c]) for c in (0, 1, 3)]
    assert ours("average_precision", p, y) == pytest.approx(np.mean(each), rel=EQUAL)
    recalls = [(p.argmax(1)[y == c] == c).mean() for c in (0, 1, 3)]
    assert ours("balanced_accuracy", p, y) == pytest.approx(np.mean(recalls), rel=EQUAL)


def test_scores_that_are_all_equal_rank_nothing() -> None:
    p, y = np.full((10, 2), 0.5), np.array([0, 1] * 5)
    assert ours("auc", p, y) == 0.5 and ours("average_precision", p, y) == 0.5


def test_nothing_and_what_is_not_finite_have_no_metric() -> None:
    p, y = drawn(3, 0, 0, 6)
    for metric in all_metrics("classes"):
        assert metric(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)) is None
        broken = torch.from_numpy(p).clone()
        broken[2, 1] = math.nan
        assert metric(broken, torch.from_numpy(y)) is None


def test_a_certain_mistake_costs_a_finite_log_loss() -> None:
    p, y = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1, 1])
    assert ours("log_loss", p, y) == pytest.approx(sk.log_loss(y, p, labels=[0, 1]), rel=EQUAL)
