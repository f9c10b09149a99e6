"""Writing to a terminal: a stream that may break, and a block that is redrawn in place."""

from __future__ import annotations

import atexit
import codecs
import os
import shutil
from collections.abc import Sequence
from typing import TextIO

from undrift.report.terminal_draw import Span, paint
from undrift.report.terminal_state import Style
from undrift.report.terminal_text import cells, clean, without_escapes

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
REST_OF_LINE, REST_OF_SCREEN = "\x1b[K", "\x1b[J"
SAMPLE = "▁█━─✓✗…"  # what the view draws beyond ASCII


class Outlet:
    """A stream that is written to as long as it takes text; a reader may leave at any time."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.open = True
        self.encoding = _known(getattr(stream, "encoding", None) or "utf-8")

    def write(self, text: str) -> None:
        """Write and flush; after a first failure nothing is written any more."""
        if not self.open:
            return
        try:
            self.stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            self.stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the stream was closed
            self.open = False

    def is_live(self) -> bool:
        """Tell whether this is a terminal that can redraw lines."""
        try:
            terminal = self.stream.isatty()
        except (AttributeError, ValueError):
            return False
        return terminal and os.environ.get("TERM", "dumb") != "dumb"

    def style(self) -> Style:
        """Find out what can be shown here; NO_COLOR is respected."""
        drawn = SAMPLE.encode(self.encoding, "replace").decode(self.encoding)
        colour = self.is_live() and not os.environ.get("NO_COLOR")
        return Style(colour=colour, unicode=drawn == SAMPLE)

    def size(self) -> tuple[int, int]:
        """Return the terminal's width and height as they are now."""
        try:
            size = os.get_terminal_size(self.stream.fileno())
        except (OSError, ValueError, AttributeError):
            size = shutil.get_terminal_size()
        # A terminal that does not know its size says 0.
        return size.columns or 80, size.lines or 24


def _known(encoding: str) -> str:
    try:
        return codecs.lookup(encoding).name
    except LookupError:
        return "ascii"


class Screen:
    """A block of lines at the end of a terminal, redrawn in place; other lines go above it."""

    def __init__(self, outlet: Outlet, width: int | None = None) -> None:
        self.outlet = outlet
        self.fixed_width = width
        self.drawn: list[int] = []  # cells of each line on the screen
        self.hidden = False

    def size(self) -> tuple[int, int]:
        """Return the width and height to draw for."""
        width, height = self.outlet.size()
        return self.fixed_width or width, height

    def draw(self, lines: Sequence[str], above: Sequence[str] = ()) -> None:
        """Replace the block by `lines`; those of `above` stay for good."""
        text = self._to_top()
        text += "".join(f"{line}{REST_OF_LINE}\n" for line in above)
        text += "\n".join(f"{line}{REST_OF_LINE}" for line in lines)
        self._hide(bool(lines))
        self.outlet.write(text + REST_OF_SCREEN)
        self.drawn = [cells(without_escapes(line)) for line in lines]

    def release(self) -> None:
        """Leave the terminal as it was found: no block, the cursor visible."""
        if self.drawn:
            self.draw([])
        self._hide(False)

    def _to_top(self) -> str:
        """Go to the block's first line; a terminal that became narrower has wrapped it."""
        width, height = self.size()
        rows = sum(max(1, -(-count // width)) for count in self.drawn)
        up = min(rows, height) - 1
        return f"\r\x1b[{up}A" if up > 0 else "\r"

    def _hide(self, hidden: bool) -> None:
        if hidden == self.hidden:
            return
        self.hidden = hidden
        # Whatever ends the program, the cursor comes back.
        atexit.unregister(self.release)
        if hidden:
            atexit.register(self.release)
        self.outlet.write(HIDE if hidden else SHOW)


def note_lines(text: str, room: int, style: Style) -> list[str]:
    """Prepare a message of several lines to be written above the block."""
    return [paint([Span(clean(line))], room, style) for line in text.splitlines()]
