"""Metrics by name: the one place that says which direction is better, and what is in percent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from undrift.errors import ConfigError, unknown_name
from undrift.metrics import classes, numbers
from undrift.metrics.calibration import ece
from undrift.metrics.metric import Kind, Metric

METRICS: Mapping[str, Metric] = {
    m.name: m
    for m in (
        Metric("accuracy", "more", "classes", classes.accuracy, percent=True),
        Metric("balanced_accuracy", "more", "classes", classes.balanced_accuracy, percent=True),
        Metric("f1", "more", "classes", classes.f1),
        Metric("auc", "more", "classes", classes.auc),
        Metric("average_precision", "more", "classes", classes.average_precision),
        Metric("log_loss", "less", "classes", classes.log_loss),
        Metric("brier", "less", "classes", classes.brier),
        Metric("ece", "less", "classes", ece),
        Metric("rmse", "less", "numbers", numbers.rmse),
        Metric("mae", "less", "numbers", numbers.mae),
        Metric("r2", "more", "numbers", numbers.r2),
        Metric("pinball", "less", "numbers", numbers.pinball),
        Metric("poisson_deviance", "less", "counts", numbers.poisson_deviance),
    )
}
SHORT = {"pr_auc": "average_precision", "roc_auc": "auc"}  # other names of the same
_PINBALL = re.compile(r"pinball_(0?\.\d+)")
_WHOSE = re.compile(r"^(?:(?:avg|all)_)?(?:test|own|validation|train)_|^client_")
_OVER_CLIENTS = re.compile(r"_(?:mean|std|worst|worst10|undefined)$")
_LESS = ("loss", "norm", "drift", "seconds", "bytes", "error")  # of what is no metric, in a name


def metric_named(name: str) -> Metric | None:
    """Find a metric by its own name; `pinball_0.9` is that of the quantile 0.9.

    >>> metric_named("pr_auc").name, metric_named("pinball_0.9").better
    ('average_precision', 'less')
    """
    found = METRICS.get(SHORT.get(name, name))
    matched = None if found else _PINBALL.fullmatch(name)
    if matched is None or not float(matched[1]):
        return found
    return Metric(name, "less", "numbers", partial(numbers.pinball, quantile=float(matched[1])))


def metrics_for(
    names: Sequence[str], kind: Kind, place: str, quantile: float = 0.5
) -> list[Metric]:
    """Look metrics up that targets of one kind have; `pinball` is that of the task's quantile."""
    possible = [m.name for m in METRICS.values() if m.fits(kind)]
    found = [metric_named(name) for name in names]
    for name, metric in zip(names, found, strict=True):
        if metric is None:
            raise unknown_name("metric", name, possible, place)
    wrong = [m.name for m in found if m is not None and not m.fits(kind)]
    if wrong:
        what = "classes" if kind == "classes" else kind
        raise ConfigError(
            f"{place} = {wrong}: targets that are {what} have none of these; choose from "
            f"{', '.join(possible)}"
        )
    made = [m for m in found if m is not None]
    return [_of_quantile(m, quantile) if m.name == "pinball" else m for m in made]


def all_metrics(kind: Kind, quantile: float = 0.5) -> list[Metric]:
    """Give every metric of targets of one kind."""
    return metrics_for([m.name for m in METRICS.values() if m.fits(kind)], kind, "", quantile)


def _of_quantile(metric: Metric, quantile: float) -> Metric:
    function = partial(numbers.pinball, quantile=quantile)
    return Metric(metric.name, metric.better, metric.kind, function, metric.percent)


# ------------------------------------------------------------------------------ names in records
def metric_in(recorded: str) -> Metric | None:
    """Find the metric of a recorded name; None if it is not one of ours.

    >>> metric_in("avg_test_auc").name, metric_in("client_rmse_worst10").name
    ('auc', 'rmse')
    """
    name = _WHOSE.sub("", recorded, count=1)
    return metric_named(name) or metric_named(_OVER_CLIENTS.sub("", name))


def lower_is_better(recorded: str) -> bool:
    """Whether less of what is recorded under a name is more.

    >>> lower_is_better("test_loss"), lower_is_better("test_auc"), lower_is_better("test_rmse")
    (True, False, True)
    """
    if recorded.endswith(("_std", "_undefined")):
        return True
    metric = metric_in(recorded)
    if metric is not None:
        return metric.better == "less"
    return any(word in recorded for word in _LESS)


def in_percent(recorded: str, values: Iterable[float | None] = ()) -> bool:
    """Whether what is recorded under a name reads best in percent: a share with values in [0, 1].

    >>> in_percent("test_accuracy"), in_percent("test_auc"), in_percent("test_accuracy", [71.0])
    (True, False, False)
    """
    metric = metric_in(recorded)
    share = "accuracy" in recorded if metric is None else metric.percent
    if not share or recorded.endswith("_undefined"):
        return False
    return all(v is None or v != v or 0 <= v <= 1 for v in values)
