"""Federations: who holds which examples, and how many of them have arrived.

Letters: N clients, n member entries, C clients of a cohort.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from undrift.core.tree import number, record, static
from undrift.data import gather
from undrift.data.checks import check_whole
from undrift.data.gather import Array, Pair, as_pair, as_tensor, finite_rows, kind
from undrift.data.spool import Rows, Spool, Streamed, limit_for, pieces
from undrift.errors import ConfigError, DataError

Indices = Sequence[int] | NDArray[np.integer] | Tensor


@record
class Arrival:
    """Examples that arrive over time: the share `first` at once, all of them after `rounds`.

    >>> Arrival(rounds=10).share(5)
    0.55
    """

    rounds: int = static()
    first: float = number(default=0.1, low=0, high=1, ends="(]")

    def __post_init__(self) -> None:
        check_whole("Arrival.rounds", self.rounds)

    def share(self, round: int) -> float:
        """Tell which share of its examples a client may use in a round, counted from 0."""
        return min(1.0, self.first + (1 - self.first) * round / self.rounds)


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """All clients' examples, and the list of rows that each client owns.

    Make one with `Federation.of`, `Federation.split` or `Federation.from_datasets`.
    """

    x: Rows  # [rows, ...]
    y: Rows  # [rows, ...]
    members: Tensor  # [n] row ids, client after client
    offsets: Tensor  # [N + 1] where each client's members start
    sizes: Tensor  # [N] always on the CPU: plans are shaped by it
    arrival: Arrival | None = None

    @classmethod
    def of(
        cls, clients: Sequence[tuple[Array, Array]], *, arrival: Arrival | None = None
    ) -> Federation:
        """Gather one (x, y) per client; a client may be empty.

        >>> x, y = torch.zeros(5, 2), torch.zeros(5, dtype=torch.long)
        >>> Federation.of([(x, y), (x[:3], y[:3])])
        Federation(2 clients, 8 examples, x [2] float32, y [] int64, cpu)
        """
        pairs = [as_pair(*_two(i, both), f"client {i}") for i, both in enumerate(_listed(clients))]
        _check_alike(pairs)
        full = [p for p in pairs if len(p.x)]
        sizes = torch.tensor([len(p.x) for p in pairs], dtype=torch.int64)
        x, y = torch.cat([p.x for p in full]), torch.cat([p.y for p in full])
        return _assemble(x, y, torch.arange(len(x)), sizes, arrival)

    @classmethod
    def split(
        cls,
        x: Array,
        y: Array,
        parts: Sequence[Indices],
        *,
        allow_shared: bool = False,
        arrival: Arrival | None = None,
    ) -> Federation:
        """Deal shared examples to clients by lists of indices; x and y are not copied.

        The order within a list is kept: it is the order in which examples arrive.

        >>> Federation.split(torch.zeros(5, 2), torch.zeros(5), [[0, 3], [4, 1, 2]]).sizes
        tensor([2, 3])
        """
        pair = as_pair(x, y, "the shared examples")
        _listed(parts)
        members, sizes = _dealt(parts, len(pair.x))
        made = _assemble(pair.x, pair.y, members, sizes, arrival)
        if not allow_shared:
            _check_owned_once(made)
        return made

    @classmethod
    def from_datasets(
        cls,
        clients: Sequence[gather.Client],
        *,
        keep: Literal["auto", "memory", "disk"] = "auto",
        folder: Path | str | None = None,
        arrival: Arrival | None = None,
    ) -> Federation:
        """Read one Dataset, DataLoader or iterable of batches (x, y) per client, once.

        Examples that do not fit into memory (`keep="disk"`: all) go to a file in `folder`, by
        default in the system's temporary folder.  Each local step fetches its batch from there.
        The file is deleted with the federation.

        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> data = TensorDataset(torch.zeros(5, 2), torch.zeros(5, dtype=torch.long))
        >>> Federation.from_datasets([data, DataLoader(data, batch_size=2, drop_last=True)])
        Federation(2 clients, 9 examples, x [2] float32, y [] int64, cpu)
        """
        listed = list(_listed(clients))
        _check_some([1] * len(listed))
        spool = Spool(limit_for(keep), None if folder is None else Path(folder))
        sizes = torch.zeros(len(listed), dtype=torch.int64)
        try:
            for i, pair in gather.read(listed):
                spool.add(pair)
                sizes[i] += len(pair.x)
            x, y = spool.finish()
        except BaseException:
            spool.discard()
            raise
        return cls(x, y, torch.arange(len(x)), _offsets(sizes), sizes, arrival)

    @property
    def num_clients(self) -> int:
        """Count the clients, empty ones included."""
        return len(self.sizes)

    @property
    def max_size(self) -> int:
        """Tell the size of the largest client."""
        return int(self.sizes.max())

    @property
    def device(self) -> torch.device:
        """Tell where examples are when they are trained on; on disk they stay where they are."""
        return self.members.device

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Federation:
        """Move the examples; `dtype` changes x and y where they are floating-point.

        Examples on disk stay there: batches are moved and changed as they are fetched.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"dtype must be floating-point, got {dtype}")
        device = self.device if device is None else torch.device(device)
        x, y = (v.to(device, dtype if v.is_floating_point() else v.dtype) for v in (self.x, self.y))
        members, offsets = self.members.to(device), self.offsets.to(device)
        now, before = (x, y, members), (self.x, self.y, self.members)
        if all(a is b for a, b in zip(now, before, strict=True)):
            return self
        moved = replace(self, x=x, y=y, members=members, offsets=offsets)
        if any(_narrower(*both) for both in ((x, self.x), (y, self.y))):
            _check_finite(moved)  # a narrower type may have overflowed
        return moved

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        """Copy out the examples of one client."""
        if not 0 <= i < self.num_clients:
            raise DataError(f"no client {i}: clients are numbered 0 to {self.num_clients - 1}")
        start = int(self.sizes[:i].sum())
        rows = self.members[start : start + int(self.sizes[i])]
        return self.x[rows], self.y[rows]

    def rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Look up row ids: ids [C], positions [C, ...] within each client's own examples.

        A position of -1 gives the client's own first row, which the caller masks: whatever one
        client's examples do to a model cannot touch another.
        """
        return rows_of(self.offsets, self.members, ids, positions)

    def available(self, round: int) -> Tensor:
        """Count the examples that each client may use in a round: [N], on the CPU."""
        if self.arrival is None:
            return self.sizes
        # 10 * 0.3 is a little above 3 in floating point and must not round up to 4.
        arrived = torch.ceil(self.sizes.double() * self.arrival.share(round) - 1e-9).long()
        return torch.maximum(arrived, (self.sizes > 0).long())  # a first example is there at once

    def __repr__(self) -> str:
        x, y = (f"{list(v.shape[1:])} {str(v.dtype)[6:]}" for v in (self.x, self.y))
        counts = f"{self.num_clients} clients, {len(self.members)} examples"
        place = f"{self.device}{', on disk' if isinstance(self.x, Streamed) else ''}"
        return f"Federation({counts}, x {x}, y {y}, {place})"


def rows_of(offsets: Tensor, members: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
    """Look up row ids: see `Federation.rows`.  A pure function of tensors."""
    starts = offsets[ids].view(-1, *[1] * (positions.dim() - 1))
    # an empty last client starts past the end
    places = (starts + positions.clamp(min=0)).clamp(max=len(members) - 1)
    return members[places]


def _listed(clients: Any) -> Any:
    one = isinstance(clients, Dataset | DataLoader)  # would be iterated item by item
    if one or isinstance(clients, dict | str) or not isinstance(clients, Iterable):
        advice = " (`Subset`s deal one dataset to clients)" if one else ""
        raise DataError(
            f"clients are given as a list, one entry each; got {type(clients).__name__}{advice}"
        )
    return clients


def _two(i: int, both: Any) -> tuple[Array, Array]:
    if not isinstance(both, tuple | list) or len(both) != 2:
        raise DataError(f"client {i} must be a pair (x, y), got {type(both).__name__}")
    return both[0], both[1]


def _check_some(sizes: Sequence[int]) -> None:
    if not sizes:
        raise DataError("a federation needs at least one client, got none")
    if not any(sizes):
        raise DataError(f"all {len(sizes)} clients are empty; give at least one an example")


def _check_alike(pairs: Sequence[Pair]) -> None:
    _check_some([len(p.x) for p in pairs])
    first = next(i for i, p in enumerate(pairs) if len(p.x))
    for i, pair in enumerate(pairs):
        for name, one, other in zip("xy", pairs[first], pair, strict=True):
            # an empty client often comes as torch.empty(0), which has no shape to compare
            if len(other) and kind(one) != kind(other):
                raise DataError(
                    f"{name} of client {i} is {kind(other)} per example but client {first} has "
                    f"{kind(one)}; bring all clients to one shape, type and device"
                )


def _dealt(parts: Sequence[Indices], num_rows: int) -> tuple[Tensor, Tensor]:
    """Join everybody's indices: all of them, client after client, and how many each has."""
    # a million rows of one array are views of it; a million tensors take minutes
    rows = parts.cpu().numpy() if isinstance(parts, Tensor) else parts
    lists = [_index_list(i, part) for i, part in enumerate(rows)]
    counts = [len(part) for part in lists]
    _check_some(counts)
    members, sizes = torch.from_numpy(np.concatenate(lists)), torch.tensor(counts)
    outside = ((members < 0) | (members >= num_rows)).nonzero()[:1]
    if len(outside):
        client = int(torch.searchsorted(sizes.cumsum(0), int(outside), right=True))
        raise DataError(
            f"client {client}: index {int(members[outside])} is out of range; there are {num_rows} "
            f"examples, numbered 0 to {num_rows - 1}"
        )
    return members, sizes


def _index_list(i: int, part: Indices) -> NDArray[np.int64]:
    if isinstance(part, np.ndarray) and part.dtype == np.int64 and part.ndim == 1:
        return part.astype(np.int64, copy=False)
    rows = as_tensor(
        part if isinstance(part, Tensor) else np.asarray(part), f"client {i}'s indices"
    )
    if not rows.numel():
        return np.zeros(0, dtype=np.int64)
    if rows.dim() != 1 or rows.dtype.is_floating_point or rows.dtype == torch.bool:
        raise DataError(f"client {i}: give a flat list of example indices, not {kind(rows)}")
    return rows.to("cpu", torch.int64).numpy()


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])


def _assemble(
    x: Tensor, y: Tensor, members: Tensor, sizes: Tensor, arrival: Arrival | None
) -> Federation:
    if x.device != y.device:
        raise DataError(f"x is on {x.device} but y is on {y.device}; move one of them")
    made = Federation(x, y, members.to(x.device), _offsets(sizes).to(x.device), sizes, arrival)
    _check_finite(made)
    return made


def _owner(federation: Federation, entry: int) -> int:
    offsets = federation.offsets.cpu()
    return int(torch.searchsorted(offsets, entry, right=True)) - 1


def _narrower(after: Rows, before: Rows) -> bool:
    if not after.is_floating_point():
        return False
    return torch.finfo(after.dtype).max < torch.finfo(before.dtype).max


def _check_finite(federation: Federation) -> None:
    for name, values in (("x", federation.x), ("y", federation.y)):
        if not (values.is_floating_point() or values.is_complex()):
            continue
        good = torch.cat([finite_rows(piece) for piece in pieces(values)])
        bad = (~good.to(federation.device)[federation.members]).nonzero()[:1]
        if len(bad):
            client = _owner(federation, int(bad))
            position = int(bad) - int(federation.offsets[client])
            raise gather.not_finite(name, client, position)


def _check_owned_once(federation: Federation) -> None:
    times = torch.bincount(federation.members, minlength=len(federation.x))
    twice = (times > 1).nonzero()[:1]
    if len(twice):
        entries = (federation.members == int(twice)).nonzero().flatten()[:2].tolist()
        a, b = (_owner(federation, entry) for entry in entries)
        owners = f"clients {a} and {b}" if a != b else f"client {a}, two times"
        raise DataError(
            f"example {int(twice)} is given to {owners}; give it once, or pass allow_shared=True"
        )
