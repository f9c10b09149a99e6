"""The page's section on how good models are: metrics, sites by name, curves, confusion, card."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from undrift.report.judged import MOST_CLASSES, MOST_SITES, Judged, Site, shown
from undrift.report.judged_charts import chart_html, charts_of, plain_table
from undrift.report.markdown import html_of

SHADES = 10


def judged_html(judged: Sequence[Judged]) -> str:
    """Write the section; a script shows one model at a time where there are several."""
    if not judged:
        return ""
    articles = "".join(_article(one, place) for place, one in enumerate(judged))
    return (
        '<section aria-labelledby="judged-heading">\n'
        '<h2 id="judged-heading">How good the models are</h2>\n'
        '<div class="controls" id="judged-controls" hidden><label class="field">Model '
        '<select id="judged" autocomplete="off"></select></label></div>\n'
        f"{articles}</section>"
    )


def _article(one: Judged, place: int) -> str:
    name = f"judged-{place}"
    parts = [_metrics(one), _sites(one, name), _charts(one, name), _card(one)]
    rows = f"{one.examples:,} rows" if one.examples != 1 else "1 row"
    told = f"After round {one.round}, on {rows} ({_whose(one.examples_of)})."
    return (
        f'<article class="judged" aria-labelledby="{name}">\n<h3 id="{name}">{escape(one.label)}'
        f'</h3>\n<p class="note">{escape(told)}</p>\n{"".join(parts)}</article>\n'
    )


def _whose(exam: str) -> str:
    names = {"test": "the test set", "own": "each client's own", "validation": "held-out clients"}
    return names.get(exam, exam)


def _metrics(one: Judged) -> str:
    """List the metrics, beside each the site that fares worst by it."""
    columns = ["metric", "all rows"]
    rows = [[_words(name), shown(name, value)] for name, value in one.metrics]
    if one.sites:
        columns += ["worst site", "its value"]
        for place, row in enumerate(rows):
            worst = one.worst(place)
            row += (
                ["-", "-"] if worst is None else [worst[0], shown(one.metrics[place][0], worst[1])]
            )
    table = plain_table(columns, rows, "Metrics", "th")
    return f"<h4>Metrics</h4>\n{table}"


def _words(name: str) -> str:
    return name.replace("_", " ")


# ---------------------------------------------------------------------------------------- sites
def _sites(one: Judged, name: str) -> str:
    """List sites with every metric; a click on a column's name sorts."""
    if not one.sites:
        return ""
    names = ["site", "rows", *(_words(n) for n, _ in one.metrics)]
    heads = "".join(_head(n, number=i > 0) for i, n in enumerate(names))
    body = "".join(_site_row(site, one) for site in one.sites[:MOST_SITES])
    label = f'aria-labelledby="{name}-sites"'
    first = _words(one.metrics[0][0])
    note = f"The worst by {first} first, on {_whose(one.sites_of)}. A dash: not defined there."
    if len(one.sites) > MOST_SITES:
        note += f" {len(one.sites) - MOST_SITES:,} more sites are in evaluation.json."
    return (
        f'<h4 id="{name}-sites">Sites</h4>\n'
        f'<div class="scroll" role="region" {label} tabindex="0">'
        f'<table class="results sites"><thead><tr>{heads}</tr></thead>\n'
        f'<tbody>\n{body}</tbody></table></div>\n<p class="note">{escape(note)}</p>\n'
    )


def _head(name: str, number: bool) -> str:
    kind = ' class="number"' if number else ""
    return f'<th scope="col"{kind}><span>{escape(name)}</span></th>'


def _site_row(site: Site, one: Judged) -> str:
    cells = [f'<th scope="row" data-key="{escape(site.name)}">{escape(site.name)}</th>']
    cells.append(f'<td class="number" data-key="{site.examples}">{site.examples:,}</td>')
    for (metric, _), value in zip(one.metrics, site.values, strict=True):
        key = "" if value is None else f' data-key="{value:.9g}"'
        cells.append(f'<td class="number"{key}>{shown(metric, value)}</td>')
    return f"<tr>{''.join(cells)}</tr>\n"


# --------------------------------------------------------------------------------------- charts
def _charts(one: Judged, name: str) -> str:
    pairs = enumerate(charts_of(one))
    made = "".join(chart_html(chart, f"{name}-chart-{i}") for i, chart in pairs)
    made += _confusion(one, name)
    return f'<div class="charts">\n{made}</div>\n' if made else ""


def _confusion(one: Judged, name: str) -> str:
    """Write the confusion matrix: shares of each true class, and counts."""
    if not one.confusion:
        return ""
    caption = f'<figcaption id="{name}-confusion">Confusion matrix</figcaption>'
    if len(one.classes) > MOST_CLASSES:
        note = f'<p class="note">{len(one.classes)} classes: see evaluation.json.</p>'
        return f'<figure class="chart">\n{caption}\n{note}\n</figure>\n'
    heads = "".join(f'<th scope="col">{escape(c)}</th>' for c in one.classes)
    count = len(one.classes)
    body = "".join(map(_confused, one.classes, one.confusion))
    wide = ' class="chart wide"' if count > 5 else ' class="chart"'
    return (
        f'<figure{wide}>\n{caption}\n<div class="scroll" role="region" '
        f'aria-labelledby="{name}-confusion" tabindex="0"><table class="confusion"><thead>'
        f'<tr><td></td><th scope="colgroup" colspan="{count}">predicted</th></tr>'
        f'<tr><th scope="col">true</th>{heads}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>\n"
        '<p class="note">Share of the rows of a true class, and how many.</p>\n</figure>\n'
    )


def _confused(name: str, row: Sequence[int]) -> str:
    total, cells = sum(row), []
    for count in row:
        share = count / total if total else 0.0
        told = f"{100 * share:.1f} %" if total else "-"
        cells.append(
            f'<td class="s{round(SHADES * share)}"><b>{told}</b> <span>{count:,}</span></td>'
        )
    return f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>\n'


def shade_rules() -> str:
    """Name the shades of a confusion matrix, light enough for text on them."""
    rules = (
        f".s{i} {{ background: color-mix(in srgb, var(--accent) {4 * i}%, transparent); }}"
        for i in range(1, SHADES + 1)
    )
    return "\n".join([*rules, ""])


def _card(one: Judged) -> str:
    if not one.card:
        return ""
    return f'<details class="card"><summary>Model card</summary>\n{html_of(one.card)}</details>\n'
