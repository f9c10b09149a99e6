"""A schema for an unknown table, and everything noticeable about its columns at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from undrift.errors import ConfigError, unknown_name
from undrift.tabular.cells import (
    FLAGS,
    FORMATS,
    MISSING,
    as_number,
    date_formats,
    in_order,
)
from undrift.tabular.frames import Raw, texts_of, typed_columns
from undrift.tabular.growing import MOST_TEXTS, RawTable, Wish
from undrift.tabular.infer import settled
from undrift.tabular.looking import (
    Line,
    Look,
    clients_of,
    empty_cells,
    first_value,
    in_shell,
    line_of,
    many,
)
from undrift.tabular.problems import SHOWN, Problems, one_error
from undrift.tabular.reading import TableFile, header_problems, open_table, read
from undrift.tabular.schema import (
    PARTS,
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
    checked_missing,
)
from undrift.tabular.suspects import codes_of, is_identifier, tells_target

FEW_NUMBERS = 10  # different whole numbers: they may be codes
FEW_CLASSES = 20  # different whole numbers of a target: they are taken for classes
RARE, MANY_ROWS = 5, 200  # levels of fewer rows go to "other", in a table that is not tiny
KINDS = ("number", "category", "flag", "date")
GOALS = {"classes": "classes", "numbers": "number", "number": "number", "count": "count"}
WISHES: Mapping[str, Wish] = {
    **dict.fromkeys(("category", "flag", "date", "classes"), "texts"),
    **dict.fromkeys(("number", "count"), "numbers"),
}


@dataclass
class Proposal:
    """A schema, what was left out, and what somebody should look at."""

    schema: Schema
    lines: list[Line]
    findings: list[str]
    exclude: list[str]
    rows: int
    dropped: int  # rows without a target
    clients: tuple[str, ...] = ()


def propose(
    source: Any,
    target: str,
    client: str | None = None,
    exclude: Sequence[str] = (),
    kinds: Mapping[str, str] | None = None,
    missing: Sequence[str] | None = None,
) -> Proposal:
    """Look at a table; what cannot be read makes one error, everything else is a finding."""
    given = dict(kinds or {})
    gone = MISSING if missing is None else checked_missing(missing)
    opened = open_table(source)
    names = _features(opened, target, client, exclude, given)
    problems = Problems(str(opened.path))
    table = _read(opened, names, target, client, given, gone, problems)
    look = Look(target, client, given, len(table.place.numbers), problems)
    goal = _goal(look, table.columns[target])
    for name in names:
        kind = _feature(look, name, table.columns[name])
        if kind is not None:
            look.columns[name] = kind
    if not look.columns:
        why = [f for f in look.findings if f.partition(": ")[0] in look.left]
        look.problems.add("; ".join(["no column is left for the features", *why]))
    clients = () if client is None else clients_of(look, table)
    made = Schema(tuple(look.columns.items()), target, goal, gone)
    made = settled(made, table.columns)
    used = {name: table.columns[name] for name in made.names}
    typed_columns(used, made, table.place, look.problems)
    look.problems.check()
    empty = empty_cells(table.columns[target])
    lines = [line_of(n, made[n] if n in made.names else None, table.columns[n], n == target)
             for n in (*names, target)]  # fmt: skip
    left = [*exclude, *look.left]
    return Proposal(made, lines, look.findings, left, look.rows, int(empty.sum()), clients)


# --------------------------------------------------------------------------------------- asked
def _features(
    opened: TableFile,
    target: str,
    client: str | None,
    exclude: Sequence[str],
    kinds: Mapping[str, str],
) -> list[str]:
    problems = Problems(str(opened.path))
    header_problems(opened, problems)
    special = [target, *([] if client is None else [client])]
    for name in dict.fromkeys([*special, *exclude, *kinds]):
        if name not in opened.names:
            problems.add(str(unknown_name("column", name, opened.names)))
    if client == target:
        problems.add(f"column {target!r} is asked for two times: target and client must differ")
    for name in exclude:
        if name in special or name in kinds:
            problems.add(f"column {name!r} is excluded and asked for: say one of both")
    problems.check()
    wrong = [text for name, kind in kinds.items() if (text := _wrong(name, kind, target))]
    if client is not None and client in kinds:
        wrong.append(f"{client}: the client has no kind")
    if wrong:
        raise one_error("--kind", wrong)
    plain = [name for name in opened.names if not name.startswith("__index_level_")]
    return [name for name in plain if name not in (*special, *exclude)]


def _wrong(name: str, kind: str, target: str) -> str:
    known = list(GOALS) if name == target else list(KINDS)
    first, _, form = kind.partition(":")
    if first not in known:
        return f"{name}: {unknown_name('kind', first, known)}"
    if form and (first != "date" or form not in FORMATS):
        return f"{name}: {unknown_name('format of a date', form, list(FORMATS))}"
    return ""


def _read(
    opened: TableFile,
    names: Sequence[str],
    target: str,
    client: str | None,
    kinds: Mapping[str, str],
    gone: Sequence[str],
    problems: Problems,
) -> RawTable:
    wishes: dict[str, Wish] = dict.fromkeys(names, "feature")
    wishes[target] = "target"
    for name, kind in kinds.items():
        first = kind.partition(":")[0]
        wishes[name] = WISHES[GOALS[first] if name == target else first]
    if client is not None:
        wishes[client] = "texts"
    made = read(opened, wishes, gone, problems)
    codes = [n for n in names if made.columns[n].padded and wishes[n] == "feature"]
    if codes:  # 007 is a text
        made = read(opened, {**wishes, **dict.fromkeys(codes, "texts")}, gone)
        columns = {n: r._replace(padded=n in codes) for n, r in made.columns.items()}
        made = made._replace(columns=columns)
    return made


# -------------------------------------------------------------------------------------- target
def _goal(look: Look, raw: Raw) -> Target:
    """Say what the target is."""
    name, asked = look.target, look.kinds.get(look.target)
    kind = GOALS[asked] if asked else _goal_kind(look, raw)
    if kind == "count":
        look.goal = raw
        return Counts()
    if kind == "number":
        values = [as_number(text) for text in raw.names]
        numbers = np.array([*(np.nan if v is None else v for v in values), np.nan])
        look.goal = raw if raw.form == "numbers" else Raw("numbers", numbers[raw.values])
        return Numbers()
    look.goal = texts = texts_of(raw)
    codes, distinct = codes_of(texts)
    if distinct < 2:
        held = f"one class only ({texts.names[0]!r})" if distinct else "no class: all is missing"
        look.problems.add(f"column {name!r} holds {held}: there is nothing to tell apart")
        return Classes()
    counts = np.bincount(codes[codes >= 0], minlength=len(texts.names))
    for k in np.flatnonzero(counts < RARE).tolist()[:SHOWN]:
        rows = many(int(counts[k]), "row")
        words = any(as_number(text) is None for text in texts.names)
        other = "" if words else f", or --kind {in_shell(name)}=numbers"
        look.find(name, f"the class {texts.names[k]!r} has {rows} only",
                  f"join classes in the table{other}")  # fmt: skip
    return Classes(_in_order_of(texts.names, counts))


def _in_order_of(names: Sequence[str], counts: Any) -> tuple[str, ...]:
    """Order classes; of two words the rarer is the last, for which recall and precision count."""
    if len(names) == 2 and as_number(names[0]) is None:
        common, rare = sorted(zip(-counts, names, strict=True))
        return common[1], rare[1]
    return in_order(names)


def _goal_kind(look: Look, raw: Raw) -> str:
    name = look.target
    if raw.form != "texts":
        whole = raw.form == "numbers" and raw.whole
        if not whole:
            return "number"
    elif not (raw.whole and raw.names):
        return "classes"
    distinct = codes_of(raw)[1]
    kind = "classes" if distinct <= FEW_CLASSES else "number"
    other = "numbers" if kind == "classes" else "classes"
    if distinct > 2:
        look.find(
            name,
            f"{distinct} different whole numbers, taken for {kind.removesuffix('s')}s",
            f"--kind {in_shell(name)}={other} or --kind {in_shell(name)}=count says otherwise",
        )
    return kind


# ------------------------------------------------------------------------------------ features
def _feature(look: Look, name: str, raw: Raw) -> Feature | None:
    """Say what a column is; None leaves it out."""
    asked = look.kinds.get(name)
    empty = empty_cells(raw)
    present = look.rows - int(empty.sum())
    distinct = codes_of(raw)[1]
    if asked is not None:
        _suspect(look, name, raw, leave=False)
        return _as_asked(asked, raw, bool(empty.any()))
    if distinct <= 1:
        what = "every cell is missing" if not distinct else f"constant ({first_value(raw)})"
        look.leave(name, what, "category")
        return None
    if is_identifier(name, raw, distinct, present) and not _is_date(raw):
        what = f"an identifier ({distinct} different values in {present} rows)"
        look.leave(name, what, "category" if raw.form == "texts" else "number")
        return None
    if _suspect(look, name, raw, leave=True):
        return None
    if 2 * present < look.rows:
        share = round(100 * (look.rows - present) / look.rows)
        look.find(
            name, f"{share} % of its cells are missing", f"--exclude {in_shell(name)} drops it"
        )
    return _guess(look, name, raw, distinct, bool(empty.any()))


def _suspect(look: Look, name: str, raw: Raw, leave: bool) -> bool:
    """Note a column that gives the target away; one that equals it is left out."""
    assert look.goal is not None
    told = tells_target(raw, look.goal)
    if told is None:
        return False
    kind = "number" if raw.form == "numbers" else "category"
    if leave and told.startswith(("equals", "is the target")):
        look.leave(name, f"suspect, {told}", kind)
        return True
    look.find(name, f"suspect, {told}", f"--exclude {in_shell(name)} drops it")
    return False


def _as_asked(asked: str, raw: Raw, missing: bool) -> Feature:
    kind, _, form = asked.partition(":")
    if kind == "number":
        return Number("median" if missing else "mean", missing)
    if kind == "flag":
        return Flag(indicator=missing)
    if kind == "date":
        return Date(_parts(raw), form or None, indicator=missing)
    return _category(texts_of(raw))[0]


def _guess(look: Look, name: str, raw: Raw, distinct: int, missing: bool) -> Feature | None:
    if raw.form == "times":
        return _as_asked("date", raw, missing)
    if raw.form == "numbers":
        if raw.whole and distinct <= FEW_NUMBERS:
            look.find(name, f"{distinct} different whole numbers, taken for a number",
                      f"--kind {in_shell(name)}=category if they are codes")  # fmt: skip
        return _as_asked("number", raw, missing)
    if {text.lower() for text in raw.names} <= FLAGS.keys():
        return _as_asked("flag", raw, missing)
    formats = date_formats(raw.names)
    if len(formats) == 1:
        look.find(name, f"dates ({formats[0]})", f"--kind {in_shell(name)}=category says otherwise")
        return _as_asked(f"date:{formats[0]}", raw, missing)
    if formats:
        look.left.append(name)
        ways = " or ".join(f"--kind {in_shell(name)}=date:{f}" for f in formats)
        look.find(name, f"dates that fit {' and '.join(formats)}, left out", f"say {ways}")
        return None
    if _two_formats(look, name, raw):
        return None
    return _levels(look, name, raw, distinct)


def _levels(look: Look, name: str, raw: Raw, distinct: int) -> Feature:
    kind, rare = _category(raw)
    if raw.padded:
        look.find(name, "whole numbers that begin with zeros, taken for a category",
                  f"--kind {in_shell(name)}=number says otherwise")  # fmt: skip
    assert kind.levels is not None
    if distinct > MOST_TEXTS:
        look.find(name, f"{distinct} levels, of which the {MOST_TEXTS} most frequent are kept",
                  f"the others are \"other\"; --exclude {in_shell(name)} drops it")  # fmt: skip
    elif rare:
        shown = ", ".join(map(repr, rare[:3])) + (", ..." if len(rare) > 3 else "")
        look.find(name, f'rare levels ({shown}) go to "other"', "add them to its levels")
    folded: dict[str, str] = {}
    for level in kind.levels:
        other = folded.setdefault(" ".join(level.lower().split()), level)
        if other != level:
            look.find(name, f"{other!r} and {level!r} differ in case or blanks only",
                      "write them alike in the table")  # fmt: skip
    return kind


def _category(raw: Raw) -> tuple[Category, list[str]]:
    codes = raw.values
    counts = np.bincount(codes[codes >= 0], minlength=len(raw.names))
    order = sorted(range(len(raw.names)), key=lambda k: (-counts[k], raw.names[k]))
    kept = [k for k in order if counts[k]][:MOST_TEXTS]
    rare = []
    if order and len(codes) >= MANY_ROWS and counts[order[0]] >= RARE:
        rare = [raw.names[k] for k in kept if counts[k] < RARE]
        kept = [k for k in kept if counts[k] >= RARE]
    return Category(in_order(raw.names[k] for k in kept) or None), rare


def _is_date(raw: Raw) -> bool:
    return raw.form == "texts" and bool(date_formats(raw.names))


def _two_formats(look: Look, name: str, raw: Raw) -> bool:
    """Refuse a column whose cells are dates, but of several formats."""
    first: dict[str, str] = {}
    for text in raw.names:
        found = next((n for n, parse in FORMATS.items() if parse(text) is not None), None)
        if found is None:
            return False
        first.setdefault(found, text)
    shown = " and ".join(f"{text!r} ({form})" for form, text in list(first.items())[:3])
    look.problems.add(
        f"column {name!r} holds dates of several formats: {shown}; write all in one, or say "
        f"--kind {in_shell(name)}=category or --exclude {in_shell(name)}"
    )
    return True


def _parts(raw: Raw) -> tuple[str, ...]:
    usual = PARTS[0], PARTS[1], PARTS[2], PARTS[4]
    clock = raw.form == "times" and bool((np.nan_to_num(raw.values) % 86_400 != 0).any())
    clock = clock or (raw.form == "texts" and any(":" in text for text in raw.names))
    return (*usual, "hour") if clock else usual


def read_kinds(given: Sequence[str], target: str) -> dict[str, str]:
    """Read `--kind`: a kind of the target, or column=kind.

    >>> read_kinds(["classes", "ward=category"], "outcome")
    {'outcome': 'classes', 'ward': 'category'}
    """
    made: dict[str, str] = {}
    for text in given:
        name, equals, kind = text.rpartition("=")
        name = name if equals else target
        if made.setdefault(name, kind) != kind:
            raise ConfigError(f"--kind says two things of {name!r}: {made[name]} and {kind}")
    return made
