"""What a node keeps on its disk: states of its client, the last answers, its own probe.

A state is stored under the report that came with it.  The server names the report that it counted
last, so that a round that is done again, a report that got lost or a server that went back to an
older checkpoint all find the state that belongs to them.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from undrift.core.tree import Tree
from undrift.errors import CheckpointError, ConfigError, CorruptCheckpoint, FederationError
from undrift.federated.wire import Form, Malformed, pack, unpack
from undrift.state import disk

KEEP = 4  # states besides the one that counts: a server may go back to the older of two checkpoints
RUN = re.compile(r"[0-9a-f]{32}")
MARK = re.compile(r"[0-9a-f]{32}")
_STATE = re.compile(r"state-(\d{8,})-([0-9a-f]{32})")
_PHASES = ("probe", "train", "look")


def mark_of(data: bytes) -> str:
    """Name a report by its content."""
    return hashlib.sha256(data).hexdigest()[:32]


class Shelf:
    """The files of one run on one node."""

    def __init__(self, folder: Path, run: str) -> None:
        if not RUN.fullmatch(run):
            raise ConfigError(f"{run[:40]!r} does not name a run: 32 letters of 0-9 and a-f do")
        self.path = Path(folder) / run

    # -- states ------------------------------------------------------------------------------
    def state(self, mark: str, form: Form) -> Tree:
        """Read the state that came with a report."""
        for path, _, found in self._states():
            if found == mark:
                return self._tree(path, form)
        raise FederationError(
            f"the state that belongs to report {mark[:8]} is not on this node: restore its folder, "
            "or begin a new run"
        )

    def keep_state(self, round: int, mark: str, state: Tree, base: str) -> None:
        """Write the state that comes with a report; the one it came from is spared."""
        self._write(f"state-{round:08d}-{mark}", pack(state, {}))
        others = [one for one in self._states() if one[2] not in (mark, base)]
        for path, _, _ in others[:-KEEP]:
            disk.remove(path)

    def _states(self) -> list[tuple[Path, int, str]]:
        """List the states, oldest round first."""
        try:
            names = sorted(self.path.iterdir())
        except FileNotFoundError:
            return []
        found = [(p, _STATE.fullmatch(p.name)) for p in names]
        return sorted(
            ((p, int(m[1]), m[2]) for p, m in found if m), key=lambda one: (one[1], one[2])
        )

    # -- answers -----------------------------------------------------------------------------
    def answer(self, phase: str, request: str) -> bytes | None:
        """Find the answer to a request that was answered before."""
        path = self.path / f"answer-{_phase(phase)}"
        if not path.is_file():
            return None
        try:
            data = self._read(path)
        except CorruptCheckpoint:
            return None  # it is made again
        asked, answer = data[:32].decode("ascii", "replace"), data[32:]
        return answer if asked == request else None

    def keep_answer(self, phase: str, request: str, answer: bytes) -> None:
        """Write an answer down, before it is given."""
        self._write(f"answer-{_phase(phase)}", request.encode() + answer)

    # -- the own probe -----------------------------------------------------------------------
    def probe(self, seen: str, form: Form) -> Tree | None:
        """Read what the client saw of a model; None if it has to look again."""
        path = self.path / "own-probe"
        if not path.is_file():
            return None
        try:
            about, probes = unpack(self._read(path), form)
        except (CorruptCheckpoint, Malformed):
            return None
        return probes if about.get("seen") == seen else None

    def keep_probe(self, seen: str, probes: Tree) -> None:
        """Write down what the client saw of a model."""
        self._write("own-probe", pack(probes, {"seen": seen}))

    # -- once in a run -----------------------------------------------------------------------
    def note(self, name: str) -> bytes | None:
        """Read what was written down once in this run; None if it was not, or not yet."""
        path = self.path / name
        return self._read(path) if path.is_file() else None

    def keep_note(self, name: str, data: bytes) -> None:
        """Write something down that holds for the whole run."""
        self._write(name, data)

    def keep_file(self, name: str, data: bytes) -> Path:
        """Write a file for whoever owns this node: as it is, without a seal."""
        disk.make_directory(self.path, disk.SECRET_FOLDER)
        disk.write_atomically(self.path / name, [data], disk.SECRET)
        return self.path / name

    # -- files -------------------------------------------------------------------------------
    def _write(self, name: str, data: bytes) -> None:
        disk.make_directory(self.path, disk.SECRET_FOLDER)
        disk.sweep(self.path)
        disk.write_atomically(self.path / name, [hashlib.sha256(data).digest(), data], disk.SECRET)

    def _read(self, path: Path) -> bytes:
        try:
            whole = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if hashlib.sha256(whole[32:]).digest() != whole[:32]:
            raise CorruptCheckpoint(
                f"{path} is corrupt: restore it from a copy, or begin a new run"
            )
        return whole[32:]

    def _tree(self, path: Path, form: Form) -> Tree:
        try:
            return unpack(self._read(path), form)[1]
        except Malformed as error:
            raise CorruptCheckpoint(
                f"{path} holds another kind of state ({error}): was the experiment changed?"
            ) from error


def _phase(phase: str) -> str:
    assert phase in _PHASES, phase
    return phase
