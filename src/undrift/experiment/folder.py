"""A run is a folder.

experiment.toml      everything that decides the run (experiment.json for own objects)
environment.json     versions, device and command, one entry per start
model.json           the network by name and settings, and what its outputs mean
preparation.json     of a table: how its columns become numbers
plan.json            choices of the engine that decide rounding
rounds.jsonl         one line per round, only ever appended to
model.safetensors    loads into the plain nn.Module
evaluation.json      every metric of that model, curves, and each site by name
checkpoint/          where a killed run goes on
policy-*             a copy of the policy that steers it, where one does
summary.json         written when the run is complete
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import nn

from undrift.errors import ChangedExperiment, CheckpointError, ConfigError
from undrift.experiment.history import History
from undrift.experiment.tables import Table, differences, parse_table, write_table
from undrift.guarded.limits import Unreadable
from undrift.guarded.text import lines_of, parse_json, read_text
from undrift.rules.policy import copy_of_policy, is_kept_policy, use_kept_policies
from undrift.state import disk
from undrift.state.checkpoint import CheckpointFolder
from undrift.state.plain import differences as changes_of
from undrift.state.plain import told

_MANY = "... and {} more; if nobody changed it, restore its experiment.toml, which is damaged"
MAY_CHANGE = (
    *("rounds", "label", "name", "evaluate.target"),  # a longer run is the same run
    "evaluate.baselines",  # which are no part of it
    *("engine.actors", "engine.gpus", "engine.address"),  # and so is one with other owners
    "engine.private_key",  # or with a key that lies elsewhere
)


class RunFolder:
    """Reads and writes one run."""

    def __init__(self, path: Path | str) -> None:
        if not isinstance(path, str | Path) or "\0" in str(path):
            raise ConfigError(f"a run is kept in a folder, given by its path; got {path!r}")
        self.path = Path(path)
        try:
            if self.path.exists() and not self.path.is_dir():
                raise ConfigError(f"{self.path} is a file: a run needs a folder of its own")
        except OSError as error:
            raise ConfigError(
                f"{str(path)[:60]!r}... cannot be a folder: {error.strerror}"
            ) from error
        self.checkpoint = self.path / "checkpoint"
        self.rows = self.path / "clients.rows"
        self._log: int | None = None
        self._end = 0  # of the rounds in their file, as this process has left it

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes away from this folder."""
        disk.make_directory(self.path)
        lock = _Lock(disk.open_append(self.path / "lock"))
        try:
            self._take(lock.fd)
            for place in (self.path, self.checkpoint):
                disk.sweep(place, alone=True)
            yield
        finally:
            lock.close()
            self.close()

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{self.path} is being run by another process: wait for it, or choose another "
                "folder with --out"
            ) from error

    # -- what the run is -----------------------------------------------------------------------
    def begin(self, table: Table) -> None:
        """Write down the experiment, or that it is to have more rounds; it is not complete."""
        old = self.table()
        before = -1 if old is None else old.get("rounds")
        if old != table and (not isinstance(before, int) or table["rounds"] >= before):
            for source in set(_policies(table)) - set(_policies(old)):
                self._write(*copy_of_policy(source))
            self._write_table(table)
        for name in ("summary.json", "evaluation.json"):
            disk.remove(self.path / name)

    def check(self, table: Table) -> None:
        """Refuse a folder of another experiment, with the difference, and of other files."""
        old = self.table()
        if old is None:
            self._check_strangers()
            return
        if not isinstance(old.get("rounds"), int):
            raise CheckpointError(
                f"the experiment in {self.path} is damaged (rounds = {old.get('rounds')!r}): "
                "restore it, or delete the folder to start anew"
            )
        found = differences(old, table)
        changed = [line for line in found if line.split(":")[0] not in MAY_CHANGE]
        if "auto" in (_device(old), _device(table)):  # which is whatever the machine has
            changed = [line for line in changed if not line.startswith("engine.device:")]
        described = [line for line in changed if line.startswith("trainer.fingerprint:")]
        if changed := described or changed:  # by another version, in another way: nothing matches
            rest = [_MANY.format(len(changed) - 5)] if len(changed) > 6 else []
            told = "\n".join(f"  {line}" for line in [*changed[: 5 if rest else 6], *rest])
            raise ChangedExperiment(
                f"{self.path} holds another experiment:\n{told}\n"
                "Choose another folder with --out, or undo the change to go on here"
            )

    def _check_strangers(self) -> None:
        """Refuse a folder of others; what is written before experiment.toml is our own."""
        mine = {"lock", self.rows.name, "environment.json"}
        names = sorted(p.name for p in self.path.iterdir()) if self.path.is_dir() else []
        names = [n for n in names if not (is_kept_policy(n) or disk.is_temporary(n))]
        if found := [name for name in names if name not in mine]:
            raise ChangedExperiment(
                f"{self.path} holds other files ({', '.join(found[:3])}) and no experiment.toml: "
                "restore it, or choose an empty folder with --out"
            )

    def table(self) -> Table | None:
        """Read the experiment of this folder; None if it has none."""
        use_kept_policies(self.path)
        for name, parse in (("experiment.toml", parse_table), ("experiment.json", _parse_json)):
            path = self.path / name
            if path.is_file():
                try:
                    return parse(_read(path), str(path))
                except ConfigError as error:
                    raise CheckpointError(
                        f"{error}: restore the file, or delete the folder to start anew"
                    ) from error
        return None

    def _write_table(self, table: Table) -> None:
        if "trainer" in table:
            self._write_json("experiment.json", table)
        else:
            self._write("experiment.toml", write_table(table).encode())

    def starts(self) -> list[Any]:
        """Read the starts so far."""
        path = self.path / "environment.json"
        past = _parse_json(_read(path), str(path)) if path.is_file() else {}
        starts = past.get("starts", [])
        return starts if isinstance(starts, list) else []

    def started(self, environment: Mapping[str, Any]) -> None:
        """Add one start to environment.json."""
        self._write_json("environment.json", {"starts": [*self.starts(), dict(environment)]})

    def check_code(self, code: Mapping[str, Any]) -> None:
        """Refuse a complete run of code that has changed since: its results are another's."""
        last = self.starts()[-1:]
        stored = last[0].get("code") if last and isinstance(last[0], dict) else None
        changes = [] if stored is None else changes_of(stored, parse_json(json.dumps(_plain(code))))
        if changes:
            raise ChangedExperiment(
                f"{self.path} is a complete run of other code:\n{told(changes)}\n"
                "Choose another folder with --out, or undo the change to see its results"
            )

    def home(self) -> Path | None:
        """Tell where the experiment file lay, whose folder has the run's own parts."""
        path = self.path / "environment.json"
        with suppress(CheckpointError, KeyError, IndexError, TypeError, ValueError):
            return Path(_parse_json(_read(path), str(path))["starts"][-1]["home"])
        return None

    # -- rounds --------------------------------------------------------------------------------
    def history(self) -> History:
        """Read the rounds; a line that a crash left unfinished is not one."""
        return History(tuple(record for record, _ in self._lines()))

    def _lines(self) -> list[tuple[dict[str, Any], int]]:
        """Read (record, where its line ends in the file)."""
        path, end = self.path / "rounds.jsonl", 0
        found: list[tuple[dict[str, Any], int]] = []
        if not path.is_file():
            return found
        try:
            with path.open("rb") as file:
                for line in lines_of(file):
                    end += len(line)
                    record = _parse_line(line)
                    if record is None or record.get("round") != len(found) + 1:
                        break
                    found.append((record, end))
        except (OSError, Unreadable) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        return found

    def has_begun(self) -> bool:
        """Whether a round was written down, or another file says that there was one."""
        files = ("rounds.jsonl", "summary.json", "model.safetensors")
        rounds = CheckpointFolder(self.checkpoint).rounds
        return bool(rounds) or any((self.path / name).is_file() for name in files)

    def damage(self) -> str:
        """Say where the sound rounds end, and why there."""
        path, lines = self.path / "rounds.jsonl", self._lines()
        end = lines[-1][1] if lines else 0
        if not path.is_file():
            return "it is missing"
        if path.stat().st_size == end:
            return f"it ends after line {len(lines)}"
        with path.open("rb") as file:
            file.seek(end)
            record, number = _parse_line(next(lines_of(file), b"")), len(lines) + 1
        if record is None:
            return f"line {number} is not whole"
        return f"line {number} tells of round {record.get('round')!r}"

    def check_rounds(self, rounds: int) -> None:
        """Refuse rounds that are fewer than a checkpoint was promised."""
        count = len(self._lines())
        if count < rounds:
            raise CheckpointError(
                f"{self.path / 'rounds.jsonl'} has {count} sound rounds ({self.damage()}) but the "
                f"checkpoint is at round {rounds}: restore the file, or delete the folder to start "
                "anew"
            )

    def cut(self, rounds: int) -> History:
        """Forget lines after a round: it is trained again, to the same numbers."""
        self.check_rounds(rounds)
        kept = self._lines()[:rounds]
        path = self.path / "rounds.jsonl"
        end = kept[-1][1] if kept else 0
        if path.is_file() and path.stat().st_size != end:
            with path.open("rb") as file:
                sound = file.read(end)
            disk.write_atomically(path, [sound])
        self.close()
        return History(tuple(record for record, _ in kept))

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a round."""
        if self._log is None:
            self._log = disk.open_append(self.path / "rounds.jsonl")
            self._end = os.fstat(self._log).st_size
        line = (json.dumps(_plain(record), separators=(",", ":")) + "\n").encode()
        try:
            disk.write_all(self._log, line)
        except OSError as error:
            intact = "Rounds up to the last checkpoint are safe"
            raise disk.failure("write", self.path / "rounds.jsonl", error, intact) from error
        self._end += len(line)

    def sync(self) -> None:
        """Wait until the rounds are on the disk: before a checkpoint relies on them."""
        if self._log is not None:
            self._check_ours(self._log)
            disk.fsync(self._log)

    def _check_ours(self, log: int) -> None:
        """Refuse to go on where another program has cut or replaced the file meanwhile."""
        path, ours = self.path / "rounds.jsonl", os.fstat(log)
        with suppress(FileNotFoundError):
            there = path.stat()
            if (there.st_dev, there.st_ino, there.st_size) == (ours.st_dev, ours.st_ino, self._end):
                return
        raise CheckpointError(
            f"{path} was changed by another program while the run was under way: "
            f"{len(self._lines())} of its rounds are sound ({self.damage()}). Keep editors and "
            "sync tools away from it, then run the same command: it goes on from the last "
            "checkpoint, or says what is missing"
        )

    def close(self) -> None:
        """Close the file of rounds."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    # -- results -------------------------------------------------------------------------------
    def write_model(self, module: nn.Module) -> None:
        """Write the weights under the module's own names."""
        tensors = {n: t.detach().cpu().contiguous().clone() for n, t in module.state_dict().items()}
        self._write("model.safetensors", save(tensors))

    def write_evaluation(self, evaluation: Mapping[str, Any] | None) -> None:
        """Write how good the model is; where nothing was judged there is no file."""
        if evaluation is None:
            disk.remove(self.path / "evaluation.json")
        else:
            self._write_json("evaluation.json", evaluation)

    def evaluation(self) -> dict[str, Any] | None:
        """Read how good the model is; None where it was not judged."""
        path = self.path / "evaluation.json"
        return _parse_json(_read(path), str(path)) if path.is_file() else None

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write the engine's choices."""
        self._write_json("plan.json", plan)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Say that the run is complete."""
        self._write_json("summary.json", summary)

    def summary(self) -> dict[str, Any] | None:
        """Read the summary of a complete run; None if it is not complete."""
        return self.read_json("summary.json")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a file of this folder; None if it is not there."""
        path = self.path / name
        return _parse_json(_read(path), str(path)) if path.is_file() else None

    def keep(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Write what the model needs to be used without the data, by the names of the files."""
        for name, value in files.items():
            self._write_json(name, value)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write(name, (plain_json(value) + "\n").encode())

    def _write(self, name: str, data: bytes) -> None:
        disk.make_directory(self.path)
        disk.write_atomically(self.path / name, [data])


class _Lock:
    """A file that is locked while this lives: an interrupt between two lines leaves no lock."""

    def __init__(self, fd: int) -> None:
        self.fd, self._file = fd, os.fdopen(fd, "ab", buffering=0)

    def close(self) -> None:
        """Give the lock back; a second time does nothing."""
        self._file.close()

    def __del__(self) -> None:
        self.close()


def open_run(path: Path | str) -> RunFolder:
    """Open a folder that must hold a run."""
    folder = RunFolder(path)
    if folder.table() is None:
        raise ConfigError(f"{path} holds no run: there is no experiment.toml in it")
    return folder


def whole_history(folder: RunFolder) -> History:
    """Read the rounds of a run; refuse fewer than its summary or a checkpoint tells of."""
    told = (folder.summary() or {}).get("rounds", 0)
    # before the rounds are read: a run may be under way, and writes them first
    saved = max(CheckpointFolder(folder.checkpoint).rounds, default=0)
    trained = (folder.path / "model.safetensors").is_file()
    promised = max(saved, told if isinstance(told, int) else 0, int(trained))
    history = folder.history()
    if len(history) < promised:
        raise CheckpointError(
            f"{folder.path / 'rounds.jsonl'} has {len(history)} sound rounds of {promised} "
            f"({folder.damage()}): restore it, or delete the folder and run the experiment again"
        )
    return history


def find_runs(path: Path | str) -> list[RunFolder]:
    """Find every run in a folder and the folders below, in the order of their names.

    A run that has lost its rounds is one of them: to leave it out would hide the loss.
    """
    folders = map(RunFolder, sorted(p.parent for p in Path(path).rglob("experiment.toml")))
    return [folder for folder in folders if folder.has_begun()]


def _policies(table: Any) -> Iterator[str]:
    """Find the files of the policies that a table names."""
    if isinstance(table, Mapping):
        if table.get("use") == "Policy":
            yield str(table["source"])
        table = list(table.values())
    if isinstance(table, list | tuple):
        for value in table:
            yield from _policies(value)


def _device(table: Table) -> Any:
    return table.get("engine", {}).get("device")


def _read(path: Path) -> str:
    try:
        return read_text(path, "json_bytes")
    except (OSError, Unreadable) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _parse_json(text: str, place: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except Unreadable as error:
        found = error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{place} is damaged: restore it, or delete this one file and the same command writes "
            "it again"
        )
    return found


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(line) if line.endswith(b"\n") else None
    except Unreadable:
        return None
    return found if isinstance(found, dict) else None


def plain_json(value: Any) -> str:
    """Write what a file of a run holds."""
    return json.dumps(_plain(value), indent=1)


def _plain(value: Any) -> Any:
    """Make a value that JSON can hold: what is not finite becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(v) for v in value]
    return value
