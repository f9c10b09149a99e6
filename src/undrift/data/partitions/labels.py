"""Labels as a partition sees them: how many examples, which classes, how many of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from undrift.data.partitions.protocol import Ids, Labels
from undrift.errors import DataError

MOST_CLASSES = 10_000


class Classes(NamedTuple):
    """The classes that occur, numbered from 0 in ascending order of their labels."""

    codes: Ids  # [n] number of each example's class
    counts: Ids  # [C] examples of each class, at least one
    names: NDArray[Any]  # [C] the labels themselves

    @property
    def total(self) -> int:
        """Count the examples."""
        return len(self.codes)

    def rows(self, order: Ids) -> list[Ids]:
        """Sort the examples `order` [n] into one list per class, in that order."""
        # The sort is stable, so a shuffled order stays shuffled within a class.
        by_class = order[np.argsort(self.codes[order], kind="stable")]
        return np.split(by_class, np.cumsum(self.counts)[:-1])


def count_examples(labels: Labels, clients: int, owner: str) -> int:
    """Count the examples, and refuse when there are fewer of them than clients."""
    shape = labels.shape if isinstance(labels, Tensor) else as_array(labels, "labels").shape
    if not len(shape) or not shape[0]:
        raise DataError(f"{owner}: there are no examples to deal; labels have shape {list(shape)}")
    if shape[0] < clients:
        raise DataError(
            f"{owner}: {shape[0]} examples cannot give {clients} clients one each; ask for "
            f"{shape[0]} clients at most, or bring more data"
        )
    return int(shape[0])


def find_classes(labels: Labels, clients: int, owner: str) -> Classes:
    """Number the classes; refuse targets that have none."""
    count_examples(labels, clients, owner)
    if is_continuous(labels):
        raise DataError(
            f"{owner} deals by class, but the labels are floating-point numbers. For a regression "
            "use iid, quantity_skew or by_key; for classes convert them to integers"
        )
    values = as_array(labels, "labels")
    if values.ndim != 1:
        raise DataError(
            f"{owner} deals by class and needs one label per example, got labels of shape "
            f"{list(values.shape)}; give a flat array, e.g. the argmax of one-hot rows"
        )
    names, codes, counts = group(values, "labels")
    if len(names) > MOST_CLASSES:
        raise DataError(
            f"{owner}: the labels hold {len(names)} different values among {len(values)} examples, "
            f"more than {MOST_CLASSES} classes; are they ids, or targets of a regression?"
        )
    return Classes(codes, counts, names)


def is_continuous(labels: Labels) -> bool:
    """Tell whether the labels are numbers without classes."""
    if isinstance(labels, Tensor):
        return labels.is_floating_point() or labels.is_complex()
    return as_array(labels, "labels").dtype.kind in "fc"


def as_array(values: Labels, what: str) -> NDArray[Any]:
    """Bring labels or keys to numpy."""
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} cannot be made an array ({error}); give a flat list") from error


def group(values: NDArray[Any], what: str) -> tuple[NDArray[Any], Ids, Ids]:
    """Find the distinct values, the number of each entry's value, and how often each occurs."""
    if values.dtype == object:
        # What tables call missing: None, or NaN, which alone differs from itself.
        missing = [i for i, v in enumerate(values) if v is None or v != v]
    else:
        missing = np.flatnonzero(values != values).tolist()
    if missing:
        raise DataError(f"{what}: entry {missing[0]} is missing; fill it in or drop the example")
    try:
        names, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    except TypeError as error:
        raise DataError(f"{what} of several types cannot be compared ({error})") from error
    return names, codes.astype(np.int64), counts.astype(np.int64)
