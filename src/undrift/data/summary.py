"""How unlike each other the clients of a partition are.

Letters: N clients, M clients that hold an example, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from undrift.data.partitions.labels import Classes, count_examples, find_classes, is_continuous
from undrift.data.partitions.protocol import Floats, Ids, Labels
from undrift.errors import DataError

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, eq=False)
class LabelSkew:
    """Measures of the label distributions of the clients that hold an example."""

    num_classes: int
    entropy: Floats  # [M] in nats; 0 for a client of one class, log C for equal shares
    effective_classes: Floats  # [M] exp(entropy)
    classes_for_80: Floats  # [M] how many classes, largest first, cover 80 % of the examples
    distance_to_all: Floats  # [M] total variation to the labels of all clients together
    mean_distance: float  # total variation between two clients, over all pairs


@dataclass(frozen=True, eq=False)
class PartitionSummary:
    """Sizes and heterogeneity of a partition; `print` shows it as a table."""

    num_examples: int  # in the data, dealt or not
    sizes: Ids  # [N]
    skew: LabelSkew | None  # None for targets without classes

    @property
    def num_clients(self) -> int:
        """Count the clients, empty ones included."""
        return len(self.sizes)

    def rows(self) -> dict[str, Floats]:
        """Name the measures that differ from client to client."""
        if self.skew is None:
            return {"examples": self.sizes.astype(float)}
        return {
            "examples": self.sizes.astype(float),
            "label entropy (nats)": self.skew.entropy,
            "effective classes": self.skew.effective_classes,
            "classes covering 80 %": self.skew.classes_for_80,
            "distance to all data": self.skew.distance_to_all,
        }

    def quantiles(self) -> dict[str, list[float]]:
        """Tell the 5, 25, 50, 75 and 95 % quantile over clients of each measure."""
        return {name: np.quantile(v, QUANTILES).tolist() for name, v in self.rows().items()}

    def table(self) -> str:
        """Write the summary as aligned text."""
        heads = ["over clients", "mean", *(f"{q:.0%}" for q in QUANTILES)]
        quantiles = self.quantiles()
        body = [
            [name, *map(_short, [float(values.mean()), *quantiles[name]])]
            for name, values in self.rows().items()
        ]
        return "\n".join([*self._facts(), "", *_aligned([heads, *body])])

    def _facts(self) -> list[str]:
        dealt, empty = int(self.sizes.sum()), int((self.sizes == 0).sum())
        used = f"{dealt:,} of {self.num_examples:,} examples"
        facts = [f"{self.num_clients} clients ({empty} empty), {used}"]
        if self.skew is not None:
            facts[0] += f", {self.skew.num_classes} classes"
            facts.append(
                f"mean total-variation distance between two clients {self.skew.mean_distance:.3f}"
            )
        return facts

    def __str__(self) -> str:
        return self.table()


def summarise(labels: Labels, parts: Sequence[Ids]) -> PartitionSummary:
    """Measure a partition of examples with these labels.

    >>> summary = summarise(np.array([0, 0, 1, 1]), [np.array([0, 1]), np.array([2, 3])])
    >>> summary.skew.mean_distance, summary.skew.effective_classes.tolist()
    (1.0, [1.0, 1.0])
    """
    num_examples = count_examples(labels, 1, "summarise")
    check_parts(parts, num_examples)
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    if is_continuous(labels):
        return PartitionSummary(num_examples, sizes, None)
    counts = count_table(find_classes(labels, 1, "summarise"), parts)
    return PartitionSummary(num_examples, sizes, _skew(counts[sizes > 0]))


def check_parts(parts: Sequence[Ids], num_examples: int) -> None:
    """Refuse parts that hold no example, or one that does not exist."""
    if not any(len(part) for part in parts):
        raise DataError(f"none of the {len(parts)} clients holds an example; nothing to measure")
    for i, part in enumerate(parts):
        if len(part) and not (np.min(part) >= 0 and np.max(part) < num_examples):
            raise DataError(
                f"client {i} holds an example outside 0 to {num_examples - 1}; were these parts "
                "made for other labels?"
            )


def count_table(classes: Classes, parts: Sequence[Ids]) -> Ids:
    """Count the examples of each client and class: [N, C]."""
    width = len(classes.counts)
    return np.stack([np.bincount(classes.codes[part], minlength=width) for part in parts])


def _skew(counts: Ids) -> LabelSkew:
    p = counts / counts.sum(axis=1, keepdims=True)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=1) + 0.0  # no -0.0
    covered = np.cumsum(-np.sort(-counts, axis=1), axis=1)
    # 5 * covered < 4 * total is covered / total < 0.8 without rounding
    short = 5 * covered < 4 * counts.sum(axis=1, keepdims=True)
    everybody = counts.sum(axis=0) / counts.sum()
    return LabelSkew(
        num_classes=counts.shape[1],
        entropy=entropy,
        effective_classes=np.exp(entropy),
        classes_for_80=1.0 + short.sum(axis=1),
        distance_to_all=np.abs(p - everybody).sum(axis=1) / 2,
        mean_distance=_mean_pairwise(p),
    )


def _mean_pairwise(p: Floats) -> float:
    """Average total variation over all pairs of rows, without making the pairs.

    Sorted ascending, the r-th of M numbers is the larger of r pairs and the smaller of M - 1 - r.
    """
    num = len(p)
    if num < 2:
        return 0.0
    signs = 2 * np.arange(num) - (num - 1)
    differences = (np.sort(p, axis=0) * signs[:, None]).sum()
    # rounding may leave a little less than 0 when all are alike
    return max(0.0, float(differences / 2 / (num * (num - 1) / 2)))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return [
        "  ".join([line[0].ljust(widths[0]), *(map(str.rjust, line[1:], widths[1:]))])
        for line in lines
    ]
