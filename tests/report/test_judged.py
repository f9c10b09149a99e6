"""How good models are, on the page: read from evaluation.json, drawn, escaped."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from report.pages import HOSTILE, evaluation, page
from undrift.errors import DataError
from undrift.report.judged import judged_from, shown
from undrift.report.judged_charts import charts_of
from undrift.report.judged_page import judged_html
from undrift.report.markdown import html_of
from undrift.report.page import page_html
from undrift.report.page_data import BaselineLine, TableRow


class Tags(HTMLParser):
    """Whether tags close in the order in which they open, and every id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.named: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert "style" not in given and not any(name.startswith("on") for name in given)
        self.ids += [given["id"]] if given.get("id") else []
        for name in ("aria-labelledby", "aria-describedby"):
            self.named |= set((given.get(name) or "").split())
        if tag not in ("input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_everything_is_read() -> None:
    made = judged_from("fedavg, seed 0", evaluation())
    assert made.metrics[0] == ("accuracy", 0.75) and made.classes == ("well", "ill")
    assert made.confusion == ((60, 20), (5, 15))
    assert [s.name for s in made.sites] == ["Bonn", "Aachen", "Dachau"]
    assert made.worst(0) == ("Bonn", 0.5) and made.worst(1) == ("Bonn", 0.6)
    assert made.worst(2) == ("Aachen", 0.3)  # of an error, the largest
    assert [chart.name for chart in charts_of(made)] == [
        "ROC curve, AUC 0.8", "Precision and recall, average precision -",
        "Calibration, ECE 0.05"]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": None}, {"metrics": {"auc": "x"}}, {"round": -1}, {"examples": True},
        {"confusion": [[1, 2]]}, {"confusion": [[1]]}, {"roc": [{"class": "a", "x": [0], "y": []}]},
        {"roc": [{"class": "a", "x": [2.0], "y": [0.5]}]}, {"sites": [{"site": "a"}]},
        {"calibration": {"examples": [1], "said": [], "found": []}}, {"sites": 3},
    ],
)  # fmt: skip
def test_what_cannot_be_so_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"evaluation of a is damaged.*`undrift evaluate`"):
        judged_from("a", {**evaluation(), **change})


def test_numbers_have_no_curves() -> None:
    told = {"round": 3, "examples": 9, "examples_of": "own", "metrics": {"rmse": 1.5, "r2": None}}
    made = judged_from("a", told)
    text = judged_html([made])
    assert charts_of(made) == [] and "<svg" not in text and "each client&#x27;s own" in text
    assert ">1.5<" in text and shown("r2", None) == "-"


def test_the_section_is_sound_html_and_its_labels_are_there() -> None:
    tags = Tags(judged_html([judged_from(f"v{i}", evaluation(), CARD) for i in range(2)]))
    assert len(tags.ids) == len(set(tags.ids)) and tags.named <= set(tags.ids)


def test_every_chart_has_a_name_and_a_table() -> None:
    text = judged_html([judged_from("a", evaluation())])
    assert text.count('role="img"') == text.count("<summary>Numbers of this chart") == 3
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(figures) == 4 and all("<figcaption" in f and "<table" in f for f in figures)
    confusion = figures[3]
    assert 'class="s8"><b>75.0 %</b> <span>60</span>' in confusion
    assert "guessing: 20.0 %" in figures[1]  # the share of the class


def test_points_lie_where_they_should() -> None:
    (first, *_) = charts_of(judged_from("a", evaluation()))
    points = re.findall(r'points="([^"]+)"', first.inside)[0].split()
    assert points[0] == "44.0,278.0" and points[-1] == "348.0,12.0"
    assert first.rows[0] == ("0.0 %", "0.0 %") and first.rows[-1] == ("100.0 %", "100.0 %")


def test_several_classes_have_lines_and_names() -> None:
    told = evaluation()
    names = ["a", "b", HOSTILE]
    told["classes"], told["confusion"] = names, [[5, 1, 1], [0, 9, 0], [0, 0, 0]]
    told["roc"] = [{"class": n, "x": [0, 1], "y": [0, 1]} for n in names[:2]]
    told["roc"].append({"class": HOSTILE, "x": [], "y": []})  # it has no examples
    made = charts_of(judged_from("a", told))
    assert made[0].lines == ("a", "b") and made[0].columns[0] == "class"
    assert ">-</b>" in judged_html([judged_from("a", told)])


def test_hostile_names_are_texts() -> None:
    told = evaluation()
    told["sites"][0]["site"], told["classes"] = HOSTILE, [HOSTILE, "ill"]
    text = judged_html([judged_from(HOSTILE, told, f"# {HOSTILE}\n\n| {HOSTILE} | `{HOSTILE}`")])
    assert "<img" not in text and "</script" not in text
    Tags(text)


def test_many_sites_are_cut() -> None:
    told = evaluation()
    told["sites"] = [{**told["sites"][0], "site": f"s{i}"} for i in range(300)]
    text = judged_html([judged_from("a", told)])
    assert text.count('scope="row" data-key="s') == 200 and "100 more sites are in" in text


CARD = """# Model card: x

## Data

128 rows & `code <b>`
of 3 sites.

| a | b |
|---|--:|
| 1 \\| 2 | &lt;i> |

- one
- two

```python
x = "<b>"
# no heading
```
"""


def test_a_card_is_headings_tables_lists_and_code() -> None:
    text = html_of(CARD)
    assert "<h4>Model card: x</h4>" in text and "<h5>Data</h5>" in text
    assert "<p>128 rows &amp; <code>code &lt;b&gt;</code> of 3 sites.</p>" in text
    assert "<td>1 | 2</td><td>&lt;i&gt;</td>" in text and "<li>one</li><li>two</li>" in text
    assert '<pre tabindex="0">x = &quot;&lt;b&gt;&quot;\n# no heading</pre>' in text
    assert "<h4> no heading" not in text
    Tags(text)
    assert html_of("```\nopen") == '<pre tabindex="0">open</pre>\n'


def test_baselines_stand_in_the_data_and_in_the_table() -> None:
    lines = (BaselineLine("always 'a'", {"test_accuracy": 0.5, "test_loss": None, "other": 1.0}),)
    table = page().table
    row = TableRow(("always 'a'", "50.0", ""), ("always 'a'", 50.0, None), beside=True)
    table = type(table)(table.columns, (*table.rows, row), table.note)
    text = page_html(page(table=table, baselines=lines))
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])
    assert data["baselines"] == [{"label": "always 'a'", "values": {"test_accuracy": 0.5}}]
    assert '<tr class="baseline"><td><svg class="swatch beside b0"' in text


def test_a_report_has_cards_and_sites_of_its_runs(tmp_path: Path) -> None:
    from experiment.tiny import tiny
    from undrift.comparing import compare

    runs = [tiny("rounds=1", "evaluate.clients=true", f"algorithm={a}") for a in ALGORITHMS]
    compare(runs, tmp_path, jobs=1)
    text = (tmp_path / "report.html").read_text()
    assert text.count('<article class="judged"') == 2 and "Model card: tiny" in text
    assert "No variant is better" in text or "always '" in text
    place = next(tmp_path.glob("*/seed-0/evaluation.json"))
    place.write_text("{")
    compare(runs, tmp_path, jobs=1)
    assert (tmp_path / "report.html").read_text().count('<article class="judged"') == 1


ALGORITHMS = ("{use='fedavg', lr=0.1}", "{use='fedprox', lr=0.1, mu=0.1}")
