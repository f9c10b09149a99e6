"""Everything about one model on one set of examples, as plain data for a file.

Curves are those of class 1 where there are two classes, else of each of up to ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from undrift.metrics.calibration import calibration
from undrift.metrics.classes import confusion
from undrift.metrics.curves import POINTS, Curve, precision_recall, roc
from undrift.metrics.meaning import Meaning
from undrift.metrics.metric import Metric
from undrift.metrics.sites import Sites, by_site, worst_first

MOST_CURVES = 10  # classes whose curves are kept
MOST_CONFUSED = 100  # classes whose confusion matrix is kept


def evaluation(meaning: Meaning, metrics: Sequence[Metric], outputs: Tensor, y: Tensor) -> Any:
    """Judge outputs by every metric; classes also get their tables and curves."""
    scores, truths = meaning.scores(outputs), meaning.truths(y)
    found: dict[str, Any] = {
        "examples": len(y),
        "kind": meaning.kind,
        "metrics": {m.name: m(scores, truths) for m in metrics},
    }
    if meaning.kind == "classes" and bool(scores.isfinite().all()):
        found |= _of_classes(meaning, scores, truths)
    return found


def _of_classes(meaning: Meaning, p: Tensor, y: Tensor) -> dict[str, Any]:
    classes = p.shape[1]
    names = meaning.names or tuple(map(str, range(classes)))
    bins = calibration(p, y)
    found: dict[str, Any] = {"classes": list(names[:classes])}
    if classes <= MOST_CONFUSED:
        found["confusion"] = confusion(p, y).tolist()
    found["calibration"] = {
        "examples": bins.examples.tolist(),
        "said": _plain(bins.said),
        "found": _plain(bins.found),
    }
    if classes <= MOST_CURVES:
        chosen = [1] if classes == 2 else range(classes)
        found["roc"] = [_curve(roc(p[:, c], y == c, POINTS), names[c]) for c in chosen]
        made = [_curve(precision_recall(p[:, c], y == c, POINTS), names[c]) for c in chosen]
        found["precision_recall"] = made
    return found


def _curve(curve: Curve | None, name: str) -> dict[str, Any]:
    """Write a curve; a class that has no curve has no points."""
    if curve is None:
        return {"class": name, "x": [], "y": [], "thresholds": []}
    thresholds = [None, *_plain(curve.thresholds[1:])]  # the first is infinite: no example is taken
    return {"class": name, "x": _plain(curve.x), "y": _plain(curve.y), "thresholds": thresholds}


def _plain(values: Tensor) -> list[float]:
    """Round as far as a picture needs it."""
    return [float(f"{v:.6g}") for v in values.tolist()]


def site_table(
    meaning: Meaning, metrics: Sequence[Metric], outputs: Tensor, y: Tensor, sites: Sites
) -> list[dict[str, Any]]:
    """Give a row for each site, the worst by the first metric first."""
    scores, truths = meaning.scores(outputs), meaning.truths(y)
    rows = by_site(metrics, scores, truths, meaning.owners(sites.owner, outputs))
    each = scores.numel() // max(1, len(y)) if meaning.kind != "classes" else 1
    return [
        {"site": sites.names[r.client], "client": r.client, "examples": r.examples // each}
        | r.values
        for r in worst_first(rows, metrics[0].name)
    ]
