"""Read examples out of datasets, loaders and iterables, piece by piece.

Every error names the client and the example or batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data import default_collate as collate

from undrift.errors import DataError

Array = Tensor | NDArray[np.generic]
Client = Dataset[Any] | DataLoader[Any] | Iterable[Any]
NO_CLIENT = (str, bytes, dict, Tensor, np.ndarray)  # can be iterated all the same

MOST = 1024  # items of a dataset that are put together at a time,
PIECE = 2**25  # and bytes: what is held besides the examples themselves stays small


class Pair(NamedTuple):
    """Features and targets of equal length."""

    x: Tensor
    y: Tensor


# ------------------------------------------------------------------------------------- pairs
def as_tensor(values: Array, place: str) -> Tensor:
    """Make a tensor of what somebody calls an array."""
    if isinstance(values, np.ndarray):
        # torch warns about read-only arrays and refuses negative strides.
        values = np.require(values, requirements=["C", "W"])
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{place}: cannot be made a tensor ({error})") from error


def as_pair(x: Array, y: Array, owner: str) -> Pair:
    """Make features and targets of equal length; class numbers become int64."""
    pair = Pair(as_tensor(x, f"x of {owner}"), as_tensor(y, f"y of {owner}"))
    if not (pair.x.dim() and pair.y.dim()):
        raise DataError(f"{owner}: x and y need a first axis that counts the examples")
    if not pair.y.is_floating_point() and not pair.y.is_complex():
        pair = Pair(pair.x, pair.y.long())  # class numbers of any type, MNIST's uint8 too
    if len(pair.x) != len(pair.y):
        raise DataError(
            f"{owner}: x has {len(pair.x)} examples but y has {len(pair.y)}; give one target each"
        )
    return pair


def kind(v: Tensor) -> str:
    """Say what one example is: shape, type and device."""
    return f"{list(v.shape[1:])} {str(v.dtype)[6:]} on {v.device}"


def finite_rows(v: Tensor) -> Tensor:
    """Mark the examples without NaN or infinity: [n] bool."""
    if not (v.is_floating_point() or v.is_complex()):
        return torch.ones(len(v), dtype=torch.bool, device=v.device)
    return torch.isfinite(v).flatten(1).all(1) if v.dim() > 1 else v.isfinite()


# ------------------------------------------------------------------------------------ clients
def read(clients: Sequence[Client]) -> Iterator[tuple[int, Pair]]:
    """Read client after client: (client, some of its examples on the CPU), checked."""
    first: Pair | None = None
    for i, client in enumerate(clients):
        seen = 0
        for x, y in _pieces(i, client):
            pair = Pair(x.detach().cpu(), y.detach().cpu())
            first = pair if first is None else first
            _check_kind(pair, first, i, seen)
            _check_values(pair, i, seen)
            yield i, pair
            seen += len(pair.x)
        if not seen:
            raise DataError(
                f"client {i} gave no example: leave it out (a DataLoader with drop_last=True "
                "leaves out a last batch that is not full)"
            )


def _check_kind(pair: Pair, first: Pair, client: int, seen: int) -> None:
    for name, given, expected in zip("xy", pair, first, strict=True):
        if kind(given) != kind(expected):
            raise DataError(
                f"{name} of client {client}, example {seen}, is {kind(given)} but client 0 begins "
                f"with {kind(expected)}; bring all examples to one shape and type"
            )


def _check_values(pair: Pair, client: int, seen: int) -> None:
    for name, values in zip("xy", pair, strict=True):
        bad = (~finite_rows(values)).nonzero()[:1]
        if len(bad):
            raise not_finite(name, client, seen + int(bad))


def not_finite(name: str, client: int, example: int) -> DataError:
    """Build the error for an example that holds NaN or infinity."""
    return DataError(
        f"{name} of client {client}, example {example}, holds NaN or infinity; "
        "clean or drop it before building the federation"
    )


def _pieces(i: int, client: Any) -> Iterator[Pair]:
    """Choose how a client is read."""
    held = _held(i, client)
    if held is not None:
        return _slices(*held)
    if isinstance(client, Dataset):
        return _put_together(i, client)
    if isinstance(client, NO_CLIENT) or not isinstance(client, Iterable):
        raise DataError(
            f"client {i} must be a Dataset, a DataLoader or an iterable of batches (x, y), got "
            f"{type(client).__name__}; `Federation.of` takes tensors"
        )
    return _batches(i, client)


def _batches(i: int, loader: Iterable[Any]) -> Iterator[Pair]:
    """Take the batches that a loader makes."""
    for number, batch in _numbered(i, loader, "batch"):
        place = f"client {i}, batch {number}"
        x, y = _two(batch, place, "; `Federation.of` takes tensors")
        if not isinstance(y, Sequence) and not getattr(y, "ndim", 0):
            raise DataError(
                f"{place} is a single example: give the DataLoader a batch_size, or the examples "
                "one by one as a Dataset"
            )
        # a copy: some loaders fill the same memory again, others lend it by an open file each
        yield Pair(*(v.clone() for v in as_pair(x, y, place)))


def _put_together(i: int, dataset: Dataset[Any]) -> Iterator[Pair]:
    """Read a dataset item by item and make batches."""
    start = 0
    for items in _groups(i, dataset):
        for side in (0, 1):
            _check_forms(i, start, "xy"[side], [item[side] for item in items])
        x, y = ([item[side] for item in items] for side in (0, 1))
        places = [f"{name} of client {i}, example {start}" for name in "xy"]
        yield as_pair(_stacked(x, places[0]), _stacked(y, places[1]), f"client {i}")
        start += len(items)


def _groups(i: int, dataset: Dataset[Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Collect items: many small ones, few large ones."""
    group, size = [], 0
    for number, item in _numbered(i, _items(dataset), "example"):
        group.append(_two(item, f"client {i}, example {number}"))
        size += getattr(group[-1][0], "nbytes", 0)
        if len(group) == MOST or size >= PIECE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _items(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset):
        yield from dataset
        return
    for k in range(len(dataset)):
        yield dataset[k]


def _numbered(i: int, source: Iterable[Any], what: str) -> Iterator[tuple[int, Any]]:
    """Number what a source gives; whatever it raises gets the client and the number."""

    def walk() -> Iterator[Any]:
        yield from source  # inside, so that iter() fails where it is caught

    entries = walk()
    for number in count():
        try:
            entry = next(entries)
        except StopIteration:
            return
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(f"client {i}, {what} {number} cannot be read ({why})") from error
        yield number, entry


def _two(entry: Any, place: str, advice: str = "") -> tuple[Any, Any]:
    if not isinstance(entry, tuple | list) or len(entry) != 2:
        size = f" of {len(entry)}" if isinstance(entry, tuple | list | dict) else ""
        raise DataError(f"{place} must be a pair (x, y), got {type(entry).__name__}{size}{advice}")
    return entry[0], entry[1]


# -------------------------------------------------------------------------------------- items
def _check_forms(i: int, start: int, name: str, values: list[Any]) -> None:
    """Refuse items that differ: putting them together would fail, or change their type."""
    forms = [_form(v) for v in values]
    for k, form in enumerate(forms):
        if form != forms[0]:
            raise DataError(
                f"{name} of client {i}, example {start + k}, is {form} but example {start} is "
                f"{forms[0]}; bring all examples to one shape and type"
            )


def _form(v: Any) -> str:
    if isinstance(v, Tensor):
        return f"{list(v.shape)} {str(v.dtype)[6:]}"
    if isinstance(v, np.ndarray | np.generic):
        return f"{list(v.shape)} {v.dtype.name}"
    names = {bool: "bool", int: "int64", float: "float64"}
    return f"[] {names[type(v)]}" if type(v) in names else type(v).__name__


def _stacked(values: list[Any], place: str) -> Tensor:
    """Put items together; numbers, arrays and tensors."""
    try:
        if isinstance(values[0], np.ndarray | np.generic):
            return torch.from_numpy(np.stack(values))  # a copy: the items may be read-only
        made = collate(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{place} cannot be made a tensor ({error})") from error
    if not isinstance(made, Tensor):
        raise DataError(f"{place} is a {type(values[0]).__name__}: turn it into one tensor")
    return made


# ------------------------------------------------------------------------------------ tensors
def _held(i: int, client: Any) -> tuple[Pair, Tensor | None] | None:
    """Find the two tensors behind a TensorDataset or a Subset of one, and which rows are meant."""
    rows: Tensor | None = None
    while isinstance(client, Subset) and type(client).__getitem__ is Subset.__getitem__:
        chosen = torch.as_tensor(client.indices, dtype=torch.int64)
        rows = chosen if rows is None else chosen[_inside(i, rows, len(chosen))]
        client = client.dataset
    if not _is_plain(client):
        return None
    x, y = client.tensors
    pair = as_pair(x, y, f"client {i}")
    return pair, None if rows is None else _inside(i, rows, len(pair.x))


def _is_plain(client: Any) -> bool:
    """Whether a dataset is two tensors and nothing more, such as a transform of somebody else's."""
    own = isinstance(client, TensorDataset) and len(client.tensors) == 2
    return own and type(client).__getitem__ is TensorDataset.__getitem__


def _inside(i: int, rows: Tensor, size: int) -> Tensor:
    outside = rows[(rows < -size) | (rows >= size)]
    if len(outside):
        raise DataError(
            f"client {i}: a Subset asks for example {int(outside[0])} of a dataset that has {size}"
        )
    return rows


def _slices(pair: Pair, rows: Tensor | None) -> Iterator[Pair]:
    """Cut two tensors into pieces, without a loop over examples."""
    total = len(pair.x) if rows is None else len(rows)
    width = max(1, PIECE * len(pair.x) // max(1, pair.x.nbytes + pair.y.nbytes))
    for start in range(0, total, width):
        part = slice(start, start + width)
        yield Pair(*(v[part if rows is None else rows[part].to(v.device)] for v in pair))


__all__ = [
    "Array",
    "Client",
    "Pair",
    "as_pair",
    "as_tensor",
    "finite_rows",
    "kind",
    "not_finite",
    "read",
]
