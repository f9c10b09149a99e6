"""Metrics of predictions: functions of tensors in float64, checked against scikit-learn.

`METRICS["auc"](probabilities, classes)` gives a float, or None where the metric is not defined.
"""

from undrift.metrics.calibration import Calibration, calibration
from undrift.metrics.classes import confusion
from undrift.metrics.curves import Curve, precision_recall, roc
from undrift.metrics.evaluation import evaluation, site_table
from undrift.metrics.meaning import Meaning
from undrift.metrics.metric import Kind, Metric
from undrift.metrics.named import (
    METRICS,
    all_metrics,
    in_percent,
    lower_is_better,
    metric_in,
    metric_named,
    metrics_for,
)
from undrift.metrics.sites import SiteRow, Sites, by_site, unequal, worst_first

__all__ = [
    "METRICS", "Calibration", "Curve", "Kind", "Meaning", "Metric", "SiteRow", "Sites",
    "all_metrics", "by_site", "calibration", "confusion", "evaluation", "in_percent",
    "lower_is_better", "metric_in", "metric_named", "metrics_for", "precision_recall", "roc",
    "site_table", "unequal", "worst_first",
]  # fmt: skip
