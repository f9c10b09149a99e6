"""Examples to train and to test on, as a source gives them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor


class Info(NamedTuple):
    """Where examples came from and what was done to them."""

    source: str
    form: str  # "idx files", "npm package", "generated", ...
    path: Path | None = None
    normalise: str = "unit"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()  # where clients are natural and have names
    feature_names: tuple[str, ...] = ()  # of the columns of a table
    vocabulary: tuple[str, ...] = ()  # of a text: what the numbers 0, 1, ... in x stand for
    target_scale: tuple[float, float] = (0.0, 1.0)  # of numbers: y * second + first, in own units
    preparation: Any = None  # of a table: how its columns became x and y, see undrift.tabular
    dropped: int = 0  # rows of a table that were left out, for they have no target


@dataclass(frozen=True, eq=False)
class Examples:
    """Features and targets; `classes` is 0 where targets are numbers.

    Sources with natural clients also say whose each example is.
    """

    train_x: Tensor  # [n, ...] float32, or for a text [n, length] int64
    train_y: Tensor  # [n] int64, or [n, 1] float32
    test_x: Tensor
    test_y: Tensor
    classes: int
    info: Info
    train_clients: Tensor | None = None  # [n] int64, the client of each example
    test_clients: Tensor | None = None
    embedding: Tensor | None = None  # [words, width] float32, a vector for each word of a text

    def __repr__(self) -> str:
        x, n, m = list(self.train_x.shape[1:]), len(self.train_x), len(self.test_x)
        what = f"{self.classes} classes" if self.classes else "numbers"
        lost = f", {self.info.dropped} dropped" if self.info.dropped else ""
        return f"Examples({self.info.source}: {n} to train, {m} to test{lost}, x {x}, {what})"
