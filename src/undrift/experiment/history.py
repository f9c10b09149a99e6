"""The rounds of a run, as they were written down."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from undrift.errors import ConfigError, MissingExtra, unknown_name
from undrift.metrics import lower_is_better

Record = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class History(Sequence[Record]):
    """One record per round; `history["test_accuracy"]` is a curve.

    >>> history = History(({"round": 1, "test_accuracy": 0.5}, {"round": 2}))
    >>> history.curve("test_accuracy")
    ([1], [0.5])
    """

    records: tuple[Record, ...]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __getitem__(self, at: Any) -> Any:
        """Give a record by place, or the values of one metric."""
        return self.curve(at)[1] if isinstance(at, str) else self.records[at]

    @property
    def metrics(self) -> list[str]:
        """Name everything that was measured as a number, in the order of appearance."""
        names = {n: None for r in self.records for n, v in r.items() if _is_number(v)}
        return [n for n in names if n != "round"]

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Give the rounds in which a metric was measured, and its values."""
        pairs = [(r["round"], r[metric]) for r in self.records if _is_number(r.get(metric))]
        if not pairs and self.records and not any(metric in r for r in self.records):
            raise unknown_name("metric", metric, self.metrics, "history")
        return [int(r) for r, _ in pairs], [float(v) for _, v in pairs]

    def last(self, metric: str) -> float:
        """Give the value of the last round in which it was measured; NaN if it was not finite."""
        self.curve(metric)  # refuses an unknown name
        found = next((r[metric] for r in reversed(self.records) if metric in r), None)
        return float(found) if found is not None and _is_number(found) else math.nan

    def best(self, metric: str) -> float:
        """Give the best value so far: the smallest loss, the largest of everything else."""
        values = self.curve(metric)[1]
        return (min if lower_is_better(metric) else max)(values, default=math.nan)

    def rounds_to(self, target: float, metric: str = "test_accuracy") -> int | None:
        """Find the first round that reaches a target; None if none does."""
        below = lower_is_better(metric)
        pairs = zip(*self.curve(metric), strict=True)
        reached = (r for r, v in pairs if (v <= target if below else v >= target))
        return next(reached, None)

    def empty_rounds(self) -> list[int]:
        """Name the rounds whose whole cohort was left out: they changed nothing.

        >>> history = History(({"round": 1, "clients": [0, 2], "skipped": [0, 2]},))
        >>> history.empty_rounds()
        [1]
        """
        asked = (r for r in self.records if r.get("clients"))
        return [r["round"] for r in asked if len(r["skipped"]) == len(r["clients"])]

    def to_pandas(self) -> Any:
        """Make a table with one row per round."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtra("to_pandas needs pandas: pip install 'undrift[pandas]'") from error
        return pandas.DataFrame([dict(r) for r in self.records]).set_index("round")


def main_metric(records: Sequence[Record]) -> str:
    """Choose what to show first: test accuracy, or else the test loss.

    >>> main_metric([{"round": 1, "test_loss": 0.5}])
    'test_loss'
    """
    seen = {n for r in records[-20:] for n in r} | {n for r in records[:20] for n in r}
    for name in ("test_accuracy", "test_loss", "train_accuracy", "train_loss"):
        if name in seen:
            return name
    raise ConfigError("nothing was measured in these rounds")


def _is_number(value: Any) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and math.isfinite(value)
