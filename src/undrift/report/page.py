"""The report's page: one HTML file that asks nothing of the network.

Style, script and data stand inside it; a Content-Security-Policy allows these two texts by their
hash and forbids everything else.  The script replaces a still picture that is there without it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from undrift.report.curves import COLOURS, DASHES, curves_svg, look_of
from undrift.report.judged_page import judged_html, shade_rules
from undrift.report.page_data import (
    BaselineLine,
    Group,
    Page,
    Partition,
    RunCurves,
    Table,
    TableRow,
    finite,
    in_percent,
    known_metrics,
)
from undrift.state.disk import make_directory, write_atomically
from undrift.version import __version__

SCRIPTS = (
    *("base", "series", "beside", "chart", "reading", "zoom", "legend", "table", "judged"),
    *("partition", "start"),
)
AMOUNTS = ("bytes_up", "bytes_down", "seconds")  # what an axis may count instead of rounds
DIGITS = 7  # of an embedded number: more than a picture shows, half of a float's text


def write_page(path: Path, page: Page) -> Path:
    """Write the report as one self-contained HTML file that appears whole or not at all."""
    target = Path(path)
    make_directory(target.parent)
    # A lone surrogate, as in an undecodable file name, has no UTF-8 and becomes a question mark.
    write_atomically(target, [page_html(page).encode("utf-8", errors="replace")])
    return target


def page_html(page: Page) -> str:
    """Write the page as text; the same page is the same text."""
    style = _read("page.css") + _line_rules() + shade_rules()
    script = "(() => {\n" + "\n".join(['"use strict";', *map(_script, SCRIPTS)]) + "})();\n"
    return _fill(
        "page.html",
        policy=_policy(style, script),
        version=escape(__version__),
        title=escape(page.title),
        style=style,
        script=script,
        data=_embedded(_data_of(page)),
        verdict=_verdict(page.verdict),
        curves=_curves(page),
        table=_table(page.table, page.groups, page.baselines),
        judged=judged_html(page.judged),
        partition=_partition(page.partition),
        facts=_facts(page.facts),
        experiment=_listing("Experiment", "experiment", page.experiment, wrapped=False),
        command=_listing("Command to reproduce", "command", page.command, wrapped=True),
    )


def _read(name: str) -> str:
    return files("undrift.report").joinpath("template", name).read_text(encoding="utf-8")


def _script(name: str) -> str:
    return _read(f"{name}.js")


def _fill(template: str, **parts: str) -> str:
    return Template(_read(template)).substitute(parts)


def _policy(style: str, script: str) -> str:
    allowed = f"style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _line_rules() -> str:
    """Name the colours and dashes of all lines, for light pages, dark pages and paper."""
    light, dark = (
        " ".join(f"--line-{i}: {pair[tone]};" for i, pair in enumerate(COLOURS)) for tone in (0, 1)
    )
    colours = [f".c{i} {{ --own: var(--line-{i}); }}" for i in range(len(COLOURS))]
    dashes = [f".d{i} {{ --dash: {_numbers(d) or 'none'}; }}" for i, d in enumerate(DASHES)]
    themes = [
        f":root {{ {light} }}",
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}",
    ]
    return "\n".join([*themes, *colours, *dashes, ""])


def _numbers(values: Iterable[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


# ---- data ----------------------------------------------------------------------------------------


def _embedded(data: Mapping[str, Any]) -> str:
    """Write JSON that cannot end the script element it stands in."""
    text = json.dumps(data, separators=(",", ":"), sort_keys=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data_of(page: Page) -> dict[str, Any]:
    offered = _offered(page)
    return {
        "colours": len(COLOURS),
        "dashes": len(DASHES),
        "groups": [
            {"label": g.label, "runs": [_run_data(r, {*offered, *AMOUNTS}) for r in g.runs]}
            for g in page.groups
        ],
        "metrics": offered,
        "percent": [metric for metric in offered if in_percent(page.groups, metric)],
        "targets": {m: t for m, t in page.targets.items() if finite(t) is not None},
        "baselines": [_baseline_data(b, offered) for b in page.baselines],
        "sort": [_sort_keys(row) for row in page.table.rows],
        "partition": _partition_data(page.partition),
    }


def _baseline_data(line: BaselineLine, offered: Sequence[str]) -> dict[str, Any]:
    known = {m: v for m in offered if (v := _rounded(line.values.get(m))) is not None}
    return {"label": line.label, "values": known}


def _offered(page: Page) -> list[str]:
    known = known_metrics(page.groups)
    return [metric for metric in dict.fromkeys(page.metrics) if metric in known]


def _run_data(run: RunCurves, names: set[str]) -> dict[str, Any]:
    values = {n: [_rounded(v) for v in run.values[n]] for n in run.values if n in names}
    return {"rounds": list(run.rounds), "values": values}


def _rounded(value: float | None) -> float | None:
    known = finite(value)
    return None if known is None else _shortest(float(f"{known:.{DIGITS}g}"))


def _shortest(value: float) -> float:
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _sort_keys(row: TableRow) -> list[float | str | None]:
    return [key if isinstance(key, str) else finite(key) for key in row.sort]


def _partition_data(partition: Partition | None) -> dict[str, Any] | None:
    if partition is None:
        return None
    counts = [[int(count) for count in row] for row in partition.counts]
    return {"counts": counts, "classes": list(partition.class_names)}


# ---- sections ------------------------------------------------------------------------------------


def _verdict(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    items = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="verdict">\n{items}\n</ul>'


def _curves(page: Page) -> str:
    offered = _offered(page)
    if not offered:
        nothing = '<p class="nothing">No round with a value has been recorded yet.</p>'
        return f"<section>\n<h2>Learning curves</h2>\n{nothing}\n</section>"
    return _fill(
        "curves.html",
        picture=curves_svg(page.groups, offered[0], page.targets.get(offered[0])),
        legend="\n".join(_legend_entry(g, group) for g, group in enumerate(page.groups)),
        note=_how_averaged(page.groups),
    )


def _legend_entry(place: int, group: Group) -> str:
    name = f"{_swatch(place)}<span>{escape(group.label)}</span>"
    attributes = f'type="button" data-group="{place}" aria-pressed="true"'
    return f"<li><button {attributes}>{name}</button></li>"


def _swatch(place: int) -> str:
    return _swatch_of(look_of(place))


def _swatch_of(look: str) -> str:
    line = '<line x1="1" x2="29" y1="5" y2="5"/>'
    return f'<svg class="swatch {look}" viewBox="0 0 30 10" aria-hidden="true">{line}</svg>'


def _how_averaged(groups: Sequence[Group]) -> str:
    counts = sorted({len(group.runs) for group in groups})
    if counts[-1] == 1:
        return "One seed each: no band."
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return (
        f"Line: mean over {seeds} seeds. Band: one standard deviation (n − 1) to either side. "
        "Seeds without a value in a round are left out of both."
    )


def _table(table: Table, groups: Sequence[Group], baselines: Sequence[BaselineLine]) -> str:
    if not table.columns:
        return ""
    numeric = [_is_numeric(table, column) for column in range(len(table.columns))]
    names = [f"<span>{escape(column)}</span>" for column in table.columns]
    heads = [_cell("th", *pair) for pair in zip(numeric, names, strict=True)]
    places = {group.label: place for place, group in enumerate(groups)}
    beside = {line.label: place for place, line in enumerate(baselines)}
    rows = [_row(row, numeric, places, beside) for row in table.rows]
    note = f'\n<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        '<section aria-labelledby="results-heading">\n<h2 id="results-heading">Results</h2>\n'
        '<div class="scroll" role="region" aria-labelledby="results-heading" tabindex="0">'
        f'<table class="results" id="results">\n<thead><tr>{"".join(heads)}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody>\n</table></div>{note}\n</section>"
    )


def _row(
    row: TableRow, numeric: Sequence[bool], places: Mapping[str, int], beside: Mapping[str, int]
) -> str:
    texts = [escape(cell) for cell in row.cells]
    if row.beside and row.cells[0] in beside:
        texts[0] = _swatch_of(f"beside b{beside[row.cells[0]] % 4}") + texts[0]
    elif row.cells[0] in places:
        texts[0] = _swatch(places[row.cells[0]]) + texts[0]
    cells = [_cell("td", *pair) for pair in zip(numeric, texts, strict=True)]
    kind = ' class="baseline"' if row.beside else ""
    return f"<tr{kind}>{''.join(cells)}</tr>\n"


def _cell(tag: str, numeric: bool, content: str) -> str:
    kind = ' scope="col"' if tag == "th" else ""
    kind += ' class="number"' if numeric else ""
    return f"<{tag}{kind}>{content}</{tag}>"


def _is_numeric(table: Table, column: int) -> bool:
    keys = [row.sort[column] for row in table.rows]
    return any(key is not None for key in keys) and not any(isinstance(key, str) for key in keys)


def _partition(partition: Partition | None) -> str:
    if partition is None:
        return ""
    lines = partition.summary.strip("\n")
    # A summary of several lines is a table in columns.
    tag = "pre" if "\n" in lines else "p"
    summary = f'<{tag} class="note summary">{escape(lines)}</{tag}>' if lines else ""
    return _fill("partition.html", summary=summary)


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    if not facts:
        return ""
    items = [f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts]
    listed = "\n".join(items)
    return f'<section>\n<h2>Facts</h2>\n<dl class="facts">\n{listed}\n</dl>\n</section>'


def _listing(heading: str, name: str, text: str, *, wrapped: bool) -> str:
    if not text:
        return ""
    return _fill(
        "listing.html",
        heading=heading,
        name=name,
        kind="listing wrapped" if wrapped else "listing",
        text=escape(text),
    )
