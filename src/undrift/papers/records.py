"""Files of records: one per table, one entry per cell.

FOLDER/TABLE.json holds what counts: `cells`, full runs as the paper describes them; `alternatives`,
full runs with something changed; `sessions`, how long they took, in pieces if they were stopped.
What shortened, tiny and unfinished runs have found is in FOLDER/shortened/TABLE.json alone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undrift.errors import DataError
from undrift.experiment.family import is_figure, paper_files, settings_of
from undrift.guarded.text import read_json
from undrift.state.disk import make_directory, write_atomically

log = logging.getLogger("undrift")
Entry = dict[str, Any]
LISTS = ("cells", "alternatives", "sessions")
COUNTED = ("full", "altered")
UNFINISHED = "unfinished"
PARTS = {"setting": str, "method": str, "kind": str | None, "rounds": int, "seeds": list}
SESSION_PARTS = {"kind": str, "seconds": int | float}


def place_of(folder: Path, family: str, kind: str) -> Path:
    """Tell which file a kind of record belongs to."""
    return (folder if kind in COUNTED else folder / "shortened") / f"{family}.json"


def read_records(path: Path) -> dict[str, Any]:
    """Read a file of records; one that is not there has none."""
    empty: dict[str, Any] = {"table": path.stem, **{name: [] for name in LISTS}}
    if not path.is_file():
        return empty
    try:
        found = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}): restore it, or move it away") from error
    if not (isinstance(found, dict) and "cells" in found and all(_sound(found, n) for n in LISTS)):
        raise DataError(f"{path} holds no records of a table: restore it, or move it away")
    return {**empty, **found}


def _sound(records: Mapping[str, Any], name: str) -> bool:
    """Whether a list has entries that can be counted and replaced."""
    entries, parts = records.get(name, []), SESSION_PARTS if name == "sessions" else PARTS
    return isinstance(entries, list) and all(
        isinstance(one, dict) and all(p in one and isinstance(one[p], t) for p, t in parts.items())
        for one in entries
    )


def check_place(folder: Path, option: str) -> None:
    """Refuse a folder that nothing could be written to, before hours of training."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise DataError(f"{option} {folder}: a part of this path is a file; choose another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise DataError(f"{option} {folder}: {there} cannot be written; choose another folder")


def write_records(path: Path, records: Mapping[str, Any]) -> None:
    """Write a file of records, one entry on each line."""
    lines = [json.dumps({"table": records["table"]})[:-1]]
    for name in LISTS:
        entries = ",\n  ".join(json.dumps(one) for one in records[name])
        lines.append(f' "{name}": [' + (f"\n  {entries}\n ]" if entries else "]"))
    make_directory(path.parent)
    write_atomically(path, [(",\n".join(lines) + "\n}\n").encode()])


def put(folder: Path, family: str, entries: Sequence[Entry], session: Entry | None = None) -> None:
    """Add entries to the files they belong to; each takes the place of an older one of its kind."""
    made = [(place_of(folder, family, one["kind"]), one) for one in entries]
    kinds = [] if session is None else [(place_of(folder, family, session["kind"]), session)]
    for path in dict.fromkeys(p for p, _ in [*made, *kinds]):
        records = read_records(path)
        for place, entry in made:
            if place == path:
                _take(records, entry)
        records["sessions"] += [one for p, one in kinds if p == path]
        records["cells"].sort(key=_place(family))
        write_records(path, records)
    _forget_unfinished(folder, family, entries)


def _take(records: dict[str, Any], entry: Entry) -> None:
    name = "alternatives" if entry["kind"] == "altered" else "cells"
    same = [one for one in records[name] if _key(one) == _key(entry)]
    more = [one for one in same if len(one["seeds"]) > len(entry["seeds"])]
    if more:
        cell, count = f"{entry['setting']} {entry['name']}", len(more[0]["seeds"])
        log.warning("%s: not recorded, for there is a record of %d seeds", cell, count)
        return
    records[name] = [*(one for one in records[name] if one not in same), entry]


def _key(entry: Entry) -> tuple[Any, ...]:
    changes = tuple(entry.get("changes", ()))
    rounds = None if entry["kind"] == UNFINISHED else entry["rounds"]  # these go on
    return entry["setting"], entry["method"], entry["kind"], changes, rounds


def _place(family: str) -> Any:
    """Order cells as the table does."""
    order = {
        (setting.name, method): (i, j)
        for i, setting in enumerate(settings_of(family))
        for j, method in enumerate(setting.paper["methods"])
    }
    return lambda entry: order.get((entry["setting"], entry["method"]), (len(order), 0))


def _forget_unfinished(folder: Path, family: str, entries: Sequence[Entry]) -> None:
    """Drop what was known of a cell before its runs were complete."""
    done = {(e["setting"], e["method"], tuple(e.get("changes", ())))
            for e in entries if e["kind"] != UNFINISHED}  # fmt: skip
    path = folder / "shortened" / f"{family}.json"
    if not done or not path.is_file():
        return
    records = read_records(path)
    left = [
        one for one in records["cells"]
        if one["kind"] != UNFINISHED or (one["setting"], one["method"], _key(one)[3]) not in done
    ]  # fmt: skip
    if len(left) < len(records["cells"]):
        write_records(path, {**records, "cells": left})


def counts(folder: Path, figures: bool = False) -> dict[str, tuple[int, int]]:
    """Count, table by table (or figure by figure), the cells with a full record, and all cells."""
    made = {}
    for family in paper_files():
        if is_figure(family) is not figures:
            continue
        cells = {(s.name, m) for s in settings_of(family) for m in s.cells}
        found = full_cells(folder / f"{family}.json")
        made[family] = (len(cells & found), len(cells))
    return made


def full_cells(path: Path) -> set[tuple[str, str]]:
    """Name the setting and method of every full record; others count for nothing."""
    cells = read_records(path)["cells"]
    return {(e.get("setting"), e.get("method")) for e in cells if e.get("kind") == "full"}
