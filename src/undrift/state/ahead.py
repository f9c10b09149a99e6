"""Client states that will be asked for next are read while a device is busy with others."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.errors import UndriftError
from undrift.state.rows import Entry, Tier


class Reading(NamedTuple):
    """Rows that somebody reads now."""

    places: dict[int, int]  # client -> which of the rows is its
    entries: list[Entry | None]  # the versions that are read
    rows: Future[Tensor]


class Ahead:
    """One thread that reads a cohort's rows before they are asked for.

    A version is never written over while somebody may read it, so a client that got a new one in
    the meantime is found by its entry, and read again.
    """

    def __init__(self) -> None:
        self._reader: ThreadPoolExecutor | None = None
        self._reading: Reading | None = None

    def begin(self, tier: Tier, clients: Sequence[int], entries: list[Entry | None]) -> None:
        """Begin to read rows."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "undrift-states")
        places = {client: place for place, client in enumerate(clients)}
        rows = self._reader.submit(tier.read, list(clients), entries)
        self._reading = Reading(places, entries, rows)

    def read(self, tier: Tier, clients: list[int], entries: list[Entry | None]) -> Tensor:
        """Give rows [C, W]: those that were read ahead, where they are still what is asked for."""
        known = self._reading
        if known is None or not all(client in known.places for client in clients):
            return tier.read(clients, entries)
        where = [known.places[client] for client in clients]
        try:
            rows = known.rows.result()
        except UndriftError:  # of a row that may not be asked for: who asks finds out
            return tier.read(clients, entries)
        stale = [i for i, w in enumerate(where) if known.entries[w] != entries[i]]
        if not stale and where == list(range(len(rows))):
            return rows
        found = torch.empty(
            (len(clients), rows.shape[1]), dtype=rows.dtype, pin_memory=rows.is_pinned()
        )
        torch.index_select(rows, 0, torch.tensor(where, dtype=torch.int64), out=found)
        if stale:
            again = tier.read([clients[i] for i in stale], [entries[i] for i in stale])
            found[torch.tensor(stale)] = again
        return found

    def forget(self) -> None:
        """Wait for what is being read, and forget it."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.rows.exception()  # nobody asks for it, whatever it is

    def close(self) -> None:
        """End the thread."""
        self.forget()
        if self._reader is not None:
            self._reader.shutdown()
            self._reader = None
