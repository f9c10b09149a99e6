"""Text in a terminal: how many cells it takes, cut to fit, and freed of what could steer it."""

from __future__ import annotations

import re
import unicodedata

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # colours, cursor moves
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # titles, links
    r"|\x1b[ -/]*[0-~]?"
)


def clean(text: str) -> str:
    r"""Free a text of escape sequences and of characters that act instead of being seen.

    >>> clean("a\x1b[31mb\x1b]0;title\x07\nc\u202ed")
    'ab cd'
    """
    plain = unicodedata.normalize("NFC", without_escapes(text))
    return " ".join("".join(map(_harmless, plain)).split())


def without_escapes(text: str) -> str:
    """Leave out colours and everything else that is an order to the terminal."""
    return _ESCAPES.sub("", text)


def _harmless(char: str) -> str:
    if char in "\t\n\r" or unicodedata.category(char) in ("Zl", "Zp"):
        return " "
    acts = unicodedata.category(char) in ("Cc", "Cf", "Cs")
    # A variation selector makes an emoji wider in some terminals and not in others.
    return "" if acts or "\ufe00" <= char <= "\ufe0f" else char


def cells(text: str) -> int:
    """Count the cells that a clean text takes in a terminal.

    >>> cells("seed"), cells("精度"), cells("e\u0301")
    (4, 4, 1)
    """
    return sum(map(_cells_of, text))


def _cells_of(char: str) -> int:
    if " " <= char <= "~":
        return 1
    joins = "\u1160" <= char <= "\u11ff"  # vowels and finals that complete a Hangul syllable
    if joins or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def fit(text: str, width: int, more: str = "…") -> str:
    """Cut a text to `width` cells, with a mark where something is missing.

    >>> fit("scaffold", 5), fit("scaffold", 8), fit("精度精度", 4)
    ('scaf…', 'scaffold', '精…')
    """
    if cells(text) <= width:
        return text
    room, kept = width - cells(more), ""
    if room < 0:
        return more[: max(0, width)]
    for char in text:
        room -= _cells_of(char)
        if room < 0:
            break
        kept += char
    return kept + more


def pad(text: str, width: int) -> str:
    """Fill a text up with blanks to `width` cells."""
    return text + " " * (width - cells(text))


def duration(seconds: float) -> str:
    """Write a time span.

    >>> duration(41), duration(1120), duration(3723), duration(180000)
    ('0:41', '18:40', '1:02:03', '2 d 2 h')
    """
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    clock = f"{rest // 60:02d}:{rest % 60:02d}"
    return f"{hours}:{clock}" if hours else clock.removeprefix("0")


def amount(number: float) -> str:
    """Write a number in at most five characters.

    >>> amount(7.25), amount(950.4), amount(12430), amount(3.1e6)
    ('7.2', '950', '12.4k', '3.1M')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{int(number < 100 * size)}f}{unit}"
    return f"{number:.{int(number < 100)}f}"
