"""A listener that may fail without harm."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from undrift.experiment.events import Listener, Record, RunInfo

logger = logging.getLogger("undrift")


class Guarded:
    """Keeps a listener's errors away from the training: one warning, and it is switched off."""

    def __init__(self, listener: Listener, name: str | None = None) -> None:
        self.listener = listener
        self.name = name or type(listener).__name__
        self.on = True

    def started(self, run: RunInfo, past: Sequence[Record]) -> None:
        self._tell("started", run, past)

    def round(self, run: RunInfo, record: Record) -> None:
        self._tell("round", run, record)

    def finished(self, run: RunInfo, history: Sequence[Record]) -> None:
        self._tell("finished", run, history)

    def failed(self, run: RunInfo, error: BaseException) -> None:
        self._tell("failed", run, error)

    def close(self) -> None:
        self._tell("close")
        self.on = False

    def _tell(self, what: str, *told: Any) -> None:
        if not self.on:
            return
        try:
            getattr(self.listener, what)(*told)
        except Exception as error:  # whatever a tracker raises; Ctrl-C goes through
            self.on = False
            logger.warning(
                "%s failed and is switched off, training goes on: %s: %s",
                self.name,
                type(error).__name__,
                error,
            )
            with suppress(Exception):
                self.listener.close()
