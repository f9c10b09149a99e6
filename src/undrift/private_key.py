"""The private key of a simulation: all its noise follows from it, so nobody else may have it.

It is drawn from the operating system and kept in a file that its owner alone can read, so that a
resumed run draws the same noise.  It is in no checkpoint, no experiment and no report.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from undrift.core.noise import KEY_BYTES, Secret
from undrift.errors import CheckpointError, ConfigError
from undrift.state import disk

NAME = "private-key"  # beside the checkpoints of a run, until it is complete


class PrivateKey:
    """The key of one trainer: of a file that the user names, given, or drawn for this run alone."""

    def __init__(self, path: Path | str | Secret | None = None) -> None:
        given, path = (path, None) if isinstance(path, Secret) else (None, path)
        if path is not None and not isinstance(path, str | Path):
            raise ConfigError(f"private_key is the path of a key file, got {type(path).__name__}")
        self.path = None if path is None else Path(path).expanduser()
        self._secret = given if self.path is None else kept_secret(self.path)
        self._derived: tuple[Any, Secret] | None = None
        self._kept: Path | None = None

    def secret(self, of: Any, described: Callable[[], dict[str, Any]]) -> Secret:
        """Give the secret of a run, which differs between runs that one key is used for.

        Equal noise on different means could be subtracted.  `of` tells whether the run has changed
        since it was last described.
        """
        if self._secret is None:
            self._secret = Secret.drawn()
        if self._derived is None or self._derived[0] != of:
            told = json.dumps(described(), sort_keys=True)
            self._derived = (of, self._secret.derived(told))
        return self._derived[1]

    def load(self, folder: Path) -> None:
        """Take the key that a run has kept; a run whose key is gone goes on with another one."""
        if self.path is None and (folder / NAME).exists():
            self._secret, self._derived = read_secret(folder / NAME), None
            self._kept = folder

    def keep(self, folder: Path) -> None:
        """Keep the key in a folder, where `load` finds it."""
        if self.path is not None or self._kept == folder:
            return
        if self._secret is None:
            self._secret = Secret.drawn()
        disk.make_directory(folder)
        _write(folder / NAME, self._secret)
        self._kept = folder

    def forget(self, folder: Path) -> None:
        """Delete the key of a run that is complete: nobody can subtract its noise any more."""
        if self.path is None:
            disk.remove(folder / NAME)
            self._kept = None

    def __str__(self) -> str:
        if self.path is None:
            return "noise from a private key of this run, which is deleted when the run is complete"
        return (
            f"noise from the private key in {self.path}: it is reproducible, and whoever has that "
            "file can subtract it. What is said of epsilon holds while the key stays secret"
        )


def kept_secret(path: Path) -> Secret:
    """Read a key file; where there is none, draw a key and write it."""
    if not path.exists():
        disk.make_directory(path.parent)
        _write(path, Secret.drawn())
    return read_secret(path)


def read_secret(path: Path) -> Secret:
    """Read a key file that nobody else can read or exchange."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"cannot read the private key {path}: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(file.fileno())
        text = file.read(4 * KEY_BYTES)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
        raise ConfigError(f"the private key {path} is no file of yours: name another path")
    if about.st_mode & 0o077:
        raise ConfigError(
            f"others can read the private key {path} (mode {about.st_mode & 0o777:04o}): it is no "
            "secret any more. Delete it, and a new one is drawn"
        )
    try:
        return Secret(bytes.fromhex(text.decode("ascii").strip()))
    except (UnicodeDecodeError, ValueError, ConfigError):
        # what the file holds is not quoted: it may be a key
        raise ConfigError(
            f"the private key {path} is not {2 * KEY_BYTES} hexadecimal digits: name a path where "
            "there is no file, and a key is drawn"
        ) from None


def _write(path: Path, secret: Secret) -> None:
    disk.write_atomically(path, [secret.hex().encode() + b"\n"], disk.SECRET)
