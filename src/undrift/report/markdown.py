"""The Markdown of model cards as HTML: headings, paragraphs, lists, tables, code; nothing else.

Every text is escaped, whatever it says; there are no links, pictures or tags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape, unescape
from itertools import groupby

LEVELS_DOWN = 3  # a card's # is a heading of the fourth level on the page
_CELLS = re.compile(r"(?<!\\)\|")
_CODE = re.compile(r"`([^`]*)`")


def html_of(text: str) -> str:
    """Write a card's Markdown as HTML.

    >>> print(html_of("Some `code` & <b>."), end="")
    <p>Some <code>code</code> &amp; &lt;b&gt;.</p>
    """
    return "".join(f"{block}\n" for block in _blocks(text.splitlines()))


def _blocks(lines: Sequence[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        if lines[at].startswith("```"):
            end = next((i for i in range(at + 1, len(lines)) if lines[i] == "```"), len(lines))
            yield f'<pre tabindex="0">{escape(chr(10).join(lines[at + 1 : end]))}</pre>'
            at = end + 1
            continue
        end = next((i for i in range(at, len(lines)) if lines[i].startswith("```")), len(lines))
        for kind, some in groupby(lines[at:end], _kind):
            yield from WRITERS[kind](list(some))
        at = end


def _kind(line: str) -> str:
    if not line.strip():
        return "nothing"
    if line.startswith("#"):
        return "heading"
    return {"|": "table", "-": "list"}.get(line[0], "paragraph")


def _headings(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        words = line.lstrip("#")
        level = min(6, len(line) - len(words) + LEVELS_DOWN)
        yield f"<h{level}>{_inline(words.strip())}</h{level}>"


def _list(lines: Sequence[str]) -> Iterator[str]:
    yield "<ul>" + "".join(f"<li>{_inline(line[1:].strip())}</li>" for line in lines) + "</ul>"


def _table(lines: Sequence[str]) -> Iterator[str]:
    head, *rest = [[c.strip() for c in _CELLS.split(line)[1:-1]] for line in lines]
    rows = [row for row in rest if not all(set(c) <= set("-:") and c for c in row)]
    heads = "".join(f'<th scope="col"><span>{_inline(c)}</span></th>' for c in head)
    top = f"<thead><tr>{heads}</tr></thead>" if any(head) else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{_inline(c)}</td>" for c in row) + "</tr>" for row in rows
    )
    yield (
        '<div class="scroll" role="region" aria-label="Table of the model card" tabindex="0">'
        f'<table class="results small">{top}<tbody>{body}</tbody></table></div>'
    )


def _paragraph(lines: Sequence[str]) -> Iterator[str]:
    yield f"<p>{_inline(' '.join(lines))}</p>"


def _nothing(lines: Sequence[str]) -> Iterator[str]:
    return iter(())


WRITERS: dict[str, Callable[[Sequence[str]], Iterator[str]]] = {
    "heading": _headings,
    "list": _list,
    "nothing": _nothing,
    "paragraph": _paragraph,
    "table": _table,
}


def _inline(text: str) -> str:
    """Escape a line; what a card has escaped already is read back first."""
    plain = unescape(text.replace("\\|", "|"))
    return _CODE.sub(r"<code>\1</code>", escape(plain))
