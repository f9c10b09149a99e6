"""Tables of papers."""

from __future__ import annotations

from pathlib import Path

from .case import Case, command, left_no

TABLES = "Tables of papers"
NOTHING = left_no("reproductions")


def broken_records(folder: Path) -> None:
    """A file of records that somebody emptied."""
    place = folder / "reproductions"
    place.mkdir()
    (place / "fedvra-table3.json").write_text("{}")


CASES: list[Case] = [
    command(
        TABLES,
        "a table that is not there",
        "undrift reproduce fedvra-tabel3",
        r"no table or setting named 'fedvra-tabel3'\. Did you mean 'fedvra-table3'\?",
        after=NOTHING,
    ),
    command(TABLES, "no table", "undrift reproduce", r"reproduce needs a name: one of"),
    command(
        TABLES,
        "a table where one experiment is needed",
        "undrift run fedvra-table3",
        r"name one of fedvra-table3-iid.*undrift reproduce fedvra-table3",
    ),
    command(
        TABLES,
        "a method that the table does not have",
        "undrift reproduce comfed-table4 --only proxyoga",
        r"comfed-table4: no method named 'proxyoga'\. Did you mean 'proxyogi'\?",
        after=NOTHING,
    ),
    command(
        TABLES,
        "rounds as a setting",
        "undrift reproduce fedvra-table3 rounds=10",
        r"'rounds=10': seeds and rounds of a table are set by options",
        after=NOTHING,
    ),
    command(
        TABLES,
        "a sweep",
        "undrift reproduce fedvra-table3 --only fedprox algorithm.mu=0.1,1",
        r"a record has one value of each setting, not a sweep",
        after=NOTHING,
    ),
    command(
        TABLES,
        "no time",
        "undrift reproduce fedvra-table3 --minutes 0",
        r"--minutes 0 leaves no time",
        after=NOTHING,
    ),
    command(
        TABLES,
        "a file of records that is damaged",
        "undrift reproduce --list",
        r"fedvra-table3\.json holds no records of a table: restore it",
        before=broken_records,
    ),
]
