"""A little of a data set, or random examples of its shape where it is not there; `--tiny`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.random import fold, integers, normal
from undrift.errors import DataError, unknown_name
from undrift.experiment.names import sections
from undrift.sources import Examples, Info

FORM = "random stand-in"
TEST = 40  # examples to test on
CLIENTS = 12  # of a data set whose clients are people


class Kind(NamedTuple):
    """What examples of a data set look like."""

    shape: tuple[int, ...]
    classes: int
    words: int = 0  # of a vocabulary; 0: the inputs are numbers
    people: bool = False


KINDS: Mapping[str, Kind] = {
    "mnist": Kind((1, 28, 28), 10),
    "fashion-mnist": Kind((1, 28, 28), 10),
    "emnist": Kind((1, 28, 28), 26),
    "cifar10": Kind((3, 32, 32), 10),
    "cifar100": Kind((3, 32, 32), 100),
    "femnist": Kind((1, 28, 28), 62, people=True),
    "sent140": Kind((25,), 2, words=3000, people=True),
    "shakespeare": Kind((80,), 80, words=80, people=True),
}


def few(of: str, examples: int = 120, settings: str = "") -> Examples:
    """Take a few examples of a data set, or random ones of its shape.

    `settings` are the data set's own, as NAME=VALUE with commas between.
    """
    given = _read(settings)
    try:
        load = sections()["data"].get(of)
        whole = None if load is None else load(**given)
    except DataError:  # it is not here
        whole = None
    return stand_in(of, examples, given) if whole is None else _cut(whole, examples)


def few_table(data: Mapping[str, Any], examples: int) -> dict[str, Any]:
    """Write the `data` section that takes little of another one."""
    given = ",".join(f"{n}={v}" for n, v in data.items() if n != "use")
    table = {"use": "undrift.papers.stand_in:few", "of": data["use"], "examples": examples}
    return {**table, "settings": given} if given else table


def _read(settings: str) -> dict[str, Any]:
    pairs = (pair.split("=", 1) for pair in settings.split(",") if pair)
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


def _cut(whole: Examples, examples: int) -> Examples:
    """Keep a few examples that can be dealt as all can: of every class alike, or of few people."""
    train = _few_rows(whole.train_y, whole.train_clients, whole.classes, examples)
    test = _few_rows(whole.test_y, whole.test_clients, whole.classes, TEST)

    def kept(values: Tensor | None, rows: Tensor) -> Tensor | None:
        return None if values is None else values[rows]

    return replace(
        whole,
        train_x=whole.train_x[train],
        train_y=whole.train_y[train],
        test_x=whole.test_x[test],
        test_y=whole.test_y[test],
        train_clients=kept(whole.train_clients, train),
        test_clients=kept(whole.test_clients, test),
    )


def _few_rows(labels: Tensor, owners: Tensor | None, classes: int, count: int) -> Tensor:
    if owners is not None:
        people = owners.unique()[:CLIENTS]
        rows = torch.isin(owners, people).nonzero().flatten()
        return rows[_in_turns(owners[rows], count)]
    return _in_turns(labels, count) if classes else torch.arange(min(count, len(labels)))


def _in_turns(groups: Tensor, count: int) -> Tensor:
    """Choose the first of every group, then the second ones, ...: so many in all, ascending.

    >>> _in_turns(torch.tensor([7, 7, 7, 2, 2, 9]), 4).tolist()
    [0, 1, 3, 5]
    """
    _, codes, sizes = groups.unique(return_inverse=True, return_counts=True)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    turns = torch.empty_like(codes)
    turns[codes.argsort(stable=True)] = torch.arange(len(codes)) - starts
    return turns.argsort(stable=True)[:count].sort().values


def stand_in(of: str, examples: int, settings: Mapping[str, Any]) -> Examples:
    """Draw random examples; labels go round, so that every class is there.

    >>> stand_in("cifar10", 20, {"pixels": 28})
    Examples(cifar10: 20 to train, 40 to test, x [3, 28, 28], 10 classes)
    """
    if of not in KINDS:
        raise unknown_name("data set with a stand-in", of, list(KINDS), "--tiny")
    kind = KINDS[of]
    if "pixels" in settings:
        kind = kind._replace(shape=(kind.shape[0], settings["pixels"], settings["pixels"]))
    if "letters" in settings:
        kind = kind._replace(classes=settings["letters"])
    x, y = _drawn(kind, examples + TEST), torch.arange(examples + TEST) % kind.classes
    owners = torch.arange(examples + TEST) // kind.classes % CLIENTS if kind.people else None
    rows = slice(0, examples), slice(examples, None)
    train, test = (None if owners is None else owners[part] for part in rows)
    info = Info(of, FORM)
    return Examples(x[rows[0]], y[rows[0]], x[rows[1]], y[rows[1]], kind.classes, info, train, test)


def _drawn(kind: Kind, count: int) -> Tensor:
    total = torch.Size((count, *kind.shape)).numel()
    key = fold(0, "stand-in")
    if kind.words:
        ids = integers(key, torch.arange(total), 1, kind.words)
        return ids.view(count, *kind.shape)
    return normal(key, torch.arange(total)).float().view(count, *kind.shape)
