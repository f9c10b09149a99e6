"""What some runs of one cell come to, in the way the paper's table tells it.

All accuracies are in per cent, as the papers print them; losses and norms are as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from undrift.experiment.comparison import Reached, Variant, mean_curve
from undrift.experiment.history import History
from undrift.experiment.statistics import spread
from undrift.metrics import in_percent

Numbers = dict[str, Any]
FIVE = 5  # rounds that rFedAvg's code averages over
CURVE_POINTS = 100  # of a curve that a record keeps
FAR = 3.0  # standard deviations that make a difference
SHOWS = ("last", "five", "best", "curve")


def score(paper: Mapping[str, Any], histories: Sequence[History], metric: str) -> Numbers:
    """Give the cell's headline (`value`) and everything else that the table may be read by."""
    last = [unit(metric) * h.last(metric) for h in histories]
    best = [unit(metric) * h.best(metric) for h in histories]
    made: Numbers = {"last": summed(last), "best": summed(best)}
    if paper["shows"] in ("last", "curve"):
        made = {**made["last"], **made}
    elif paper["shows"] == "five":
        made = {**_five(histories, metric), **made}
    else:
        columns = best_so_far(histories, metric, paper["at"])
        headline = columns[-1] if columns else summed([])
        made = {**headline, **made, "columns": columns}
    if paper.get("targets"):
        made["rounds_to"] = [reached(histories, metric, t) for t in paper["targets"]]
    lost = sum(diverged(h, metric) for h in histories)
    return {**made, **({"diverged": lost} if lost else {})}


def diverged(history: History, metric: str) -> bool:
    """Whether a run ended at numbers that are not finite; its accuracy may be that of a guess.

    >>> diverged(History(({"round": 1, "test_accuracy": 0.1, "test_loss": None},)), "test_accuracy")
    True
    """
    loss = metric.replace("accuracy", "loss")
    names = [metric, *([loss] if any(loss in record for record in history) else [])]
    return any(math.isnan(history.last(name)) for name in names)


def unit(metric: str) -> float:
    """Give what a metric is multiplied by: accuracies are shown in per cent."""
    return 100.0 if in_percent(metric) else 1.0


def summed(values: Sequence[float]) -> Numbers:
    """Give mean, deviation and the values of each seed.

    >>> summed([50.0, 52.0])
    {'value': 51.0, 'std': 1.414, 'each': [50.0, 52.0]}
    """
    mean, std = spread(list(values))
    return {"value": plain(mean), "std": plain(std), "each": [plain(v) for v in values]}


def plain(value: float) -> float | None:
    """Round for a file; None for what is not finite."""
    digits = 3 if abs(value) >= 0.1 else 6  # losses may be small
    return round(float(value), digits) if math.isfinite(value) else None


def _five(histories: Sequence[History], metric: str) -> Numbers:
    """Average the last five rounds of each run; `within` is their deviation, averaged over runs."""
    tails = [[100 * v for v in h[metric][-FIVE:]] for h in histories]
    lost = [math.isnan(h.last(metric)) for h in histories]
    each = [math.nan if bad else spread(t).mean for t, bad in zip(tails, lost, strict=True)]
    within = spread([spread(t).std for t in tails]).mean
    return {**summed(each), "within": plain(within)}


def best_so_far(histories: Sequence[History], metric: str, at: Sequence[int]) -> list[Numbers]:
    """Average over runs the best value up to some rounds; rounds not reached are left out."""
    made = []
    for round in at:
        if any(len(h) < round for h in histories):
            break
        each = [100 * History(tuple(h)[:round]).best(metric) for h in histories]
        made.append({"round": round, **summed(each)})
    return made


def reached(histories: Sequence[History], metric: str, target: float) -> Numbers:
    """Tell when a target was reached: by each run, by the median one, by the mean curve."""
    found = Reached(
        tuple(h.rounds_to(target, metric) for h in histories),
        mean_curve(_variant(histories), metric).rounds_to(target, metric),
    )
    return {
        "target": plain(unit(metric) * target),
        "median": found.typical,
        "on_mean": found.on_mean,
        "each": list(found.each),
    }


def curve(histories: Sequence[History], metric: str) -> Numbers:
    """Thin the mean curve and its deviation to what a picture shows."""
    mean = mean_curve(_variant(histories), metric)
    rounds, values = mean.curve(metric) if len(mean) else ([], [])
    step = max(1, math.ceil(len(rounds) / CURVE_POINTS))
    kept = sorted({*range(len(rounds) - 1, -1, -step)})
    by_round = [dict(zip(*h.curve(metric), strict=True)) for h in histories]
    stds = [spread([unit(metric) * one[rounds[i]] for one in by_round]).std for i in kept]
    return {
        "rounds": [rounds[i] for i in kept],
        "mean": [plain(unit(metric) * values[i]) for i in kept],
        "std": [plain(s) for s in stds],
    }


def _variant(histories: Sequence[History]) -> Variant:
    return Variant("cell", tuple(range(len(histories))), tuple(histories))


# ------------------------------------------------------------------------------ beside the paper
def printed(paper: Mapping[str, Any], cell: Sequence[float | int | str]) -> Numbers:
    """Name the numbers of a printed cell; of a figure, rounds to targets or nothing at all.

    >>> printed({"shows": "last", "targets": [0.5]}, [67.7, 0.2, ">500"])
    {'value': 67.7, 'std': 0.2, 'rounds_to': ['>500']}
    """
    if paper["shows"] == "best":
        return {"value": cell[-1], "std": None, "columns": list(cell)}
    if paper["shows"] == "curve":
        return {"value": None, "std": None, **({"rounds_to": list(cell)} if cell else {})}
    made: Numbers = {"value": cell[0], "std": cell[1]}
    return {**made, "rounds_to": list(cell[2:])} if len(cell) > 2 else made


def compared(ours: Mapping[str, Any], paper: Mapping[str, Any]) -> Numbers:
    """Give the difference, and whether it is more than three times the larger deviation."""
    if paper["value"] is None:
        return {"difference": None, "differs": None}
    gap = _gap(ours.get("value"), paper["value"])
    differs = far(gap, ours.get("std"), paper["std"])
    made: Numbers = {"difference": gap, "differs": True if ours.get("diverged") else differs}
    columns = zip(ours.get("columns", []), paper.get("columns", []), strict=False)
    both = [(c, _gap(c["value"], p)) for c, p in columns]
    if both:
        made["differences"] = [g for _, g in both]
        made["differs_at"] = [c["round"] for c, g in both if far(g, c["std"], None)]
    return made


def _gap(ours: float | None, paper: float) -> float | None:
    return None if ours is None else plain(ours - paper)


def far(gap: float | None, *stds: float | None) -> bool | None:
    """Tell whether a difference is a clear one; None where no deviation is known.

    >>> far(1.0, 0.2, 0.4), far(1.0, 0.2, None), far(1.0, None)
    (False, True, None)
    """
    known = [s for s in stds if s is not None]
    return None if gap is None or not known else abs(gap) > FAR * max(known)


def number(found: Mapping[str, Any], digits: int | None = None, missing: str = "") -> str:
    """Write mean ± deviation: accuracies in %, or small losses, which need more digits.

    >>> number({"value": 67.72, "std": 0.2}), number({"value": 33.1, "std": None}, 1)
    ('67.72 ± 0.20', '33.1')
    >>> number({"value": 0.00389, "std": 0.0002}), number({"value": None}, missing="-")
    ('0.0039 ± 0.0002', '-')
    """
    lost, value, std = found.get("diverged"), found.get("value"), found.get("std")
    if value is None:
        return "diverged" if lost else missing
    places = (2 if value >= 1 else 4) if digits is None else digits
    told = f"{value:.{places}f}" + ("" if std is None else f" ± {std:.{places}f}")
    return f"{told} ({lost} of {len(found['each'])} diverged)" if lost else told
