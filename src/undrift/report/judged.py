"""How good a run's model is, as its evaluation.json says it: checked, ready for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from undrift.errors import DataError
from undrift.metrics import in_percent, lower_is_better

MOST_SITES = 200  # on the page, the worst first
MOST_CLASSES = 25  # of a confusion matrix on the page
MOST_POINTS = 1000  # of a curve


class Line(NamedTuple):
    """A curve of one class."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class Bins(NamedTuple):
    """Bins of probabilities: how many examples, what was said, how often it was true."""

    examples: tuple[int, ...]
    said: tuple[float, ...]
    found: tuple[float, ...]


class Site(NamedTuple):
    """One site and every metric."""

    name: str
    examples: int
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Judged:
    """One model: metrics as a whole, curves, and each site."""

    label: str
    round: int
    examples: int
    examples_of: str
    metrics: tuple[tuple[str, float | None], ...]
    classes: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()  # [true class][predicted class]
    calibration: Bins | None = None
    roc: tuple[Line, ...] = ()
    precision_recall: tuple[Line, ...] = ()
    sites: tuple[Site, ...] = ()  # the worst by the first metric first
    sites_of: str = ""
    card: str = ""  # Markdown

    def worst(self, place: int) -> tuple[str, float] | None:
        """Name the worst site by the metric at a place; None where no site has it."""
        known = [(s.name, v) for s in self.sites if (v := s.values[place]) is not None]
        pick = max if lower_is_better(self.metrics[place][0]) else min
        return pick(known, key=lambda pair: pair[1]) if known else None


def shown(metric: str, value: float | None) -> str:
    """Write a value of a metric.

    >>> shown("accuracy", 0.5), shown("auc", 0.51234), shown("auc", None)
    ('50.0 %', '0.5123', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    return f"{100 * value:.1f} %" if in_percent(metric, [value]) else f"{value:.4g}"


def judged_from(label: str, told: Any, card: str = "") -> Judged:
    """Read what evaluation.json says; refuse what it cannot have said."""
    try:
        return _judged(label, told, card)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"the evaluation of {label} is damaged ({error!r}): `undrift evaluate` writes it anew"
        ) from error


def _judged(label: str, told: Any, card: str) -> Judged:
    metrics = tuple((str(n), _number(v)) for n, v in told["metrics"].items())
    classes = tuple(map(str, told.get("classes", ())))
    confusion = tuple(tuple(map(_count, row)) for row in told.get("confusion", ()))
    if any(len(row) != len(confusion) for row in confusion):
        raise ValueError("the confusion matrix is not square")
    if confusion and len(confusion) != len(classes):
        raise ValueError("the confusion matrix has other classes")
    names = [name for name, _ in metrics]
    sites = [_site(row, names) for row in told.get("sites", ())]
    return Judged(
        label,
        _count(told["round"]),
        _count(told["examples"]),
        str(told["examples_of"]),
        metrics,
        classes,
        confusion,
        _bins(told["calibration"]) if "calibration" in told else None,
        tuple(map(_line, told.get("roc", ()))),
        tuple(map(_line, told.get("precision_recall", ()))),
        tuple(sites),
        str(told.get("sites_of", "")),
        card,
    )


def _site(row: Mapping[str, Any], names: Sequence[str]) -> Site:
    values = tuple(_number(row[name]) for name in names)
    return Site(str(row["site"]), _count(row["examples"]), values)


def _line(curve: Mapping[str, Any]) -> Line:
    x, y = (tuple(map(_share, curve[n][:MOST_POINTS])) for n in ("x", "y"))
    if len(x) != len(y):
        raise ValueError("a curve has x and y of other lengths")
    return Line(str(curve["class"]), x, y)


def _bins(told: Mapping[str, Any]) -> Bins:
    said, found = (tuple(map(_share, told[name])) for name in ("said", "found"))
    made = Bins(tuple(map(_count, told["examples"])), said, found)
    if len({*map(len, made)}) != 1:
        raise ValueError("the bins of the calibration have other lengths")
    return made


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value) if math.isfinite(value) else None


def _share(value: Any) -> float:
    found = _number(value)
    if found is None or not -1e-6 <= found <= 1 + 1e-6:
        raise ValueError(f"{value!r} is no share")
    return found


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value
