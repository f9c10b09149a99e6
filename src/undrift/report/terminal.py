"""The view of runs as they go on: a live block in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TextIO

from undrift.experiment.events import Record, RunInfo
from undrift.report import terminal_plain as plain
from undrift.report.terminal_draw import done_line, failed_line, final_line, render
from undrift.report.terminal_screen import Outlet, Screen, note_lines
from undrift.report.terminal_state import (
    RunView,
    ViewState,
    end_run,
    ended,
    key_of,
    start_run,
    take_round,
)

__all__ = ["TerminalView", "render"]

PER_SECOND = 8.0  # pictures
AT_ONCE = 3.0  # pictures in a row, so that runs that end together are all seen


class TerminalView:
    """A listener that shows several runs at the same time.

    `total` is how many runs there will be; it makes an estimate for all of them possible.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        total: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: int | None = None,
    ) -> None:
        self._outlet = Outlet(sys.stderr if stream is None else stream)
        self._clock = clock
        now = clock()
        self.state = ViewState(total=total, style=self._outlet.style(), began=now, now=now)
        self._screen = Screen(self._outlet, width) if self._outlet.is_live() else None
        self._pace = plain.Pace()
        self._allowance, self._counted_at = AT_ONCE, now
        self._handler = _Notes(self)
        self._closed = False

    def started(self, run: RunInfo, past: Sequence[Record]) -> None:
        self._tick()
        view = start_run(self.state, run, past)
        self._pace.begin(view, self.state.now)
        if self._screen is None:
            return None if view.was_complete else self._say(plain.start_text(view))
        self._handler.attach()
        self._draw_if_due()

    def round(self, run: RunInfo, record: Record) -> None:
        self._tick()
        view = self.state.active.get(key_of(run)) or start_run(self.state, run, [])
        take_round(self.state, view, record)
        if self._screen is not None:
            self._draw_if_due()
        elif self._pace.is_due(view, self.state.now) and view.round < run.rounds:
            self._say(plain.round_text(view, self.state.now))

    def finished(self, run: RunInfo, history: Sequence[Record]) -> None:
        self._tick()
        view = self._ended(run, history)
        if self._screen is None:
            return self._say(plain.done_text(self.state, view))
        self._draw([done_line(self.state, view, self._room())])

    def failed(self, run: RunInfo, error: BaseException) -> None:
        self._tick()
        view = end_run(self.state, run, error)
        if self._screen is None:
            return self._say(plain.failed_text(view, error))
        self._draw([failed_line(self.state, view, error, self._room())])
        if not self.state.active or not isinstance(error, Exception):
            self._screen.release()  # Ctrl-C may be the last that is heard

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for view in list(self.state.active.values()):
            self.failed(view.run, Unheard())  # as after Ctrl-C, when workers are stopped
        self._tick()
        self._handler.detach()
        if self._screen is None:
            return
        if ended(self.state) > 1:
            self._screen.draw([], [final_line(self.state, self._room())])
        self._screen.release()

    def refresh(self) -> None:
        """Let the clock of the live block go on; for callers that wait between rounds."""
        self._tick()
        if self._screen is not None and self.state.active:
            self._draw_if_due()

    def note(self, text: str) -> None:
        """Write a message that stays, above the live block."""
        if self._screen is None:
            return self._say(text)
        self._draw(note_lines(text, self._room(), self.state.style))

    def __enter__(self) -> TerminalView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ended(self, run: RunInfo, history: Sequence[Record]) -> RunView:
        """Take out a complete run; one that had nothing left to do is read from its history."""
        if key_of(run) not in self.state.active:
            start_run(self.state, run, history)
        return end_run(self.state, run)

    def _tick(self) -> None:
        self.state.now = self._clock()

    def _say(self, text: str) -> None:
        self._outlet.write(text + "\n")

    def _room(self) -> int:
        return max(1, self._screen.size()[0] - 1) if self._screen else 80

    def _draw_if_due(self) -> None:
        passed = self.state.now - self._counted_at
        self._counted_at = self.state.now
        self._allowance = min(AT_ONCE, self._allowance + PER_SECOND * passed)
        if self._allowance >= 1.0:
            self._allowance -= 1.0
            self._draw()

    def _draw(self, above: Sequence[str] = ()) -> None:
        if self._screen is not None:
            lines = render(self.state, *self._screen.size()) if self.state.active else []
            self._screen.draw(lines, above)


class Unheard(BaseException):
    """A run of which nothing more was heard."""


class _Notes(logging.Handler):
    """Brings undrift's warnings above the live block, which they would tear apart."""

    def __init__(self, view: TerminalView) -> None:
        super().__init__(logging.WARNING)
        self.view = view
        self.logger = logging.getLogger("undrift")

    def attach(self) -> None:
        """Listen, unless the user has said where warnings go."""
        if not self.logger.hasHandlers():
            self.logger.addHandler(self)

    def detach(self) -> None:
        self.logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.view.note(f"{record.levelname.lower()}: {record.getMessage()}")
