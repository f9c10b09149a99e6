"""Each site's metrics, the worst site and tenth, and sites where a metric is not defined."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from undrift.metrics import METRICS, by_site, metrics_for, unequal, worst_first


def test_sites_are_judged_on_their_own_examples() -> None:
    draw = np.random.default_rng(0)
    owner = draw.integers(-1, 12, 400)
    y = draw.integers(0, 2, 400)
    y[owner == 4], owner[owner == 7] = 1, 8  # one class only; nobody
    p = draw.random(400).round(1)
    scores = torch.from_numpy(np.stack([1 - p, p], 1))
    metrics = metrics_for(["auc", "accuracy"], "classes", "")
    rows = by_site(metrics, scores, torch.from_numpy(y), torch.from_numpy(owner))
    assert [r.client for r in rows] == [c for c in range(12) if c != 7]
    known = []
    for row in rows:
        mine = owner == row.client
        assert row.examples == mine.sum()
        right = ((p > 0.5) == y)[mine].mean()
        assert row.values["accuracy"] == pytest.approx(right, abs=1e-12)
        if row.client == 4:
            assert row.values["auc"] is None
        else:
            known.append(sk.roc_auc_score(y[mine], p[mine]))
            assert row.values["auc"] == pytest.approx(known[-1], abs=1e-9)
    found = unequal("auc", [r.values["auc"] for r in rows])
    assert found == pytest.approx(
        {
            "client_auc_mean": np.mean(known),
            "client_auc_std": np.std(known),
            "client_auc_worst": min(known),
            "client_auc_worst10": min(known),
            "client_auc_undefined": 1,
        }
    )
    assert "client_accuracy_undefined" not in unequal(
        "accuracy", [r.values["accuracy"] for r in rows]
    )
    order = [r.values["auc"] for r in worst_first(rows, "auc")]
    assert order[:-1] == pytest.approx(sorted(known)) and order[-1] is None


def test_the_worst_error_is_the_largest() -> None:
    values = [float(v) for v in range(20)]
    found = unequal("rmse", values)
    assert (found["client_rmse_worst"], found["client_rmse_worst10"]) == (19.0, 18.5)


def test_a_metric_that_no_site_has_is_counted() -> None:
    found = unequal("auc", [None, None])
    assert found["client_auc_undefined"] == 2 and found["client_auc_mean"] is None
    assert METRICS["auc"].better == "more"
