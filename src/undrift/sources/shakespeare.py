"""Shakespeare by speaker: guess the next character; from LEAF's json or from a plain text."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.errors import DataError
from undrift.guarded.binary import unxz
from undrift.guarded.text import read_bytes
from undrift.models.settings import whole
from undrift.sources.examples import Examples, Info
from undrift.sources.kept import KeptFiles, KeptSet, Layout, leaf_layouts, need
from undrift.sources.leaf import read_leaf
from undrift.sources.place import data_directory
from undrift.sources.users import (
    Choice,
    Sides,
    User,
    check_choice,
    check_share,
    check_some,
    hold_out_later,
    owners,
    targets,
)

# LEAF's 80 characters in its order
ALPHABET = (
    "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]"
    + string.ascii_lowercase + "}"
)  # fmt: skip
SPACE = ALPHABET.index(" ")  # stands for every other character
NUMBERS = np.full(128, SPACE, dtype=np.int64)
NUMBERS[[ord(c) for c in ALPHABET]] = np.arange(len(ALPHABET))
HEAD = re.compile(r"\S.{0,60}(?=:$)")  # the line before a speech: "First Citizen:"

TEXTS = ("shakespeare/*.txt", "shakespeare/*.txt.xz", "shakespeare*.txt", "shakespeare*.txt.xz")
SHAKESPEARE = KeptSet(
    "shakespeare",
    (*leaf_layouts("shakespeare"), *(Layout("text", pattern, first=True) for pattern in TEXTS)),
    "LEAF's scripts make json files of the plays (github.com/TalwalkarLab/leaf, "
    "data/shakespeare); a plain text in which a line `NAME:` comes before each speech does as "
    "well.",
)


def shakespeare(
    speakers: int | None = None,
    min_examples: int = 200,
    length: int = 80,
    stride: int = 1,
    test_share: float = 0.2,
    seed: int = 0,
    directory: Path | str | None = None,
) -> Examples:
    """Load windows of characters and the character that follows; the clients are the speakers.

    A speaker's windows begin at every `stride`-th character of all that he says.  The last share of
    them is held out, unless the files are split already.
    """
    choice = check_choice("shakespeare", "speakers", speakers, min_examples, seed)
    share = check_share(test_share)
    whole("length", length)
    whole("stride", stride)
    found = need(SHAKESPEARE, Path(directory or data_directory()))
    read = _read(found, choice, length)
    sides = read if isinstance(read, Sides) else hold_out_later(read, share, length)
    train, test = ([user.take(slice(None, None, stride)) for user in users] for users in sides)
    info = Info(
        *("shakespeare", found.layout.form, found.path),
        class_names=tuple(ALPHABET),
        client_names=tuple(user.name for user in train),
        vocabulary=tuple(ALPHABET),
    )
    return Examples(
        *(_joined(train), targets(train), _joined(test), targets(test), len(ALPHABET), info),
        *(owners(train), owners(test)),
    )


def numbers(text: str) -> NDArray[np.int64]:
    """Number the characters of a text; one that is not in the alphabet counts as a space.

    >>> numbers("A b$").tolist() == [ALPHABET.index(c) for c in "A b "]
    True
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return NUMBERS[np.minimum(codes, 127)]  # 127 is no character of the alphabet


def _joined(users: Sequence[User]) -> Tensor:
    return torch.from_numpy(np.concatenate([user.x for user in users]))


def _read(found: KeptFiles, choice: Choice, length: int) -> Sides | list[User]:
    if found.layout.form != "text":
        return read_leaf(found, partial(_leaf_windows, length=length), choice, "shakespeare")
    people = choice.users(_windows(said, name, length) for name, said in _speakers(found.path))
    check_some(people, choice, "shakespeare", found.path)
    return people


def _leaf_windows(
    x: list[Any], y: list[Any], length: int
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    if not all(isinstance(text, str) and len(text) == length for text in x):
        raise ValueError(f"x should hold texts of {length} characters")
    if not all(isinstance(text, str) and len(text) == 1 for text in y):
        raise ValueError("y should hold single characters")
    return numbers("".join(x)).reshape(len(x), length), numbers("".join(y))


def _windows(said: str, name: str, length: int) -> User:
    text = numbers(said)
    if len(text) <= length:
        return User(name, np.zeros((0, length), dtype=np.int64), text[:0])
    # views of one text: nothing is copied before people are chosen
    return User(name, np.lib.stride_tricks.sliding_window_view(text, length)[:-1], text[length:])


def _speakers(path: Path) -> Iterator[tuple[str, str]]:
    """Read who says what: speeches are set apart by empty lines, each below its speaker's name."""
    speeches: dict[str, list[str]] = {}
    for block in re.split(r"\n[ \t]*\n", _text(path)):
        head, _, said = block.strip("\n").partition("\n")
        match = HEAD.match(head.strip())
        if match and said:
            speeches.setdefault(match[0], []).append(said)
    if not speeches:
        raise DataError(
            f"{path}: no speech begins with a line `NAME:`, so nobody can be told apart: put a "
            "text of that kind there, or LEAF's json files"
        )
    for name, texts in speeches.items():
        yield name, "\n".join(texts)


def _text(path: Path) -> str:
    try:
        data = read_bytes(path, "text_bytes")
        data = unxz(data, "text_bytes") if path.suffix == ".xz" else data
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): put a complete text there") from error
