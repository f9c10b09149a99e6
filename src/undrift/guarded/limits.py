"""How much a file may ask for, before memory is spent on it.

A file of some kilobytes can ask for gigabytes: by nesting, by a header, by compression.  The limits
lie far above what real files need.  `UNDRIFT_LIMITS="depth=100 table_columns=500000"` in the
environment raises (or lowers) some of them, also for workers.
"""

from __future__ import annotations

import os

from undrift.errors import ConfigError, DataError, unknown_name

VARIABLE = "UNDRIFT_LIMITS"

LIMITS = {
    "toml_bytes": 4_000_000,  # an experiment file is a page of text
    "toml_keys": 100_000,  # parts of keys in one file; each takes about 1 kB while it is parsed
    "depth": 64,  # of tables, lists and dotted keys within each other
    "json_bytes": 32 * 2**20,  # summaries, records, comparisons; in memory up to 25 times as much
    "leaf_bytes": 2 * 2**30,  # one of LEAF's json files
    "line_bytes": 16 * 2**20,  # one line of a table, of word vectors or of rounds.jsonl
    "table_columns": 100_000,
    "table_values": 2**28,  # cells of the chosen columns, and numbers of the features made of them
    "data_bytes": 768 * 2**20,  # one file of a data set, also inside an archive
    "archive_bytes": 4 * 2**30,  # an archive, decompressed as a whole
    "archive_entries": 100_000,
    "text_bytes": 256 * 2**20,  # a plain text to learn from
    "vectors_bytes": 16 * 2**30,  # a .npy file of word vectors
    "picture_pixels": 2**24,  # one picture file; it may hold thousands of small pictures
    "names_bytes": 100_000_000,  # names, shapes and settings at the start of a checkpoint
    "weights_bytes": 16 * 2**30,  # an exported model
    "letter_bytes": 8 * 2**20,  # a question to silos, an answer, or a preparation
    "key_bytes": 1_000_000,  # a certificate or a public key
}


class Unreadable(DataError):
    """A file is not what its name says, or larger than a limit; the caller adds where it lies."""


def limit(name: str) -> int:
    """Give a limit: the constant, or what the environment says.

    >>> limit("depth")
    64
    """
    return _given().get(name, LIMITS[name])


def _given() -> dict[str, int]:
    text = os.environ.get(VARIABLE, "")
    return dict(_one(part) for part in text.replace(",", " ").split()) if text else {}


def _one(part: str) -> tuple[str, int]:
    name, _, value = part.partition("=")
    if name not in LIMITS:
        raise unknown_name("limit", name, list(LIMITS), VARIABLE)
    if not (value.isdecimal() and value.isascii() and 0 < len(value) < 19 and int(value)):
        raise ConfigError(
            f"{VARIABLE}: {part!r} should be a name and a whole number above 0, "
            f"e.g. {name}={LIMITS[name]}"
        )
    return name, int(value)


def over(name: str, what: str, count: int | None = None) -> Unreadable:
    """Build the error for something that is larger than a limit, with the move that raises it."""
    most = limit(name)
    found = "more" if count is None else str(count)
    return Unreadable(
        f"{what}: {found} where at most {most} are read; if the file is sound, "
        f"{VARIABLE}='{name}={max(2 * most, count or 0)}' reads it"
    )


def check(name: str, what: str, count: int) -> None:
    """Refuse a count above a limit."""
    if count > limit(name):
        raise over(name, what, count)
