"""Several variants over several seeds: who is better, by how much, and is that more than luck?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from undrift.errors import ConfigError
from undrift.experiment.baselines import ALWAYS, NONE, Baseline, Baselines
from undrift.experiment.history import History, main_metric
from undrift.experiment.statistics import (
    Difference,
    Spread,
    mean_of_curves,
    median,
    paired_difference,
    spread,
)
from undrift.metrics import in_percent, lower_is_better


class Variant(NamedTuple):
    """The runs of one variant, seed by seed."""

    label: str
    seeds: tuple[int, ...]
    histories: tuple[History, ...]


class Reached(NamedTuple):
    """When a target was reached; None for never."""

    each: tuple[int | None, ...]  # round by seed
    on_mean: int | None  # round at which the mean curve reaches it

    @property
    def typical(self) -> int | None:
        """The (lower) median over seeds; None if more than half never reach it."""
        found = median([math.inf if r is None else r for r in self.each])
        return None if math.isinf(found) else int(found)


class Line(NamedTuple):
    """One line of the table."""

    label: str
    last: Spread
    best: Spread
    reached: Reached | None
    difference: Difference | None  # of `last`, to the first variant
    diverged: int = 0  # seeds whose last value is not finite
    undefined: int = 0  # seeds whose last model has no such value, though its loss is finite


@dataclass(frozen=True, eq=False)
class Comparison:
    """Variants that ran on the same seeds."""

    name: str
    variants: tuple[Variant, ...]
    metric: str
    target: float | None = None
    baselines: Baselines = NONE

    @cached_property
    def percent(self) -> bool:
        """Whether the metric is a share, to be shown in %."""
        records = (r for v in self.variants for h in v.histories for r in h)
        values = [r.get(self.metric) for r in records]
        return in_percent(self.metric, [v for v in values if isinstance(v, int | float)])

    def lines(self) -> list[Line]:
        """Compute the table; the first variant is what others are compared with."""
        first = self.variants[0]
        return [self._line(v, None if v is first else first) for v in self.variants]

    def _line(self, variant: Variant, first: Variant | None) -> Line:
        last = [h.last(self.metric) for h in variant.histories]
        best = [h.best(self.metric) for h in variant.histories]
        gap = None if first is None else self._difference(variant, first)
        lost = [h for h, v in zip(variant.histories, last, strict=True) if math.isnan(v)]
        undefined = sum(map(_is_sound, lost))
        lost_count = len(lost) - undefined
        made = spread(last), spread(best), self._reached(variant), gap
        return Line(variant.label, *made, lost_count, undefined)

    def _difference(self, variant: Variant, first: Variant) -> Difference | None:
        those = dict(zip(first.seeds, first.histories, strict=True))
        pairs = [
            (mine.last(self.metric), those[seed].last(self.metric))
            for seed, mine in zip(variant.seeds, variant.histories, strict=True)
            if seed in those
        ]
        if not pairs:
            return None
        mine, other = ([pair[k] for pair in pairs] for k in (0, 1))
        return paired_difference(mine, other, self._grain() if mine != other else 0.0)

    def _grain(self) -> float:
        """Find the smallest step between values that were measured."""
        histories = [h for v in self.variants for h in v.histories]
        seen = sorted({value for h in histories for value in h.curve(self.metric)[1]})
        steps = [b - a for a, b in itertools.pairwise(seen) if b - a > 1e-9]
        return min(steps, default=0.0)

    def _reached(self, variant: Variant) -> Reached | None:
        if self.target is None:
            return None
        each = tuple(h.rounds_to(self.target, self.metric) for h in variant.histories)
        return Reached(each, mean_curve(variant, self.metric).rounds_to(self.target, self.metric))

    # -- words ---------------------------------------------------------------------------------
    def verdict(self) -> list[str]:
        """Say which variants differ by more than the seeds do, and whether any is of use."""
        return [*self._beside_each_other(), *self._beside_always()]

    def _beside_each_other(self) -> list[str]:
        if len(self.variants) < 2:
            return []
        first, lines = self.variants[0].label, self.lines()[1:]
        seeds = len(self.variants[0].seeds)
        if seeds < 2:
            return [f"One seed cannot tell a difference from luck: compare with seed={_seeds(3)}."]
        clear = [line for line in lines if line.difference is not None and line.difference.clear]
        groups = {"better": [], "worse": []}  # type: dict[str, list[str]]
        for line in clear:
            assert line.difference is not None
            gain = (line.difference.mean > 0) != lower_is_better(self.metric)
            groups["better" if gain else "worse"].append(f"{line.label} ({self._gap(line)})")
        told = [
            f"{how.capitalize()} than {first} by more than the seeds differ: {', '.join(names)}."
            for how, names in groups.items()
            if names
        ]
        lost = []
        for word in ("diverged", "undefined"):
            if some := [line for line in self.lines() if getattr(line, word)]:
                names = ", ".join(line.label for line in some)
                told.append(f"{word.capitalize()}, at least with one seed: {names}.")
                lost += some
        rest = [line for line in lines if line not in clear and line not in lost]
        if rest and self.lines()[0] not in lost:
            names = ", ".join(line.label for line in rest)
            pairs = min(line.difference.pairs if line.difference else 0 for line in rest)
            told.append(f"No clear difference to {first} over {min(pairs, seeds)} seeds: {names}.")
        return told

    def _beside_always(self) -> list[str]:
        """Say when no variant is better than the same answer for everybody."""
        for baseline in self.baselines.rows:
            if baseline.kind == ALWAYS and self.known(baseline):
                label = baseline.label.removeprefix("always ")
                saying = f"No variant is better than always saying {label}"
                gaps = [self._gain(variant, baseline) for variant in self.variants]
                if not any(gap.mean > 0 for gap in gaps):
                    return [f"{saying}."]
                if all(gap.low <= 0 for gap in gaps):  # never of a single seed: NaN
                    return [f"{saying} by more than the seeds differ."]
        return []

    def _gain(self, variant: Variant, baseline: Baseline) -> Difference:
        """Tell by how much a variant is better, seed by seed."""
        those = dict(zip(baseline.seeds, baseline.each(self.metric), strict=True))
        pairs = zip(variant.seeds, variant.histories, strict=True)
        both = [(h.last(self.metric), those[seed]) for seed, h in pairs if seed in those]
        mine, other = ([pair[k] for pair in both] for k in (0, 1))
        if lower_is_better(self.metric):
            mine, other = other, mine
        return paired_difference(mine, other, self._grain() if mine != other else 0.0)

    def known(self, baseline: Baseline) -> bool:
        """Whether a baseline has the metric, with every seed."""
        return not math.isnan(baseline.last(self.metric).mean)

    def _gap(self, line: Line) -> str:
        assert line.difference is not None
        mean, low, high = line.difference[:3]
        scale = 100 if self.percent else 1
        digits = ".1f" if self.percent else ".4g"
        unit = " points" if self.percent else ""
        return f"{scale * mean:+{digits}}{unit}, {scale * low:{digits}} to {scale * high:{digits}}"

    def header(self) -> list[str]:
        """Name the columns of the table."""
        made = ["variant", "last", "best so far"]
        if self.target is not None:
            made += [f"rounds to {self._value(self.target)}", "mean curve"]
        return [*made, f"vs {self.variants[0].label}", "95 % interval"]

    def cells(self, line: Line) -> list[str]:
        """Write one line of the table."""
        seeds = next(len(v.seeds) for v in self.variants if v.label == line.label)
        last = self._spread(line.last)
        for word in ("undefined", "diverged"):
            if count := getattr(line, word):
                last = f"{word} ({count} of {seeds})"
        made = [line.label, last, self._spread(line.best)]
        if line.reached is not None:
            longest = max(len(h) for v in self.variants for h in v.histories)
            never = f"> {longest}"
            both = (line.reached.typical, line.reached.on_mean)
            made += [never if r is None else str(r) for r in both]
        if line.difference is None:
            return [*made, "", ""]
        low, high = self._value(line.difference.low), self._value(line.difference.high)
        mark = " *" if line.difference.clear else ""
        interval = "" if math.isnan(line.difference.low) else f"{low} to {high}{mark}"
        return [*made, f"{self._value(line.difference.mean, '+')}", interval]

    def baseline_cells(self) -> list[list[str]]:
        """Write a line of each baseline that has the metric: its value stands under `last`."""
        known = [b for b in self.baselines.rows if self.known(b)]
        rest = [""] * (len(self.header()) - 2)
        return [[b.label, self._spread(b.last(self.metric)), *rest] for b in known]

    def _spread(self, value: Spread) -> str:
        middle = self._value(value.mean)
        return middle if math.isnan(value.std) else f"{middle} ± {self._value(value.std)}"

    def _value(self, value: float, sign: str = "") -> str:
        if math.isnan(value):
            return "-"
        return f"{100 * value:{sign}.1f}" if self.percent else f"{value:{sign}.4g}"

    def text(self) -> str:
        """Write the table and the verdict as plain text."""
        beside = self.baseline_cells()
        lines = aligned([self.header(), *map(self.cells, self.lines()), *beside])
        if beside:  # a line between variants and baselines
            lines.insert(len(lines) - len(beside), "-" * max(map(len, lines)))
        return "\n".join([*lines, "", *self.notes()])

    def markdown(self) -> str:
        """Write the table and the verdict as Markdown."""
        header = self.header()
        rule = ["---", *["--:"] * (len(header) - 1)]
        beside = [[f"*{cells[0]}*", *cells[1:]] for cells in self.baseline_cells()]
        rows = [header, rule, *map(self.cells, self.lines()), *beside]
        lines = [f"| {' | '.join(c.replace('|', chr(92) + '|') for c in row)} |" for row in rows]
        return "\n".join([f"# {self.name}", "", *lines, "", *(f"{n}\n" for n in self.notes())])

    def notes(self) -> list[str]:
        """Explain the table below it."""
        seeds = len(self.variants[0].seeds)
        name = self.metric.replace("_", " ") + (" in %" if self.percent else "")
        if seeds < 2:
            told = [f"{name.capitalize()}, one seed.", *self._lengths(), *self.baselines.notes]
            return [*told, *self.verdict()]
        what = f"{name.capitalize()}, mean ± standard deviation over {seeds} seeds"
        how = "last rounds are compared, paired by seed; * marks an interval without 0."
        told = [f"{what}; {how}", *self._lengths(), *self.baselines.notes]
        return [*told, *self.verdict()]

    def remarks(self) -> list[str]:
        """Give the notes without the verdict."""
        return [note for note in self.notes() if note not in self.verdict()]

    def _lengths(self) -> list[str]:
        found = sorted({len(h) for v in self.variants for h in v.histories})
        if len(found) == 1:
            return []
        return [f"Attention: the runs have different lengths, {found[0]} to {found[-1]} rounds."]


def _is_sound(history: History) -> bool:
    """Whether the last loss that was measured is finite."""
    losses = [n for n in ("test_loss", "train_loss") if any(n in r for r in history)]
    return bool(losses) and all(math.isfinite(history.last(n)) for n in losses)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Line up columns; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    made = []
    for row in rows:
        cells = [c.ljust(w) if i == 0 else c.rjust(w)
                 for i, (c, w) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        made.append("  ".join(cells).rstrip())
    return made


def _seeds(count: int) -> str:
    return ",".join(str(i) for i in range(count))


def mean_curve(variant: Variant, metric: str) -> History:
    """Average a metric over seeds, in the rounds in which all of them were measured."""
    curves = [dict(zip(*h.curve(metric), strict=True)) for h in variant.histories]
    means = mean_of_curves(curves)
    return History(tuple({"round": r, metric: v.mean} for r, v in means.items()))


class Aim(NamedTuple):
    """What runs are compared by, and the value that they are to reach."""

    metric: str
    target: float | None


def aim_of(history: History, metric: str | None, target: float | None, usual: float | None) -> Aim:
    """Choose metric and target; the experiment's `usual` target is one of its main metric."""
    main = main_metric(history)
    chosen = main if metric is None else metric
    if target is None and chosen == main:
        target = usual
    return Aim(chosen, target)


def comparison_of(
    name: str,
    runs: Sequence[tuple[str, int, History]],
    target: float | None = None,
    metric: str | None = None,
    order: Sequence[str] = (),
    baselines: Baselines = NONE,
) -> Comparison:
    """Group runs (label, seed, history) by label: first those of `order`, then as they come."""
    if not runs:
        raise ConfigError("there is no run to compare")
    known = {label for label, _, _ in runs}
    groups: dict[str, list[tuple[int, History]]] = {n: [] for n in order if n in known}
    for label, seed, history in runs:
        group = groups.setdefault(label, [])
        if any(seed == other for other, _ in group):
            raise ConfigError(
                f"{label!r} with seed {seed} is there twice: compare runs of one experiment, or "
                "give them labels of their own"
            )
        group.append((seed, history))
    variants = []
    for label, found in groups.items():
        found.sort(key=lambda pair: pair[0])
        seeds, histories = zip(*found, strict=True)
        variants.append(Variant(label, tuple(seeds), tuple(histories)))
    chosen = main_metric(runs[0][2]) if metric is None else metric
    return Comparison(name, tuple(variants), chosen, target, baselines)
