"""The only place that writes files.

Every operation is a small function of this module, looked up when it is called: a test wraps them
to count, to record their order and to die at the n-th one.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

from undrift.errors import CheckpointError

Bytes = bytes | bytearray | memoryview

TEMPORARY = ".undrift-tmp-"
_TEMPORARY = re.compile(re.escape(TEMPORARY) + r"(\d+)-(.+)")  # the process, the file's name
SECRET, SECRET_FOLDER = 0o600, 0o700  # modes of a secret: nobody but its owner may read it

_mkdir = Path.mkdir
_os_open = os.open
_os_write = os.write
_os_pwrite = os.pwrite
_os_fsync = os.fsync
_os_replace = os.replace
_os_remove = os.remove

_FREE_SPACE = "Free some space there or choose another folder"
_ALLOW = "Make the folder writable or choose another one"
_NEXT_MOVES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "Raise the file size limit (`ulimit -f`) or choose another file system",
    errno.EACCES: _ALLOW,
    errno.EPERM: _ALLOW,
    errno.EROFS: _ALLOW,
    errno.ENOTDIR: "A part of this path is a file; choose another folder",
    errno.EISDIR: "There is a folder of this name; choose another one",
    errno.EEXIST: "There is a file of this name; choose another one",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.ENOENT: "Create the folder, or check that the disk is still mounted",
}


def failure(action: str, path: Path, error: OSError, intact: str) -> CheckpointError:
    """Build the error for a failed disk operation: path, cause and next move."""
    cause = (error.strerror or str(error)).lower()
    move = _NEXT_MOVES.get(error.errno or 0, "Check the disk")
    return CheckpointError(f"cannot {action} {path}: {cause}. {intact}. {move}, then resume.")


def write_all(fd: int, data: Bytes) -> None:
    """Write every byte: one `write` may take only a part of them."""
    rest = _flat(data)
    while len(rest):
        rest = rest[_os_write(fd, rest) :]


def pwrite_all(fd: int, data: Bytes, offset: int) -> None:
    """Write every byte at `offset`."""
    rest = _flat(data)
    while len(rest):
        count = _os_pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count


def fsync(fd: int) -> None:
    """Wait until the bytes of a file are on the disk."""
    _os_fsync(fd)


def replace(src: Path, dst: Path) -> None:
    """Give `src` the name `dst`, atomically."""
    _os_replace(src, dst)


def fsync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk: without it a rename may be lost."""
    fd = _os_open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _os_fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Delete a file; one that is already gone is no error."""
    try:
        _os_remove(path)
    except FileNotFoundError:
        return


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its parents where they are missing; the mode is the directory's."""
    try:
        _mkdir(path, mode, parents=True, exist_ok=True)
    except OSError as error:
        raise failure("create the folder", path, error, "Nothing was written") from error


def open_rows(path: Path) -> int:
    """Open a file for `pread` and `pwrite`, creating it where it is missing."""
    make_directory(path.parent)
    try:
        return _os_open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise failure("open", path, error, "Nothing was written") from error


def open_append(path: Path) -> int:
    """Open a file that only ever grows at its end, creating it where it is missing."""
    try:
        return _os_open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise failure("open", path, error, "Nothing was written") from error


def write_atomically(path: Path, chunks: Iterable[Bytes], mode: int = 0o666) -> None:
    """Write a file that appears whole or not at all, and stays after a power cut.

    The previous file of that name is untouched until the new one is on the disk.  The file has its
    mode (less the umask) before its first byte: a secret is never readable for a moment.  What a
    killed process left of the same file is deleted.
    """
    # The name carries the process, so that `sweep` spares the file of a process that still writes.
    temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{path.name}"
    sweep(path.parent, path.name)
    try:
        _write_synced(temporary, chunks, mode)
        replace(temporary, path)
    except BaseException as error:
        _discard(temporary)
        if isinstance(error, OSError):
            intact = "What was there before is untouched"
            raise failure("write", path, error, intact) from error
        raise
    try:
        fsync_directory(path.parent)
    except OSError as error:
        risk = "It is complete but may not survive a power cut"
        raise failure("sync the folder of", path, error, risk) from error


def _write_synced(path: Path, chunks: Iterable[Bytes], mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    if mode == SECRET:
        remove(path)  # a stray file of this name would keep its own mode, and its readers
    fd = _os_open(path, flags | (os.O_EXCL if mode == SECRET else os.O_TRUNC), mode)
    try:
        for chunk in chunks:
            write_all(fd, chunk)
        fsync(fd)
    finally:
        os.close(fd)


def _discard(temporary: Path) -> None:
    try:
        remove(temporary)
    except OSError:
        return  # the first error tells more; `sweep` gets the file later


def is_temporary(name: str) -> bool:
    """Whether a file of this name is one of ours that was never completed."""
    return _TEMPORARY.fullmatch(name) is not None


def sweep(directory: Path, name: str | None = None, *, alone: bool = False) -> list[Path]:
    """Delete the temporary files that killed processes left behind, and list them.

    With `name`, only those of one file.  `alone` says that a lock keeps others away: then none of
    these files is still being written, whoever has the number of its process now.
    """
    strays = []
    for path in sorted(directory.glob(f"{TEMPORARY}*")):
        found = _TEMPORARY.fullmatch(path.name)
        if found and name in (None, found[2]) and (alone or not _lives(int(found[1]))):
            _discard(path)
            strays.append(path)
    return strays


def _lives(process: int) -> bool:
    # Our own number means an earlier process that had it: we are not writing while we sweep.
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _flat(data: Bytes) -> memoryview:
    view = memoryview(data)
    # `cast` refuses a view without elements.
    return view.cast("B") if view.nbytes else memoryview(b"")
