"""Word vectors in GloVe's text format (Pennington et al. 2014): a word and its numbers per line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from undrift.core.random import fold, normal
from undrift.errors import DataError
from undrift.guarded.limits import Unreadable
from undrift.guarded.text import lines_of

LARGEST = float(np.finfo(np.float32).max)
OFFER = "GloVe's vectors are offered at nlp.stanford.edu/projects/glove (glove.6B.300d.txt)"


def read_glove(
    path: Path | str, vocabulary: Sequence[str], rows: int | None = None, seed: int = 0
) -> Tensor:
    """Read the vectors of a vocabulary, [rows, width]; row 0, padding, is zero.

    A word that the file lacks gets normal numbers with the deviation of those that it has; they
    depend on the seed and the word alone.  Rows beyond the vocabulary are zero.
    """
    place = Path(path).expanduser()
    numbers = {word: k for k, word in enumerate(vocabulary)}
    try:
        found = dict(_vectors(place, {word.encode(): k for word, k in numbers.items() if k}))
    except (OSError, Unreadable) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{place} cannot be read ({cause}): check the path. {OFFER}") from error
    if not found:
        raise DataError(
            f"{place} has a vector for none of the {len(numbers)} words, e.g. "
            f"{', '.join(map(repr, vocabulary[2:5]))}: is it GloVe's text file? {OFFER}"
        )
    width, spread = len(next(iter(found.values()))), float(np.std(list(found.values())))
    made = torch.zeros(len(vocabulary) if rows is None else rows, width)
    for word, k in numbers.items():
        if k in found:
            made[k] = torch.from_numpy(found[k])
        elif k:
            made[k] = spread * normal(fold(seed, "glove", word), torch.arange(width))
    return made


def _vectors(
    path: Path, wanted: Mapping[bytes, int]
) -> Iterator[tuple[int, np.ndarray[tuple[int], np.dtype[np.float32]]]]:
    width = 0
    with path.open("rb") as file:
        for number, line in enumerate(lines_of(file), 1):
            # some words of the larger files hold spaces: numbers are counted from the end
            width = width or len(line.split()) - 1
            if number == 1 and width < 2:
                raise DataError(f"{path}, line 1 is no word with its numbers. {OFFER}")
            known = wanted.get(line.split(b" ", 1)[0])
            if known is None:
                continue
            cells = line.split()
            if len(cells) == width + 1:
                yield known, _numbers(cells[1:], f"{path}, line {number}")
            elif len(cells) <= width:
                raise DataError(
                    f"{path}, line {number} has {len(cells) - 1} numbers, line 1 has {width}: the "
                    "file is cut off or changed; unpack it again"
                )


def _numbers(cells: list[bytes], place: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    try:
        values = [float(cell) for cell in cells]
    except ValueError as error:
        raise DataError(f"{place}: {error}. Unpack the file again") from error
    if not all(abs(value) <= LARGEST for value in values):  # NaN compares false
        raise DataError(f"{place} holds a number that is not finite. Unpack the file again")
    return np.array(values, dtype=np.float32)
