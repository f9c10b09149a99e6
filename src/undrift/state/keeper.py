"""Checkpoints together with the client states that they refer to.

The order of things is what makes a crash at any moment harmless: rows reach the disk before a
checkpoint names them, and a row that a kept checkpoint names is never written over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from undrift.errors import ConfigError, CorruptCheckpoint
from undrift.state.checkpoint import Checkpoint, CheckpointFolder
from undrift.state.store import ClientStateStore

log = logging.getLogger("undrift")
CLIENTS = "clients."


class Keeper:
    """Saves and loads checkpoints of one run, whose client states live in `store`."""

    def __init__(self, store: ClientStateStore) -> None:
        self.store = store
        self._folders: dict[Path, CheckpointFolder] = {}
        self._tables: dict[int, dict[str, Tensor]] = {}  # rows that kept checkpoints refer to

    def save(
        self,
        folder: Path | str | CheckpointFolder,
        round: int,
        tensors: dict[str, Tensor],
        meta: dict[str, Any],
        config: dict[str, Any],
    ) -> Path:
        """Write a checkpoint; the previous one is kept too."""
        place = self._folder(folder)
        self.store.claim(place.path)
        self.store.seal()  # rows must be durable before a checkpoint refers to them
        rows, rows_meta = self.store.snapshot()
        # protected first: a save that fails late may have left a whole checkpoint behind
        self._protect({**self._tables, round: _light(rows)})
        everything = {**tensors, **{CLIENTS + n: v for n, v in rows.items()}}
        path = place.save(round, everything, {**meta, "clients": rows_meta}, config)
        self._protect(dict(sorted(self._tables.items())[-place.keep :]))
        return path

    def load(
        self, folder: Path | str | CheckpointFolder, config: dict[str, Any]
    ) -> Checkpoint | None:
        """Restore the newest checkpoint whose client states are whole; None if there is none."""
        place = self._folder(folder)
        self.store.claim(place.path)
        newest = place.load(config)
        if newest is None:
            return None
        kept = [c for c in place.kept() if c.round <= newest.round]
        found = self._first_whole(kept)
        self._protect({c.round: _light(part_of(c.tensors, CLIENTS)) for c in kept})
        return found

    def tidy(self, folder: Path | str | CheckpointFolder) -> None:
        """After a load, delete what a save that was killed had still to delete."""
        self._folder(folder).tidy()

    def _first_whole(self, kept: Sequence[Checkpoint]) -> Checkpoint:
        for number, found in enumerate(kept, 1):
            try:
                self.store.restore(part_of(found.tensors, CLIENTS), found.meta["clients"])
                return found
            except CorruptCheckpoint as error:
                if number == len(kept):
                    raise
                log.warning("round %d cannot be resumed: %s", found.round, error)
        raise AssertionError("load() found a checkpoint, so at least one is kept")

    def _folder(self, folder: Any) -> CheckpointFolder:
        """Find the folder again: it remembers what this run has saved and loaded."""
        if isinstance(folder, CheckpointFolder):
            return folder
        if not isinstance(folder, str | Path):
            raise ConfigError(f"checkpoints live in a folder, given by its path; got {folder!r}")
        return self._folders.setdefault(Path(folder).resolve(), CheckpointFolder(Path(folder)))

    def _protect(self, tables: dict[int, dict[str, Tensor]]) -> None:
        """Keep the rows that these checkpoints refer to."""
        self._tables = tables
        self.store.retain(tables.values())


def part_of(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take the tensors whose names start so, under the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _light(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out what protection does not need: in memory, the rows themselves."""
    return {n: t for n, t in rows.items() if n in ("ids", "slots")}
