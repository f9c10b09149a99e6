"""A worker process: reads experiments from its input, writes events to its output.

Started by `pool`.  It ignores Ctrl-C and a closed terminal, which its parent hears too; SIGTERM
stops it at the next moment, with everything done so far saved.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from undrift.errors import UndriftError
from undrift.experiment.events import Record, RunInfo
from undrift.experiment.run import run
from undrift.experiment.spec import Experiment
from undrift.interrupts import stop_on_signals


class Voice:
    """A listener that tells the parent."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe

    def tell(self, event: str, **values: Any) -> None:
        """Write one line."""
        self.pipe.write(json.dumps({"event": event, **values}).encode() + b"\n")
        self.pipe.flush()

    def started(self, run: RunInfo, past: Sequence[Record]) -> None:
        """Tell that a run begins."""
        self.tell("started", value=[dict(r) for r in past])

    def round(self, run: RunInfo, record: Record) -> None:
        """Tell what is known after a round; a parent that is gone ends the run."""
        self.tell("round", value=dict(record))

    def finished(self, run: RunInfo, history: Sequence[Record]) -> None:
        """Tell that a run is complete."""
        self.tell("finished", value=[dict(r) for r in history])

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Errors are told by `main`, whatever part of a run they come from."""

    def close(self) -> None:
        """Nothing to close."""


class Telling(logging.Handler):
    """Sends warnings to the parent, which knows where to show them."""

    def __init__(self, voice: Voice) -> None:
        super().__init__(logging.WARNING)
        self.voice = voice

    def emit(self, record: logging.LogRecord) -> None:
        """Send one."""
        self.voice.tell("note", value=record.getMessage())


def main() -> int:
    """Run what comes in until the input ends."""
    # what user code prints must not end up among the events
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGHUP))
    stop_on_signals()
    voice = Voice(pipe)
    log = logging.getLogger("undrift")
    log.addHandler(Telling(voice))
    log.propagate = False
    try:
        for line in sys.stdin.buffer:
            _one(json.loads(line), voice)
    except (KeyboardInterrupt, BrokenPipeError):
        return 1
    return 0


def _one(task: dict[str, Any], voice: Voice) -> None:
    try:
        sys.argv = task["command"]  # what environment.json tells
        home = Path(task["home"]) if task["home"] else None
        experiment = Experiment.from_table(task["experiment"], trust=True, home=home)
        run(experiment, Path(task["folder"]), listeners=[voice])
    except UndriftError as error:
        voice.tell("failed", kind=type(error).__name__, message=str(error))
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            raise
        voice.tell("failed", kind="UndriftError", message=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
