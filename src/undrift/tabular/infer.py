"""A schema for a table that comes without one, as plain as can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from undrift.tabular.cells import FLAGS, date_formats, in_order
from undrift.tabular.frames import Raw, texts_of
from undrift.tabular.growing import MOST_CLASSES, MOST_TEXTS
from undrift.tabular.problems import Problems
from undrift.tabular.schema import (
    Category,
    Classes,
    Counts,
    Date,
    Feature,
    Flag,
    Number,
    Numbers,
    Schema,
    Target,
)


def infer(
    raw: Mapping[str, Raw],
    features: Sequence[str],
    target: str,
    kind: str,
    missing: tuple[str, ...],
    problems: Problems,
) -> Schema:
    """Say what each column is, by its cells; an indicator is added where cells are missing."""
    columns = tuple((name, feature(name, raw[name], problems)) for name in features)
    return Schema(columns, target, goal(target, raw[target], kind, problems), missing)


def feature(name: str, raw: Raw, problems: Problems) -> Feature:
    """Say what a column of features is."""
    if raw.form == "numbers":
        return Number(indicator=True)
    if raw.form == "times":
        return Date(indicator=True)
    if raw.names and {text.lower() for text in raw.names} <= FLAGS.keys():
        return Flag(indicator=True)
    if len(raw.names) <= MOST_TEXTS:
        return Category(in_order(raw.names) or None)
    formats = date_formats(raw.names)
    if formats:
        # two formats: reading says which to choose from
        return Date(format=formats[0] if len(formats) == 1 else None, indicator=True)
    problems.add(
        f"column {name!r} holds more than {MOST_TEXTS} different values: leave it out with "
        "exclude=[...] or features=[...], or name its kind in [columns]"
    )
    return Category()


def goal(name: str, raw: Raw, kind: str, problems: Problems) -> Target:
    """Say what the target is."""
    if kind == "count":
        return Counts()
    texts = raw.form == "texts" or raw.whole
    if kind == "numbers" or (kind == "auto" and not texts):
        return Numbers()
    names = texts_of(raw).names
    if kind == "auto" and len(names) > MOST_CLASSES:
        problems.add(
            f"column {name!r} holds more than {MOST_CLASSES} different values: say kind='classes' "
            "if they are classes, or kind='numbers'"
        )
    if len(names) < 2:
        held = f"one class only ({names[0]!r})" if names else "no class: all cells are missing"
        problems.add(f"column {name!r} holds {held}: there is nothing to tell apart")
        return Classes()
    return Classes(in_order(names))


def settled(schema: Schema, raw: Mapping[str, Raw]) -> Schema:
    """Fix the formats of dates, which new rows may be too few to decide."""
    made = []
    for name, kind in schema.features:
        if isinstance(kind, Date) and kind.format is None and raw[name].form == "texts":
            formats = date_formats(raw[name].names)
            kind = replace(kind, format=formats[0]) if len(formats) == 1 else kind
        made.append((name, kind))
    return replace(schema, features=tuple(made))
