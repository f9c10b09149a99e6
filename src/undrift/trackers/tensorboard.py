"""Event files for TensorBoard: FOLDER/tensorboard/LABEL/seed-SEED, the step is the round.

A resumed run opens another file.  Its first event names the step from which on earlier files are
out of date, so that every round is there once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from undrift.experiment.events import Record, RunInfo
from undrift.trackers.values import Key, as_json, file_name, key_of, need, scalars, settings

NAME = "tensorboard"
NAMES = "events.out.tfevents.{:010d}.undrift"  # TensorBoard reads them in the order of their names


class TensorBoard:
    """A listener that writes event files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / NAME
        self.files: dict[Key, EventFile] = {}
        self.parts = Parts(
            need("tensorboard.compat.proto.event_pb2", NAME),
            need("tensorboard.compat.proto.summary_pb2", NAME),
            need("tensorboard.summary.writer.record_writer", NAME),
        )

    def started(self, run: RunInfo, past: Sequence[Record]) -> None:
        place = self.folder / file_name(run.label) / f"seed-{run.seed}"
        known = min(last_round(place), past[-1]["round"] if past else 0)
        if past and known >= run.rounds:
            return  # complete, here as well
        file = self.files[key_of(run)] = EventFile(place, self.parts)
        file.begin(known + 1)
        if not known:
            file.describe(run)
        for record in past:
            if record["round"] > known:
                file.log(record)

    def round(self, run: RunInfo, record: Record) -> None:
        self.files[key_of(run)].log(record)

    def finished(self, run: RunInfo, history: Sequence[Record]) -> None:
        self._end(key_of(run))

    def failed(self, run: RunInfo, error: BaseException) -> None:
        self._end(key_of(run))

    def close(self) -> None:
        for key in list(self.files):
            self._end(key)

    def _end(self, key: Key) -> None:
        file = self.files.pop(key, None)
        if file is not None:
            file.close()


class Parts(NamedTuple):
    """The modules of TensorBoard that write events."""

    event: Any
    summary: Any
    record: Any


class EventFile:
    """One file of events, written at once: an error shows up in the round that caused it."""

    def __init__(self, place: Path, parts: Parts) -> None:
        place.mkdir(parents=True, exist_ok=True)
        number = max((int(path.name.split(".")[3]) for path in event_files(place)), default=0) + 1
        self.parts = parts
        self.file = (place / NAMES.format(number)).open("xb")
        self.records = parts.record.RecordWriter(self.file)

    def begin(self, step: int) -> None:
        """Declare everything from `step` on in earlier files as out of date."""
        start = self.parts.event.SessionLog(status=self.parts.event.SessionLog.START)
        self._write(file_version="brain.Event:2")
        self._write(step=step, session_log=start)

    def describe(self, run: RunInfo) -> None:
        """Write the experiment, as a text and for the table of settings."""
        hparams = need("tensorboard.plugins.hparams.summary_v2", NAME)
        text = need("tensorboard.plugins.text.summary_v2", NAME)
        table = f"```json\n{as_json(run.experiment, indent=2)}\n```"
        self._write(summary=text.text_pb("experiment", table))
        self._write(summary=hparams.hparams_pb(settings(run.experiment)))

    def log(self, record: Record) -> None:
        """Write the numbers of one round."""
        value = self.parts.summary.Summary.Value
        values = [value(tag=n, simple_value=v) for n, v in scalars(record).items()]
        self._write(step=record["round"], summary=self.parts.summary.Summary(value=values))

    def close(self) -> None:
        """Close the file; it is complete after every round anyway."""
        self.file.close()

    def _write(self, **event: Any) -> None:
        made = self.parts.event.Event(wall_time=time.time(), **event)
        self.records.write(made.SerializeToString())
        self.records.flush()


def event_files(place: Path) -> list[Path]:
    """Find the event files of a run, the oldest first."""
    return sorted(place.glob("events.out.tfevents.*.undrift"))


def last_round(place: Path) -> int:
    """Find the last round that is in the files of a run."""
    last = 0
    for event in _events(place):
        if event.HasField("session_log"):
            last = min(last, event.step - 1)
        elif event.HasField("summary"):
            last = event.step
    return last


def _events(place: Path) -> Iterator[Any]:
    loader = need("tensorboard.backend.event_processing.event_file_loader", NAME)
    for path in event_files(place):
        yield from loader.LegacyEventFileLoader(str(path)).Load()
