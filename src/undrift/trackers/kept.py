"""Which run of a tracker belongs to a run's folder: kept there, so that a resume goes on in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from undrift.experiment.events import RunInfo
from undrift.guarded.text import read_json
from undrift.state.disk import write_atomically


class Kept(NamedTuple):
    """A run's id at its tracker, and the last round that is there."""

    id: str
    round: int = 0


def recall(run: RunInfo, tracker: str) -> Kept | None:
    """Read what was kept; None for a run that this tracker has not seen."""
    path = _path(run, tracker)
    try:
        found = read_json(path) if path else None
        return Kept(str(found["id"]), int(found["round"])) if found else None
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: a new one is made
        return None


def keep(run: RunInfo, tracker: str, kept: Kept) -> None:
    """Write down a run's id; a run in memory cannot be resumed and keeps none."""
    path = _path(run, tracker)
    if path:
        write_atomically(path, [json.dumps(kept._asdict()).encode()])


def _path(run: RunInfo, tracker: str) -> Path | None:
    return run.folder / f"{tracker}.json" if run.folder else None
