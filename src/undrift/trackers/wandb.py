"""Runs for Weights & Biases, in files below FOLDER/wandb; `wandb sync` sends them if wanted.

Nothing is sent and nobody is asked to log in unless WANDB_MODE says so.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from undrift.experiment.events import Record, RunInfo
from undrift.trackers.kept import Kept, keep, recall
from undrift.trackers.values import Key, key_of, need, scalars, title

NAME = "wandb"
FAILED, STOPPED = 1, 255  # exit codes as wandb reads them


class Wandb:
    """A listener that keeps a W&B run for each run."""

    def __init__(self, folder: Path, project: str | None = None) -> None:
        self.folder = folder
        self.mode = os.environ.get("WANDB_MODE") or "offline"
        self.project = project or os.environ.get("WANDB_PROJECT") or "undrift"
        if self.mode == "offline":  # its error reports would go out even then
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self.wandb = need("wandb", NAME)
        self.runs: dict[Key, tuple[RunInfo, Any]] = {}

    def started(self, run: RunInfo, past: Sequence[Record]) -> None:
        known = recall(run, NAME) if past else None
        if known and known.round >= run.rounds:
            return  # complete, here as well
        kept = known or Kept(uuid.uuid4().hex[:12])
        keep(run, NAME, Kept(kept.id))
        logged = self._open(run, kept.id)
        self.runs[key_of(run)] = (run, logged)
        # An offline folder is to be complete in itself; a server knows what it has.
        for record in past:
            _log(logged, record)

    def round(self, run: RunInfo, record: Record) -> None:
        _log(self.runs[key_of(run)][1], record)

    def finished(self, run: RunInfo, history: Sequence[Record]) -> None:
        done = history[-1]["round"] if history else 0
        self._end(key_of(run), 0, done)

    def failed(self, run: RunInfo, error: BaseException) -> None:
        self._end(key_of(run), FAILED if isinstance(error, Exception) else STOPPED)

    def close(self) -> None:
        for key in list(self.runs):
            self._end(key, STOPPED)

    def _open(self, run: RunInfo, id: str) -> Any:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.wandb.init(
            id=id,
            dir=str(self.folder),
            mode=self.mode,
            project=self.project,
            group=run.name,
            name=title(run),
            config=dict(run.experiment),
            resume=None if self.mode == "offline" else "allow",  # offline there is nothing to ask
            reinit="create_new",  # several runs at the same time
            settings=self.wandb.Settings(
                console="off",  # the terminal is not its own
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
            ),
        )

    def _end(self, key: Key, code: int, done: int = 0) -> None:
        if key not in self.runs:
            return
        run, logged = self.runs.pop(key)
        logged.finish(exit_code=code)
        keep(run, NAME, Kept(logged.id, done))


def _log(logged: Any, record: Record) -> None:
    """Log a round; one that a resumed run has already is the same there, and is left out."""
    if record["round"] >= logged.step:
        logged.log(scalars(record), step=record["round"])
