"""Text from outside: files of bounded size, lines, JSON and TOML of bounded nesting."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, AnyStr

import numpy as np

from undrift.guarded.limits import Unreadable, check, limit, over

DIGITS = 300  # of a whole number: a longer one is no float, and Python may refuse to print it

# Every token matches at once wherever it begins, closed or not: reading stays linear.
_JSON_TEXT = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_LONG_WHOLE = re.compile(rf"(?<![\d.eE+])\d{{{DIGITS + 1},}}+(?![\d.eE])")
_TOML_TEXT = re.compile(
    r'"""(?:[^"\\]++|\\.|"(?!""))*+(?:"{3,5})?'
    r"|'''(?:[^']++|'(?!''))*+(?:'{3,5})?"
    r'|"(?:[^"\\\n]++|\\[^\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
_TOML_RUN = re.compile(r"[^=,\[\]{}\n]++[=\]]?")


# --------------------------------------------------------------------------------------- files
def read_bytes(path: Path, most: str) -> bytes:
    """Read a file that may have as many bytes as the limit `most` says; OSError as usual."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):  # a device or a pipe may have no end
            raise Unreadable("it is no file but a device, a pipe or a folder")
        check(most, "bytes of the file", found.st_size)
        return file.read(found.st_size)


def read_text(path: Path, most: str) -> str:
    """Read a file of UTF-8, with or without a mark in front."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start} is not UTF-8") from error


def lines_of(file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Give the lines of an open file, each of bounded length."""
    most, number = limit("line_bytes"), 0
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            raise over("line_bytes", f"bytes of line {number}")
        yield line


# ---------------------------------------------------------------------------------------- JSON
def read_json(path: Path, most: str = "json_bytes") -> Any:
    """Read a file of JSON; OSError as usual, Unreadable for everything that is wrong with it."""
    return parse_json(read_bytes(path, most))


def parse_json(
    text: bytes | str,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    constant: Callable[[str], Any] | None = None,
) -> Any:
    """Parse JSON of bounded nesting, whose numbers are of bounded length.

    `pairs` makes an object of its members, `constant` a number of NaN, Infinity and -Infinity.

    >>> parse_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8-sig")
        check_json(plain)
        return json.loads(plain, object_pairs_hook=pairs, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start} is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(str(error)) from error


def check_json(text: str) -> None:
    """Refuse JSON that is nested too deep, or has too long a number: before it is parsed."""
    bare = _JSON_TEXT.sub("", text)
    check("depth", "lists within lists", _nesting(bare))
    if _LONG_WHOLE.search(bare):
        raise Unreadable(f"a whole number has more than {DIGITS} digits")


def _nesting(bare: str) -> int:
    """Tell how deep the brackets of a text without strings go."""
    codes = np.frombuffer(bare.encode("utf-8", "replace"), np.uint8)
    steps = np.zeros(256, np.int8)
    steps[[ord("["), ord("{")]], steps[[ord("]"), ord("}")]] = 1, -1
    turns = steps[codes]
    return int(np.cumsum(turns[turns != 0], dtype=np.int64).max(initial=0))


# ---------------------------------------------------------------------------------------- TOML
def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML of bounded nesting; nothing is parsed before it was measured.

    >>> parse_toml("a.b = 3")
    {'a': {'b': 3}}
    """
    check("toml_bytes", "characters of the text", len(text))
    # a string is a part of a key like any other, a comment is nothing
    bare = _TOML_TEXT.sub(lambda m: "" if m[0][0] == "#" else "s", text)
    check("depth", "lists within lists", _nesting(bare))
    runs = (run[0] for run in _TOML_RUN.finditer(bare))
    dots = [run.count(".") for run in runs if run[-1] in "=]" and "." in run]
    check("depth", "parts of one key", max(dots, default=0) + 1)
    check("toml_keys", "parts of keys", sum(dots) + bare.count("="))
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError) as error:
        raise Unreadable(str(error)) from error
    _check_wholes(found)
    return found


def _check_wholes(value: Any) -> None:
    if isinstance(value, int) and not -(10**DIGITS) < value < 10**DIGITS:
        raise Unreadable(f"a whole number has more than {DIGITS} digits")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_wholes(inner)
