"""Loops in C for a CPU, built by the compiler of the machine they run on.

The source is part of the package.  It is built once, for this very processor, and kept in the
user's cache folder (`UNDRIFT_CACHE` names another one).  Where there is no compiler, or it cannot
build this, everything runs in torch's own operations; `UNDRIFT_NATIVE=0` asks for that.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from undrift.kernels.memory import folder
from undrift.kernels.own_files import NotOurs, make_own_folder, open_ours

log = logging.getLogger("undrift")

SOURCE = Path(__file__).parent / "dense.c"
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared",
         "-fPIC")  # fmt: skip
PATIENCE = 60  # seconds for a compiler
DIGEST = hashlib.sha256().digest_size  # bytes behind a built file
LARGEST = 100_000_000  # bytes; a built file has some hundred thousand


BITS = {torch.float32: 32, torch.float64: 64}


@cache
def loops(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Load the loops for a type, and build them if nobody has; None where that cannot be done."""
    if os.environ.get("UNDRIFT_NATIVE") == "0" or dtype not in BITS:
        return None
    try:
        file = _file(compiler := _compiler(), BITS[dtype])
        return _loaded(file) or _loaded(_build(compiler, BITS[dtype], file))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        log.info("loops in C are not used: %s", error)
        return None


def _loaded(file: Path) -> ctypes.CDLL | None:
    """Load a file that is there as it was built: half of one would end this process.

    It is opened once.  What was opened is checked, and this very file is loaded.
    """
    try:
        opened = open_ours(file)
    except (FileNotFoundError, NotOurs) as error:
        log.debug("%s is built anew: %s", file, error)
        return None
    with open(opened, "rb", closefd=False) as source:
        made = source.read(LARGEST)
    descriptor = Path(f"/proc/self/fd/{opened}")
    whole = made[-DIGEST:] == _digest(made[:-DIGEST])
    if whole and descriptor.exists():
        # it stays open: the next library may not get this name, by which loaded ones are known
        return _declared(ctypes.CDLL(str(descriptor)))
    os.close(opened)
    return _copied(file.name, made) if whole else None


def _copied(name: str, made: bytes) -> ctypes.CDLL:
    """Load a copy, where a descriptor has no path: in a folder that nobody else may enter."""
    with tempfile.TemporaryDirectory() as own:
        copy = Path(own, name)
        copy.write_bytes(made)
        return _declared(ctypes.CDLL(str(copy)))


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    number, address = ctypes.c_int64, ctypes.c_void_p
    found.undrift_dense_room.argtypes = [address, number]
    found.undrift_dense_train.argtypes = [address] * 9
    for function in (found.undrift_dense_room, found.undrift_dense_train):
        function.restype = number
    return found


def _flags(bits: int) -> list[str]:
    return [*FLAGS, f"-DBITS={bits}"]


def _file(compiler: str, bits: int) -> Path:
    """Name the file for this source, compiler and processor, in a folder that is ours alone."""
    made_of = [
        SOURCE.read_bytes(),
        _version(compiler),
        _processor(),
        *map(str.encode, _flags(bits)),
    ]
    name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:32]
    return make_own_folder(folder() / "native") / f"dense{bits}-{name}.so"


def _digest(made: bytes) -> bytes:
    return hashlib.sha256(made).digest()


def _build(compiler: str, bits: int, file: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        beside = Path(scratch, file.name)
        _run([compiler, *_flags(bits), "-x", "c", str(SOURCE), "-o", str(beside), "-lm"])
        made = beside.read_bytes()
        with beside.open("wb") as to:
            to.write(made + _digest(made))  # what follows a library's end is nobody's business
            to.flush()
            os.fsync(to.fileno())
        beside.chmod(0o700)
        beside.replace(file)  # another process may have made the same
    return file


def _compiler() -> str:
    """Name a C compiler: the one in `CC`, or a usual one."""
    for name in (os.environ.get("CC", ""), "gcc", "clang", "cc"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise FileNotFoundError("there is no C compiler (gcc, clang or cc; CC names another)")


def _version(compiler: str) -> bytes:
    return _run([compiler, "--version"])


def _processor() -> bytes:
    """Tell processors apart for which a compiler makes different code."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else [platform.processor()]
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(x for x in lines if x.startswith(kinds))).encode()


def _run(command: list[str]) -> bytes:
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip().splitlines()[:3]
        raise OSError(f"{command[0]} failed: {' '.join(told)}")
    return done.stdout


__all__ = ["loops"]
