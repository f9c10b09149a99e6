"""The page: complete, harmless whatever it is given, and asking nothing of the network."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from report.pages import HOSTILE, many_groups, page, partition
from undrift.errors import CheckpointError
from undrift.report.curves import COLOURS
from undrift.report.page import page_html, write_page
from undrift.report.page_data import Group, Partition, RunCurves, Table

NAMESPACE = "http://www.w3.org/2000/svg"
VOID = {"meta", "link", "br", "img", "input"}


class Reader(HTMLParser):
    """Collects tags and attributes, and checks that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1))


def hostile_page():
    runs = (RunCurves(0, (1, 2), {HOSTILE: (0.1, 0.2)}),)
    sized = Table((HOSTILE,), (), HOSTILE)
    names = (HOSTILE, "b")
    return page(
        title=HOSTILE,
        command=HOSTILE,
        facts=((HOSTILE, HOSTILE),),
        groups=(Group(HOSTILE, runs),),
        table=sized,
        verdict=(HOSTILE,),
        partition=Partition([[1, 2]], names, HOSTILE),
        experiment=HOSTILE,
        metrics=(HOSTILE,),
        targets={HOSTILE: 0.15},
    )


# ---- structure -----------------------------------------------------------------------------------


def test_sections_stand_in_reading_order():
    text = page_html(page())
    order = ["<h1>", 'class="verdict"', 'id="plot"', 'id="results"', 'id="partition"']
    order += ['class="facts"', 'id="experiment"', 'id="command"']
    places = [text.index(mark) for mark in order]
    assert places == sorted(places)


def test_every_element_is_closed():
    assert Reader(page_html(page())).open == []


def test_ids_are_unique():
    ids = [v for _, name, v in Reader(page_html(page())).attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_what_is_empty_leaves_no_section():
    empty = page(
        verdict=(), table=Table((), ()), partition=None, facts=(), experiment="", command=""
    )
    text = page_html(empty)
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", text)
    assert headings == ["Learning curves"] and data_of(text)["partition"] is None


def test_the_table_and_a_picture_are_there_without_javascript():
    text = page_html(page()).partition("<script")[0]
    assert text.count('<path class="mean"') == 2 and text.count('<path class="band"') == 2
    assert "test accuracy (%) over rounds" in text and "target 50" in text
    assert "<td>never</td>" in text or '<td class="number">never</td>' in text
    assert "<noscript>" in text


def test_columns_of_numbers_are_marked_and_their_missing_values_stay_none():
    text = page_html(page())
    heads = re.findall(r"<th scope=\"col\"( class=\"number\")?>", text)
    assert heads == ["", ' class="number"', ' class="number"']
    assert data_of(text)["sort"][0] == ["fedavg", 61.0, None]


def test_a_summary_in_columns_keeps_its_columns():
    wide = Partition([[1]], ("a",), "clients  mean\nsizes    3.0\n")
    assert '<pre class="note summary">clients  mean\nsizes    3.0</pre>' in page_html(
        page(partition=wide)
    )


# ---- data ----------------------------------------------------------------------------------------


def test_only_offered_metrics_and_axis_amounts_are_embedded():
    data = data_of(page_html(page(metrics=("test_loss", "nobody_has_this", "test_loss"))))
    assert data["metrics"] == ["test_loss"]
    expected = {"test_loss", "bytes_up", "bytes_down", "seconds"}
    assert set(data["groups"][0]["runs"][0]["values"]) == expected


def test_the_embedded_numbers_are_those_of_the_runs():
    made = page()
    data = data_of(page_html(made))
    for group, shown in zip(made.groups, data["groups"], strict=True):
        for run, copy in zip(group.runs, shown["runs"], strict=True):
            values = run.values["test_accuracy"]
            assert copy["values"]["test_accuracy"] == pytest.approx(values, rel=1e-6)


def test_nan_and_infinity_become_null():
    values = (float("nan"), float("inf"), 1.0, None)
    groups = (Group("g", (RunCurves(0, (1, 2, 3, 4), {"loss": values}),)),)
    text = page_html(page(groups=groups, metrics=("loss",), targets={"loss": float("nan")}))
    data = data_of(text)
    assert data["groups"][0]["runs"][0]["values"]["loss"] == [None, None, 1, None]
    assert data["targets"] == {} and "NaN" not in text


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (Group("none", ()),),
        (Group("no rounds", (RunCurves(0, (), {}),)),),
        (Group("nothing finite", (RunCurves(0, (1,), {"loss": (float("nan"),)}),)),),
    ],
    ids=["no groups", "no runs", "no rounds", "no values"],
)
def test_without_values_the_page_says_so(groups):
    text = page_html(page(groups=groups, metrics=("loss",)))
    assert "No round with a value" in text and data_of(text)["metrics"] == []


def test_one_round_of_one_seed_is_a_dot_without_a_band():
    groups = (Group("g", (RunCurves(0, (1,), {"loss": (0.5,)}),)),)
    text = page_html(page(groups=groups, metrics=("loss",), targets={}))
    body = text.partition("<script")[0]
    assert '<circle class="alone"' in body and '<path class="band"' not in body
    assert "One seed each" in body


@pytest.mark.parametrize("values", [(1e300, -1e300), (5e-324, 0.0), (1.0, 1.0), (3e38, 0.1)])
def test_extreme_values_still_make_a_page(values):
    runs = tuple(RunCurves(seed, (1,), {"x": (v,)}) for seed, v in enumerate(values))
    body = page_html(page(groups=(Group("g", runs),), metrics=("x",))).partition("<script")[0]
    assert "nan" not in body and ">inf<" not in body


# ---- escaping ------------------------------------------------------------------------------------


def test_hostile_texts_add_no_element_and_no_attribute():
    tame, wild = Reader(page_html(page())), Reader(page_html(hostile_page()))
    assert wild.open == [] and "img" not in wild.tags
    assert wild.tags.count("script") == tame.tags.count("script") == 2
    assert not [name for _, name, _ in wild.attributes if name.startswith("on")]


def test_hostile_texts_come_back_whole_from_the_data():
    data = data_of(page_html(hostile_page()))
    assert data["groups"][0]["label"] == HOSTILE == data["metrics"][0]
    assert data["partition"]["classes"][0] == HOSTILE


def test_a_lone_surrogate_is_written_as_a_question_mark(tmp_path):
    assert b"a?b" in write_page(tmp_path / "r.html", page(title="a\udc80b")).read_bytes()


# ---- network -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [page, hostile_page])
def test_nothing_outside_is_referred_to(make):
    text = page_html(make())
    assert "//" not in re.sub(r"^\s*//.*$|\s// .*$", "", text.replace(NAMESPACE, ""), flags=re.M)
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|WebSocket|import\(", text)
    links = [
        v for _, name, v in Reader(text).attributes if name in ("src", "href", "action", "srcset")
    ]
    assert links and all(link.startswith("data:") for link in links)


def test_the_policy_allows_just_this_style_and_this_script():
    text = page_html(page())
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text).group(1)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
    for part, pattern in (("style", "<style>(.*?)</style>"), ("script", "<script>(.*?)</script>")):
        content = re.search(pattern, text, re.S).group(1)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{part}-src"] == f"'sha256-{digest}'"


def test_no_inline_style_and_no_handler_is_used():
    names = {name for _, name, _ in Reader(page_html(page())).attributes}
    assert "style" not in names and not any(name.startswith("on") for name in names)


# ---- files ---------------------------------------------------------------------------------------


def test_the_same_page_is_the_same_bytes(tmp_path):
    first, second = (write_page(tmp_path / f"{n}.html", page()).read_bytes() for n in "ab")
    assert first == second and first.isascii() is False


def test_folders_are_made_and_nothing_else_is_left(tmp_path):
    path = write_page(tmp_path / "new" / "report.html", page())
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_a_place_that_cannot_be_written_is_an_error_with_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        write_page(tmp_path / "file" / "report.html", page())


def test_large_pages_stay_small_enough():
    made = page(groups=many_groups(16, 1000), metrics=("test_loss",), partition=partition(1000, 10))
    assert len(page_html(made)) < 2_000_000


# ---- colours -------------------------------------------------------------------------------------


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def themes():
    text = page_html(page())
    blocks = re.findall(r":root \{(.*?--page.*?)\}", text, re.S)
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in blocks]


def test_text_stands_out_in_both_themes():
    assert len(themes()) == 2
    for theme in themes():
        for text in ("ink", "muted", "accent"):
            for ground in ("page", "soft", "hover"):
                assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)


def test_lines_stand_out_in_both_themes():
    light, dark = themes()
    for on_light, on_dark in COLOURS:
        assert contrast(on_light, light["page"]) >= 3
        assert contrast(on_dark, dark["page"]) >= 3
