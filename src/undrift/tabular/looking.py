"""A table while it is looked at: findings, its clients, and how its columns are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from undrift.tabular.cells import in_order, written_time
from undrift.tabular.frames import Raw, texts_of
from undrift.tabular.growing import RawTable
from undrift.tabular.problems import SHOWN, Problems
from undrift.tabular.schema import Date, Feature, Kind


class Line(NamedTuple):
    """One column as it is shown."""

    name: str
    kind: str
    missing: str
    holds: str


@dataclass
class Look:
    """A table while it is looked at."""

    target: str
    client: str | None
    kinds: Mapping[str, str]
    rows: int
    problems: Problems
    goal: Raw | None = None  # the target
    columns: dict[str, Feature] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def find(self, name: str, what: str, move: str) -> None:
        """Note a finding, with the way to say otherwise."""
        self.findings.append(f"{name}: {what}; {move}")

    def leave(self, name: str, what: str, kind: str) -> None:
        """Leave a column out."""
        self.left.append(name)
        self.find(name, f"{what}, left out", f"--kind {in_shell(name)}={kind} keeps it")


def clients_of(look: Look, table: RawTable) -> tuple[str, ...]:
    """Look at the clients: who they are, and what some of them lack."""
    assert look.client is not None and look.goal is not None
    raw = texts_of(table.columns[look.client])
    empty = np.flatnonzero(raw.values < 0)
    if len(empty):
        what = "the cell is empty, so that nobody holds the row; fill it or drop the row"
        look.problems.cells(table.place, empty, look.client, what)
    there = ~empty_cells(look.goal)
    rows = np.bincount(raw.values[raw.values >= 0], minlength=len(raw.names))
    targets = np.bincount(raw.values[there & (raw.values >= 0)], minlength=len(raw.names))
    small = [f"{raw.names[k]} ({rows[k]})" for k in np.flatnonzero((rows > 0) & (rows < 10))]
    if small:
        look.find(look.client, f"clients of fewer than 10 rows: {_some(small)}",
                  "their figures alone say little")  # fmt: skip
    lacking = [raw.names[k] for k in np.flatnonzero((rows > 0) & (targets == 0))]
    if lacking:
        look.find(look.client, f"clients without any target: {_some(lacking)}",
                  "none of their rows is used")  # fmt: skip
    if look.goal.form == "texts":
        _one_sided(look, raw, targets)
    return in_order(raw.names)


def _one_sided(look: Look, raw: Raw, targets: Any) -> None:
    assert look.goal is not None and look.client is not None
    both = (look.goal.values >= 0) & (raw.values >= 0)
    held = np.unique(np.stack([raw.values[both], look.goal.values[both]]), axis=1)
    classes = np.bincount(held[0], minlength=len(raw.names))
    single = [raw.names[k] for k in np.flatnonzero((classes == 1) & (targets > 0))]
    if single:
        look.find(look.client, f"clients with rows of one class only: {_some(single)}",
                  "metrics that need both are undefined there")  # fmt: skip


def empty_cells(raw: Raw) -> Any:
    """Mark the cells that are missing."""
    return raw.values < 0 if raw.form == "texts" else np.isnan(raw.values)


def line_of(name: str, kind: Kind | None, raw: Raw, target: bool) -> Line:
    """Show a column."""
    empty = int(empty_cells(raw).sum())
    share = 100 * empty / len(raw.values)
    missing = "" if not empty else f"{share:.1f} %" if share >= 0.1 else f"{empty} cells"
    said = "left out" if kind is None else kind.kind
    return Line(name, f"target: {said}" if target else said, missing, _holds(raw, kind))


def _holds(raw: Raw, kind: Kind | None) -> str:
    there = raw.values[~empty_cells(raw)]
    if not len(there):
        return "nothing"
    if raw.form == "texts":
        counts = np.bincount(there, minlength=len(raw.names))
        order = sorted(range(len(raw.names)), key=lambda k: (-counts[k], raw.names[k]))
        if isinstance(kind, Date) and kind.format == "iso":
            return f"{min(raw.names[k] for k in order)} to {max(raw.names[k] for k in order)}"
        shown = [f"{raw.names[k][:20]} {100 * counts[k] / len(there):.0f} %" for k in order[:4]]
        more = int((counts > 0).sum()) - len(shown)
        return ", ".join(shown) + (f", {more} more" if more > 0 else "")
    if raw.form == "times":
        return f"{written_time(there.min())} to {written_time(there.max())}"
    return f"{there.min():g} to {there.max():g}, mean {there.mean():.4g}"


def first_value(raw: Raw) -> str:
    """Show the value of a constant column."""
    return repr(raw.names[0]) if raw.form == "texts" else f"{np.nanmin(raw.values):g}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def many(count: int, what: str) -> str:
    """Count things."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def in_shell(name: str) -> str:
    """Write a name as a shell takes it."""
    plain = all(c.isalnum() or c in "_-." for c in name)
    return name if plain else "'" + name.replace("'", "'\\''") + "'"
