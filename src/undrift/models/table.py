"""Word vectors that somebody else trained: read, checked, or stood in for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core.random import fold, normal
from undrift.errors import ConfigError
from undrift.guarded.binary import read_npy
from undrift.guarded.limits import check

Table = str | Tensor | NDArray[Any]  # [words, width], or the name of a .npy file that holds it


def read_table(given: Table | None, words: int, width: int) -> Tensor:
    """Give the vectors of all words, [words, width], on the CPU; None asks for a stand-in."""
    # whoever calls may be building on the meta device
    with torch.device("cpu"):
        table = _stand_in(words, width) if given is None else _as_table(given)
    if table.shape != (words, width):
        raise ConfigError(
            f"embedding has shape {list(table.shape)}, but vocabulary = {words} and width = "
            f"{width}: give one row per word, or set both to fit"
        )
    if not table.isfinite().all():
        raise ConfigError("embedding holds NaN or infinity: clean the word vectors first")
    return table


def _stand_in(words: int, width: int) -> Tensor:
    # Word vectors are the same for every seed, so what stands in for them is, too.
    draws = normal(fold(0, "word vectors"), torch.arange(words * width)).view(words, width)
    draws[0] = 0.0  # padding
    return draws.float()


def _as_table(given: Table) -> Tensor:
    values = _read(given) if isinstance(given, str) else given
    try:
        return torch.as_tensor(values).detach().to("cpu", torch.float32, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"embedding must be an array of numbers or the path of one: {error}"
        ) from error


def _read(path: str) -> NDArray[Any]:
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            check("vectors_bytes", "bytes of the file", size)
            return read_npy(file, size)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"embedding = {path!r} cannot be read as a .npy file ({error}): write it with "
            "numpy.save, one row per word"
        ) from error
