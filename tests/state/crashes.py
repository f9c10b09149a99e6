"""A disk that dies at the n-th operation, by a kill or by a power cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from undrift.state import disk

OPERATIONS = ("write_all", "pwrite_all", "fsync", "replace", "fsync_directory", "remove")
MOMENTS = ("before", "half", "after")
ENDS = ("kill", "power", "data lost")


class Death(BaseException):
    """The process is gone: nothing may catch this."""


class Disk:
    """Wraps the operations of `disk`, counts them, and dies at operation `n`.

    What was not synced is written down; a power cut takes it back.  "data lost" keeps the names
    and loses the bytes: the case that fsync before rename is for.
    """

    def __init__(self, patch: Any, backup: Path, n: int = 0, moment: str = "before") -> None:
        self.n, self.moment, self.calls = n, moment, []
        self._backup, self._undo = backup, []  # [(what, key, how to take it back)]
        self._dead = False
        backup.mkdir(exist_ok=True)
        for name in OPERATIONS:
            patch.setattr(disk, name, self._wrap(name, getattr(disk, name)))
        patch.setattr(disk, "open_rows", self._open_rows(disk.open_rows))
        patch.setattr(disk, "_os_fsync", lambda fd: None)  # we play the disk ourselves

    def _wrap(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def operation(*args: Any) -> None:
            if self._dead:
                raise Death
            self.calls.append((name, args))
            here = len(self.calls) == self.n
            if here and self.moment == "before":
                self._die()
            getattr(self, "_note_" + name)(*args)
            if here and self.moment == "half" and name in ("write_all", "pwrite_all"):
                fd, data, *offset = args
                real(fd, bytes(data)[: len(data) // 2], *offset)
                self._die()
            real(*args)
            if here:
                self._die()

        return operation

    def _die(self) -> None:
        self._dead = True
        raise Death

    def end(self, how: str) -> None:
        """Play the end: after a power cut only what was synced is left."""
        for what, _, take_back in reversed(self._undo):
            if how == "power" or (how == "data lost" and what == "data"):
                take_back()

    def _open_rows(self, real: Callable[[Path], int]) -> Callable[[Path], int]:
        def open_rows(path: Path) -> int:
            new = not path.exists()
            fd = real(path)
            if new:
                self._undo.append(("name", path.parent, lambda: path.unlink()))
            return fd

        return open_rows

    def _note_write_all(self, fd: int, data: Any) -> None:
        copy, size = os.dup(fd), os.fstat(fd).st_size
        self._undo.append(("data", os.fstat(fd).st_ino, lambda: os.ftruncate(copy, size)))

    def _note_pwrite_all(self, fd: int, data: Any, offset: int) -> None:
        copy, size = os.dup(fd), os.fstat(fd).st_size
        before = os.pread(fd, len(bytes(data)), offset)

        def take_back() -> None:
            os.pwrite(copy, before, offset)
            os.ftruncate(copy, size)

        self._undo.append(("data", os.fstat(fd).st_ino, take_back))

    def _note_fsync(self, fd: int) -> None:
        self._forget("data", os.fstat(fd).st_ino)

    def _note_fsync_directory(self, path: Path) -> None:
        self._forget("name", path)

    def _forget(self, what: str, key: Any) -> None:
        self._undo = [u for u in self._undo if u[:2] != (what, key)]

    def _note_replace(self, src: Path, dst: Path) -> None:
        old = self._keep(dst)

        def take_back() -> None:
            os.replace(dst, src)
            if old:
                os.link(old, dst)

        self._undo.append(("name", dst.parent, take_back))

    def _note_remove(self, path: Path) -> None:
        old = self._keep(path)
        if old:
            self._undo.append(("name", path.parent, lambda: os.link(old, path)))

    def _keep(self, path: Path) -> Path | None:
        if not path.exists():
            return None
        copy = self._backup / f"{len(self.calls)}-{path.name}"
        os.link(path, copy)
        return copy
