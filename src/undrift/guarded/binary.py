"""Arrays, archives and compressed files from outside: what they claim is measured, not believed.

What every function here raises for a bad file is `Unreadable`; OSError is left to the caller.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import struct
import tarfile
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from undrift.guarded.limits import Unreadable, check, limit, over

CHUNK = 2**20
END_OF_ZIP, END_OF_ZIP64 = b"PK\x05\x06", b"PK\x06\x07"
INDEX_BYTES = 100  # of a zip's index per entry, on average
XZ_MEMORY = 2**28  # what decompressing may take beside its output
NOTES_BYTES = 2**20  # of a tar's own notes: long names, attributes
NOTES = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(gzip.BadGzipFile, EOFError, RuntimeError, ValueError, TypeError, LookupError),
    *(ArithmeticError, MemoryError, SyntaxError, tokenize.TokenError),
)


def unreadable(error: BaseException) -> Unreadable:
    """Turn what a decoder raised into our error."""
    if isinstance(error, Unreadable):
        return error
    return Unreadable(f"cannot be read ({type(error).__name__}: {str(error)[:200]})")


# -------------------------------------------------------------------------------------- arrays
def parse_npy(data: bytes) -> NDArray[Any]:
    """Read the bytes of a .npy file."""
    return read_npy(io.BytesIO(data), len(data))


def read_npy(file: IO[bytes], size: int) -> NDArray[Any]:
    """Read a .npy file of `size` bytes: its header may not promise other numbers than follow."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise Unreadable(f"format {version} of .npy is not read: write it with numpy.save")
        known = np.lib.format
        header = known.read_array_header_1_0 if version == (1, 0) else known.read_array_header_2_0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that Python 2 wrote
            shape, column_major, dtype = header(file)
        if dtype.hasobject:
            raise Unreadable("it holds Python objects, which are not read")
        wanted, there = math.prod(shape) * dtype.itemsize, size - file.tell()
        if wanted != there or min(shape, default=0) < 0:
            raise Unreadable(f"its header promises {wanted} bytes of numbers, it has {there}")
        made = np.empty(wanted, np.uint8)
        made.data[:] = file.read(wanted)
        return made.view(dtype).reshape(shape, order="F" if column_major else "C")
    except BROKEN as error:
        raise unreadable(error) from error


# ---------------------------------------------------------------------------------- compressed
def gunzip(data: bytes) -> bytes:
    """Unpack gzip, unless it becomes too large."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as opened:
            return whole(cast("IO[bytes]", opened), "what is unpacked")
    except BROKEN as error:
        raise unreadable(error) from error


def unxz(data: bytes, most: str) -> bytes:
    """Unpack xz, unless it becomes too large."""
    machine = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
    try:
        plain = machine.decompress(data, limit(most) + 1)
    except BROKEN as error:
        raise unreadable(error) from error
    check(most, "bytes when unpacked", len(plain))
    if not machine.eof:
        raise Unreadable("it ends before its data")
    return plain


def inflate(data: bytes | memoryview, most: int) -> bytes:
    """Unpack one zlib stream of at most so many bytes."""
    machine = zlib.decompressobj()
    plain = machine.decompress(data, most + 1)
    if len(plain) > most or not machine.eof:
        raise Unreadable("a compressed part is cut off or too large")
    return plain


# ------------------------------------------------------------------------------------ archives
def open_zip(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a zip whose index is of bounded size."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 2**16 - 64))
    tail = file.read()
    at = tail.rfind(END_OF_ZIP)
    if at < 0 or len(tail) < at + 22:
        raise Unreadable("cannot be read (BadZipFile: its end is missing)")
    if tail[max(0, at - 20) : at].startswith(END_OF_ZIP64):
        raise Unreadable("it is of the zip64 kind: pack fewer or smaller files")
    (index,) = struct.unpack("<I", tail[at + 12 : at + 16])
    check("archive_entries", "entries of the archive", index // INDEX_BYTES)
    return zipfile.ZipFile(file)


def open_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> IO[bytes]:
    """Open an entry to be read piece by piece."""
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # others unpack a piece as a whole, however large it becomes
        raise Unreadable(f"{entry.filename} is compressed in another way than deflate")
    check("data_bytes", f"bytes that {entry.filename} claims", entry.file_size)
    return archive.open(entry)


def tar_files(file: IO[bytes]) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Give name, size and content of all plain files in a tar, packed by gzip, bzip2 or not."""
    stream: Any = _Counted(_unpacked_tar(file))
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Entry) as archive:
        for number, entry in enumerate(archive, 1):
            check("archive_entries", "entries of the archive", number)
            opened = archive.extractfile(entry) if entry.isreg() else None
            if opened is not None:
                yield entry.name, entry.size, opened


def _unpacked_tar(file: IO[bytes]) -> Any:
    start = file.read(6)
    file.seek(0)
    if start[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=file)
    if start[:3] == b"BZh":
        return bz2.BZ2File(file)
    if start == b"\xfd7zXZ\0":
        raise Unreadable("it is packed by xz: pack it again by gzip")
    return file


class _Entry(tarfile.TarInfo):
    """A header of a tar that cannot ask for endless notes, or for going back."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Entry:
        made = super().frombuf(buf, encoding, errors)
        if made.size < 0 or (made.type in NOTES and made.size > NOTES_BYTES):
            raise Unreadable(f"an entry of the archive claims {made.size} bytes of notes")
        return made


class _Counted(io.RawIOBase):
    """A stream that is refused where it becomes longer than an archive may be."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._taken = file, 0

    def read(self, size: int = -1) -> bytes:
        """Read on, in pieces."""
        found = self._file.read(CHUNK if size < 0 else min(size, CHUNK))
        self._taken += len(found)
        check("archive_bytes", "bytes of the archive when unpacked", self._taken)
        return found


def whole(opened: IO[bytes], what: str) -> bytes:
    """Read to the end, whatever size was claimed."""
    most, made = limit("data_bytes"), bytearray()
    while chunk := opened.read(CHUNK):
        made += chunk
        if len(made) > most:
            raise over("data_bytes", f"bytes of {what}")
    return bytes(made)
