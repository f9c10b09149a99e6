"""Reading LEAF's json files, one after the other: people with their raw examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrift.errors import DataError
from undrift.guarded.text import read_json
from undrift.sources.kept import KeptFiles
from undrift.sources.users import Choice, Sides, User, check_some

Parse = Callable[[list[Any], list[Any]], tuple[NDArray[Any], NDArray[np.int64]]]  # ValueError: bad


def read_leaf(found: KeptFiles, parse: Parse, choice: Choice, source: str) -> Sides | list[User]:
    """Read chosen people: both sides where the files are split already, else one list."""
    train = choice.users(read_users(found.train, parse))
    check_some(train, choice, source, found.path)
    if not found.test:
        return train
    names = {user.name for user in train}
    test = {user.name: user for user in read_users(found.test, parse) if user.name in names}
    if not test:
        raise DataError(
            f"{source}: the people in {found.test[0].parent} are not those who train, so nobody "
            "can be tested: split by sample (LEAF's `-t sample`), not by user"
        )
    return Sides(train, [test.get(user.name, user.take(slice(0))) for user in train])


def read_users(paths: Sequence[Path], parse: Parse) -> Iterator[User]:
    """Read every person of some files; a file is let go before the next is opened."""
    homes: dict[str, Path] = {}
    for path in paths:
        for user in _file_users(path, parse):
            if user.name in homes:
                raise DataError(
                    f"{user.name!r} is in {homes[user.name]} and in {path}: keep one of the two, "
                    "or put the halves of a split into folders named train and test"
                )
            homes[user.name] = path
            yield user


def _file_users(path: Path, parse: Parse) -> Iterator[User]:
    names, counts, data = _opened(path)
    for name, count in zip(names, counts, strict=True):
        own = data.pop(name, None)  # so that it is freed once it is read
        sound = isinstance(own, dict) and all(isinstance(own.get(k), list) for k in ("x", "y"))
        if not sound or not len(own["x"]) == len(own["y"]) == count:
            raise DataError(
                f"{path}: user_data of {name!r} should hold lists x and y of {count} examples, as "
                "num_samples says: make the file again"
            )
        try:
            x, y = parse(own["x"], own["y"])
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise DataError(
                f"{path}, user {name!r}: {error}. Check that the file is of this data set, or make "
                "it again"
            ) from error
        yield User(name, x, y)


def _opened(path: Path) -> tuple[list[str], list[int], dict[str, Any]]:
    try:
        read = read_json(path, "leaf_bytes")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no complete json file ({error}): make it again") from error
    parts = [read.get(k) for k in ("users", "num_samples", "user_data")] if _is_map(read) else []
    kinds = (list, list, dict)
    if not parts or not all(isinstance(p, k) for p, k in zip(parts, kinds, strict=True)):
        raise DataError(
            f"{path} is no file of LEAF: it should hold users, num_samples and user_data"
        )
    users, counts, data = parts
    sound = all(isinstance(u, str) for u in users) and all(type(n) is int for n in counts)
    if not sound or len(users) != len(counts):
        raise DataError(f"{path}: users and num_samples should be lists of the same length")
    return users, counts, data


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)
