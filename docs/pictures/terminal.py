"""Draw what a command shows in a terminal as an SVG.

    python docs/pictures/terminal.py OUTPUT.svg [--size 100x14] [--at 0.6] -- COMMAND ...

The command runs in a pseudo terminal; `--at` picks the moment, as a share of all pictures it drew.
The same screen is always the same file.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import struct
import termios
import unicodedata
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

PALETTE = {31: "#f47067", 32: "#8ddb8c", 33: "#f0c76b", 34: "#6cb6ff", 35: "#dcbdfb", 36: "#56c8d8"}
INK, QUIET, PAPER = "#d5dbe1", "#7d8894", "#1b2027"
CELL, ROW, EDGE, SIZE = 8.4, 19, 18, 14  # a cell's width, a row's height, the margin, the font
ORDERS = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b.|[\s\S]")
QUIET_AFTER = 0.02  # seconds without output: the picture is complete


class Cell(NamedTuple):
    """One character with its looks; the right half of a wide one is empty."""

    char: str = " "
    colour: int = 0
    bold: bool = False
    dim: bool = False


class Screen:
    """As much of a terminal as a progress view needs."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows = [[Cell()] * width for _ in range(height)]
        self.x = self.y = 0
        self.looks = Cell()
        self.cursor_visible = True

    def feed(self, text: str) -> None:
        for match in ORDERS.finditer(text):
            if match[2]:
                self._order(match[1], match[2])
            elif not match[0].startswith("\x1b"):
                self._put(match[0])

    def text(self) -> list[str]:
        return ["".join(cell.char for cell in row).rstrip() for row in self.rows]

    def _put(self, char: str) -> None:
        if char in "\r\n":
            self.x = 0
        if char == "\n":
            self._down()
        elif char >= " ":
            self._print(char)

    def _print(self, char: str) -> None:
        wide = unicodedata.east_asian_width(char) in "WF"
        if unicodedata.combining(char):
            return  # drawn over the character before it: takes no cell
        if self.x + wide >= self.width:
            self.x = 0
            self._down()
        self.rows[self.y][self.x] = self.looks._replace(char=char)
        if wide:
            self.rows[self.y][self.x + 1] = self.looks._replace(char="")
        self.x += 1 + wide

    def _down(self) -> None:
        if self.y < self.height - 1:
            self.y += 1
        else:
            self.rows = [*self.rows[1:], [Cell()] * self.width]

    def _order(self, numbers: str, order: str) -> None:
        if order == "A":
            self.y = max(0, self.y - int(numbers or 1))
        elif order in "KJ":
            self.rows[self.y][self.x :] = [Cell()] * (self.width - self.x)
            for y in range(self.y + 1, self.height if order == "J" else 0):
                self.rows[y] = [Cell()] * self.width
        elif order == "m":
            for code in map(int, (numbers or "0").split(";")):
                self._style(code)
        elif numbers == "?25":
            self.cursor_visible = order == "h"

    def _style(self, code: int) -> None:
        changes = {0: Cell(), 1: self.looks._replace(bold=True), 2: self.looks._replace(dim=True)}
        self.looks = changes.get(code, self.looks)
        if code in PALETTE:
            self.looks = self.looks._replace(colour=code)


def watch(command: list[str], width: int, height: int) -> Iterator[list[list[Cell]]]:
    """Run a command in a pseudo terminal and yield the screen whenever it is at rest."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    screen, unread = Screen(width, height), b""
    while data := _read(terminal):
        unread += data
        if select.select([terminal], [], [], QUIET_AFTER)[0]:
            continue
        screen.feed(unread.decode(errors="ignore"))
        unread = b""
        yield [list(row) for row in screen.rows]
    os.waitpid(child, 0)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux reports a closed terminal as an error
        return b""


def draw(rows: list[list[Cell]]) -> str:
    """Draw a screen as an SVG, without the empty rows at its end."""
    while rows and not "".join(cell.char for cell in rows[-1]).strip():
        rows = rows[:-1]
    width, height = len(rows[0]) * CELL + 2 * EDGE, len(rows) * ROW + 2 * EDGE
    body = "\n".join(part for y, row in enumerate(rows) for part in _draw_row(row, y))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-size="{SIZE}" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace">'
        f'\n<rect width="100%" height="100%" rx="9" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


def _draw_row(row: list[Cell], y: int) -> Iterator[str]:
    def kind(place: tuple[int, Cell]) -> tuple[Cell, bool]:
        return place[1]._replace(char=""), _is_drawn(place[1].char)

    for (looks, drawn), group in groupby(enumerate(row), key=kind):
        places = list(group)
        colour = PALETTE.get(looks.colour, INK) if not looks.dim else QUIET
        text = "".join(cell.char for _, cell in places)
        if drawn:
            yield from (_shape(cell.char, x, y, colour) for x, cell in places)
        elif text.strip():
            yield _words(text, places[0][0], len(places), y, colour, looks.bold)


def _is_drawn(char: str) -> bool:
    return "▁" <= char <= "█" or char in tuple("━─")


def _shape(char: str, x: int, y: int, colour: str) -> str:
    """Draw blocks and lines as rectangles: fonts disagree about them."""
    height = {"━": 3.0, "─": 1.0}.get(char) or (ord(char) - 0x2580) / 8 * (ROW - 5)
    middle = y * ROW + EDGE + ROW / 2
    top = middle - height / 2 if char in "━─" else middle + (ROW - 5) / 2 - height
    gap = 0.0 if char in "━─" else 1.0
    box = f'x="{EDGE + x * CELL:.1f}" y="{top:.1f}" width="{CELL - gap:.1f}" height="{height:.1f}"'
    return f'<rect {box} fill="{colour}"/>'


def _words(text: str, x: int, count: int, y: int, colour: str, bold: bool) -> str:
    kept = escape(text.strip()).replace(" ", "\u00a0")  # blanks in a row are part of the table
    left, weight = len(text) - len(text.lstrip()), ' font-weight="bold"' if bold else ""
    length = (count - left - (len(text) - len(text.rstrip()))) * CELL
    place = f'x="{EDGE + (x + left) * CELL:.1f}" y="{EDGE + y * ROW + ROW * 0.72:.1f}"'
    fixed = f'textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text {place} {fixed} fill="{colour}"{weight}>{kept}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--size", default="100x14")
    parser.add_argument("--at", type=float, default=0.6)
    parser.add_argument("command", nargs="+")
    chosen = parser.parse_args()
    width, height = map(int, chosen.size.split("x"))
    pictures = list(watch(chosen.command, width, height))
    moment = min(len(pictures) - 1, int(len(pictures) * chosen.at))
    chosen.output.write_text(draw(pictures[moment]), encoding="utf-8")


if __name__ == "__main__":
    main()
