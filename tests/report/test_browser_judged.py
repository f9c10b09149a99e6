"""Sites, charts, baselines and cards as a person uses them, in a headless Chromium."""

from __future__ import annotations

import itertools

import pytest

from report.pages import HOSTILE, evaluation, page
from report.test_browser import PLOT
from report.test_judged import CARD
from undrift.report.judged import judged_from
from undrift.report.page_data import BaselineLine, TableRow

BASELINES = (
    BaselineLine("always 'well'", {"test_accuracy": 0.52, "test_loss": 0.69}),
    BaselineLine("each site alone", {"test_accuracy": 0.521, "drift": 1e9}),
    BaselineLine("all data pooled", {"test_accuracy": 0.522}),
)


def judged_page(**changes):
    made = [judged_from(f"{n}, seed 0", evaluation(), CARD) for n in ("fedavg", "scaffold")]
    table = page().table
    rows = [TableRow((b.label, "52.0", ""), (b.label, 52.0, None), True) for b in BASELINES]
    table = type(table)(table.columns, (*table.rows, *rows), table.note)
    return page(**{"judged": tuple(made), "baselines": BASELINES, "table": table, **changes})


SITES = "article.judged:not([hidden]) table.sites"


def sites(tab):
    return tab.texts(f"{SITES} tbody th")


def test_one_model_at_a_time(visit):
    tab = visit(judged_page())
    assert tab.texts("#judged option") == ["fedavg, seed 0", "scaffold, seed 0"]
    assert tab.texts("article.judged:not([hidden]) h3") == ["fedavg, seed 0"]
    tab.choose("#judged", "1")
    assert tab.texts("article.judged:not([hidden]) h3") == ["scaffold, seed 0"]


def test_one_model_needs_no_choice(visit):
    tab = visit(judged_page(judged=judged_page().judged[:1]))
    assert not tab.shown("#judged-controls") and tab.shown("article.judged table.sites")


def test_sites_sort_by_any_metric_and_undefined_ones_come_last(visit):
    tab = visit(judged_page())
    assert sites(tab) == ["Bonn", "Aachen", "Dachau"]
    head = f"{SITES} th:nth-child({{}}) button"
    tab.click(head.format(2))  # examples, largest first
    assert sites(tab) == ["Aachen", "Dachau", "Bonn"]
    for expected in (["Aachen", "Bonn", "Dachau"], ["Bonn", "Aachen", "Dachau"]):
        tab.click(head.format(4))  # AUC
        assert sites(tab) == expected
    tab.run(f"document.querySelector('{head.format(1)}').focus()")
    tab.press("Enter")
    assert sites(tab) == ["Aachen", "Bonn", "Dachau"]
    # the results have an order of their own
    assert tab.texts("#results tbody td:first-child")[:3] == ["fedavg", "scaffold", "extra"]


def test_numbers_of_a_chart_open_by_keyboard(visit):
    tab = visit(judged_page())
    place = "article.judged:not([hidden]) figure details"
    assert not tab.shown(f"{place} table")
    tab.run(f"document.querySelector('{place} summary').focus()")
    tab.press("Enter")
    assert tab.shown(f"{place} table") and tab.text(f"{place} td") == "0.0 %"
    assert tab.run("document.activeElement.tagName") == "SUMMARY"


def test_the_keyboard_reaches_everything(visit):
    tab = visit(judged_page())
    tab.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    tab.run("document.querySelector('#results th:last-child button').focus()")
    reached = set()
    for _ in range(60):
        tab.press("Tab")
        reached.add(tab.run(
            "((e) => e.id || e.className || e.tagName)(document.activeElement)"
        ))  # fmt: skip
        if "order" in reached:
            break
    assert {"judged", "scroll", "SUMMARY", "BUTTON", "PRE"} <= reached and "order" in reached


def test_everything_has_a_name_for_a_screen_reader(visit):
    tab = visit(judged_page())
    tree = tab.send("Accessibility.getFullAXTree")["nodes"]
    kinds = ("image", "img", "region", "combobox", "button", "checkbox", "article", "figure")
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if node.get("role", {}).get("value") in kinds and not node.get("ignored")
    ]
    assert len(named) > 20
    assert [pair for pair in named if not pair[1] and pair[0] != "figure"] == []
    about = [n.get("description", {}).get("value", "") for n in tree]
    assert any("always 'well': 52.00 %" in text for text in about)


CONTRAST = """(() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  // Chromium's own mixing: layers of colour painted over each other
  const painted = (layers) => {
    context.clearRect(0, 0, 1, 1);
    for (const layer of layers) { context.fillStyle = layer; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const own = node.parentElement;
    if (!node.data.trim() || own.matches("title, desc, option") || !own.checkVisibility()) continue;
    const layers = [];
    for (let e = own; e; e = e.parentElement) layers.unshift(getComputedStyle(e).backgroundColor);
    const style = getComputedStyle(own), ink = own instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(painted([...layers, ink])), light(painted(layers))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.data.trim().slice(0, 40)]);
  }
  return found;
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_stands_out(visit, dark):
    tab = visit(judged_page(), dark=dark)
    tab.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    found = tab.run(CONTRAST)
    assert len(found) > 150
    assert [pair for pair in found if pair[0] < 4.5] == []


def test_baselines_are_lines_with_names_that_do_not_cover_each_other(visit):
    tab = visit(judged_page())
    assert tab.count(f"{PLOT} line.beside") == 3
    names = tab.texts(f"{PLOT} text.beside-name")
    assert sorted(names) == [
        "all data pooled 52.20 %", "always 'well' 52.00 %", "each site alone 52.10 %"]  # fmt: skip
    nodes = f"[...document.querySelectorAll('{PLOT} .beside-name')]"
    places = sorted(tab.run(f"{nodes}.map((t) => Number(t.getAttribute('y')))"))
    assert all(b - a >= 14.9 for a, b in itertools.pairwise(places))
    tab.choose("#metric", "test_loss")
    assert tab.texts(f"{PLOT} text.beside-name") == ["always 'well' 0.6900"]
    tab.choose("#metric", "drift")  # so far away that curves would be flat
    assert tab.count(f"{PLOT} line.beside") == 0
    tab.choose("#metric", "test_accuracy")
    tab.click("#beside")
    assert tab.count(f"{PLOT} line.beside") == 0


def test_without_baselines_none_are_offered(visit):
    assert not visit(page()).shown("#beside")


@pytest.mark.parametrize("width", [400, 1280])
def test_wide_tables_scroll_in_their_place(visit, width):
    told = evaluation()
    told["metrics"] = {f"metric_{i}" * 3: 0.5 for i in range(12)}
    told["sites"] = [{"site": "x" * 90, "examples": 3, **told["metrics"]}]
    names = [f"class {i} with a long name" for i in range(20)]
    told |= {"classes": names, "confusion": [[i * j for i in range(20)] for j in range(20)]}
    told["roc"] = [{"class": n, "x": [0, 1], "y": [0, 1]} for n in names[:10]]
    card = CARD + "| " + "w" * 300 + " |\n"
    tab = visit(judged_page(judged=(judged_from("y" * 120, told, card),)), width=width)
    tab.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    wide = "document.documentElement.clientWidth"
    right = f"e.getBoundingClientRect().right > {wide} + 0.5"
    all_of = "[...document.querySelectorAll('main *')]"
    beyond = f"{all_of}.filter((e) => !e.closest('.scroll, pre') && {right})"
    assert tab.run(f"{beyond}.map((e) => e.outerHTML.slice(0, 200))") == []
    assert tab.run("document.documentElement.scrollWidth") == tab.run(wide)


def test_hostile_names_are_shown_as_text(visit):
    told = evaluation()
    told["sites"][0]["site"] = HOSTILE
    made = judged_page(
        judged=(judged_from(HOSTILE, told, f"# {HOSTILE}"),),
        baselines=(BaselineLine(HOSTILE, {"test_accuracy": 0.5}),),
    )
    tab = visit(made)
    assert tab.count("img") == 0 and sites(tab)[0] == HOSTILE
    assert HOSTILE in tab.text(f"{PLOT} text.beside-name")


def test_without_scripts_every_model_is_shown(visit):
    tab = visit(judged_page(), scripts=False)
    tab.send("Emulation.setScriptExecutionDisabled", value=False)
    shown = "[...document.querySelectorAll('article.judged')].map((a) => a.checkVisibility())"
    assert tab.run(shown) == [True, True] and not tab.shown("#judged-controls")
