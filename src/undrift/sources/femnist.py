"""FEMNIST: hand-written characters by writer, as LEAF deals them (Caldas et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.errors import unknown_name
from undrift.sources.emnist import CHARACTERS
from undrift.sources.examples import Examples, Info
from undrift.sources.kept import KeptSet, leaf_layouts, need
from undrift.sources.leaf import read_leaf
from undrift.sources.place import data_directory
from undrift.sources.users import (
    Sides,
    User,
    check_choice,
    check_share,
    hold_out,
    owners,
    targets,
)

SIDE = 28
NORMS = {"half": (0.5, 0.5), "unit": (0.0, 1.0)}

FEMNIST = KeptSet(
    "femnist",
    leaf_layouts("femnist"),
    "Its files are made by the scripts of LEAF (github.com/TalwalkarLab/leaf, data/femnist).",
)


def femnist(
    writers: int | None = None,
    min_examples: int = 1,
    test_share: float = 0.1,
    seed: int = 0,
    normalise: str = "default",
    directory: Path | str | None = None,
) -> Examples:
    """Load hand-written digits and letters, 62 classes; the clients are the writers.

    At most `writers` are taken, by luck of the seed.  A share of everybody's pictures is held out,
    unless the files are split already.
    """
    choice = check_choice("femnist", "writers", writers, min_examples, seed)
    share = check_share(test_share)
    known = ["default", *NORMS, "train"]
    if normalise not in known:
        raise unknown_name("normalisation", normalise, known, "sources.femnist")
    found = need(FEMNIST, Path(directory or data_directory()))
    read = read_leaf(found, _pictures, choice, "femnist")
    sides = read if isinstance(read, Sides) else hold_out(read, share, choice.seed)
    train_x, test_x = _joined(sides.train), _joined(sides.test)
    # rFedAvg's for EMNIST
    name = "half" if normalise == "default" else normalise
    mean, std = _train_norm(train_x) if name == "train" else NORMS[name]
    for x in (train_x, test_x):
        x.sub_(mean).div_(std)
    names = tuple(user.name for user in sides.train)
    info = Info(
        *("femnist", found.layout.form, found.path, name, (mean,), (std,)),
        *(tuple(CHARACTERS), names),
    )
    return Examples(
        *(train_x, targets(sides.train), test_x, targets(sides.test), len(CHARACTERS), info),
        *(owners(sides.train), owners(sides.test)),
    )


def _pictures(x: list[Any], y: list[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    pixels = np.array(x, dtype=np.float32)
    if pixels.shape != (len(x), SIDE * SIDE) or not ((pixels >= 0) & (pixels <= 1)).all():
        raise ValueError(f"x should hold rows of {SIDE * SIDE} numbers in [0, 1]")
    if not all(type(v) is int and 0 <= v < len(CHARACTERS) for v in y):
        raise ValueError(f"y should hold class numbers below {len(CHARACTERS)}")
    return pixels, np.array(y, dtype=np.int64)


def _joined(users: Sequence[User]) -> Tensor:
    rows = np.concatenate([user.x for user in users])
    return torch.from_numpy(rows).view(-1, 1, SIDE, SIDE)


def _train_norm(x: Tensor) -> tuple[float, float]:
    mean = x.mean(dtype=torch.float64)
    return float(mean), float((x.double() - mean).square().mean().sqrt()) or 1.0
