"""The page as a person uses it, in a headless Chromium where one is installed."""

import re

import pytest

from report.pages import HOSTILE, many_groups, page, partition, two_groups
from report.test_page import hostile_page
from undrift.report.page import write_page
from undrift.report.page_data import Group, RunCurves, mean_curve

PLOT, LINE = "#plot svg.live", 'g.group[data-group="{}"] path.mean'
LEGEND = '#legend button[data-group="{}"]'


def lines_shown(tab):
    return tab.count("g.group path.mean")


def tip_rows(tab):
    """Label, value and spread of each row of the tooltip."""
    cells = tab.texts("#tip td")
    return [tuple(cells[i + 1 : i + 4]) for i in range(0, len(cells), 5)]


# ---- curves --------------------------------------------------------------------------------------


def test_a_click_on_a_name_hides_and_shows_its_line(visit):
    tab = visit(page())
    assert lines_shown(tab) == 2
    tab.click(LEGEND.format(1))
    assert tab.count(LINE.format(1)) == 0 and tab.count(LINE.format(0)) == 1
    assert tab.run(f"document.querySelector('{LEGEND.format(1)}').ariaPressed") == "false"
    tab.click(LEGEND.format(1))
    assert lines_shown(tab) == 2


def test_a_double_click_on_a_name_shows_it_alone(visit):
    tab = visit(page(groups=many_groups(5, 10), metrics=("test_loss",)))
    tab.click(LEGEND.format(3), times=2)
    assert lines_shown(tab) == tab.count(LINE.format(3)) == 1
    tab.click("#show-all")
    assert lines_shown(tab) == 5
    tab.click("#hide-all")
    assert lines_shown(tab) == 0


def test_pointing_at_a_name_lights_its_line(visit):
    tab = visit(page())
    tab.hover(LEGEND.format(0))
    assert tab.count("svg.dimmed g.group.lit") == 1
    assert tab.count('svg.dimmed g.group.lit[data-group="0"]') == 1
    tab.hover("h1")
    assert tab.count("svg.dimmed") == 0


def test_the_tooltip_shows_the_numbers_of_the_nearest_round(visit):
    tab = visit(page())
    tab.hover(PLOT, 0.5, 0.5)
    number = int(tab.text("#tip strong").removeprefix("round "))
    assert 8 <= number <= 12
    expected = []
    for group in reversed(two_groups()):  # scaffold lies above
        curve = mean_curve(group, "test_accuracy")
        mean, std = 100 * curve.mean[number - 1], 100 * curve.std[number - 1]
        expected.append((group.label, f"{mean:.2f} %", f"± {std:.2f}"))
    assert tip_rows(tab) == expected
    assert tab.count("line.crosshair") == 1 and tab.count("circle.dot") == 2
    tab.hover("h1")
    assert not tab.shown("#tip") and tab.count("line.crosshair") == 0


def test_arrow_keys_read_off_values(visit):
    tab = visit(page())
    tab.run("document.querySelector('#plot').focus()")
    for key, number in (("Home", 1), ("ArrowRight", 2), ("End", 20), ("ArrowLeft", 19)):
        tab.press(key)
        assert tab.text("#tip strong") == f"round {number}"


def test_another_metric_changes_axis_and_lines(visit):
    tab = visit(page())
    assert tab.text("#y-name") == "test accuracy (%)" and tab.count("line.target") == 1
    before = tab.run(f"document.querySelector('{LINE.format(0)}').getAttribute('d')")
    tab.choose("#metric", "test_loss")
    assert tab.text("#y-name") == "test loss" and tab.count("line.target") == 0
    assert tab.run(f"document.querySelector('{LINE.format(0)}').getAttribute('d')") != before


def test_bytes_and_seconds_are_summed_up(visit):
    tab = visit(page())
    tab.choose("#axis", "bytes")
    tab.run("document.querySelector('#plot').focus()")
    tab.press("End")
    # scaffold: 20 rounds of 250 + 50 bytes; fedavg: 20 of 100 + 50
    assert tab.text("#tip strong") == "6 kB" and "(kB)" in tab.text("#x-name")
    assert tab.texts("#tip td.more") == ["round 20", "last, round 20"]
    tab.choose("#axis", "seconds")
    tab.press("End")
    assert tab.text("#tip strong") == "10 s"


def test_axes_without_data_are_not_offered(visit):
    tab = visit(page(groups=many_groups(2, 5), metrics=("test_loss",)))
    assert tab.texts("#axis option") == ["round"]


def test_log_scale_single_runs_and_smoothing(visit):
    tab = visit(page())
    tab.choose("#metric", "test_loss")
    d = f"document.querySelector('{LINE.format(0)}').getAttribute('d')"
    linear = tab.run(d)
    tab.click("#log")
    assert "log scale" in tab.text("#y-name") and tab.run(d) != linear
    assert tab.count("path.run") == 0
    tab.click("#runs")
    assert tab.count("path.run") == 6
    tab.click("#log")
    tab.choose("#smooth", "0.9")
    assert tab.text("#smooth-value") == "0.90" and tab.run(d) != linear
    tab.choose("#smooth", "0")
    tab.click("#runs")
    assert tab.run(d) == linear


def test_a_metric_without_anything_above_zero_has_no_log_scale(visit):
    tab = visit(page())
    tab.choose("#metric", "test_loss")
    tab.click("#log")
    tab.choose("#metric", "drift")  # always -0.25
    assert tab.run("document.querySelector('#log').disabled") is True
    assert lines_shown(tab) == 2 and "log" not in tab.text("#y-name")


def rounds_on_axis(tab):
    return [int(t) for t in tab.texts('svg.live text[text-anchor="middle"]') if t.isdigit()]


def test_dragging_zooms_and_a_double_click_resets(visit):
    tab = visit(page())
    whole = rounds_on_axis(tab)
    tab.drag(PLOT, (0.5, 0.5), (0.8, 0.5))
    zoomed = rounds_on_axis(tab)
    assert min(zoomed) >= 8 and max(zoomed) <= 17 and tab.shown("#reset")
    tab.click(PLOT, times=2)
    assert rounds_on_axis(tab) == whole and not tab.shown("#reset")


def test_a_rectangle_zooms_both_ways_and_the_button_resets(visit):
    tab = visit(page())
    ticks = tab.texts('svg.live text[text-anchor="end"]')
    tab.drag(PLOT, (0.3, 0.2), (0.6, 0.6))
    assert tab.texts('svg.live text[text-anchor="end"]') != ticks
    tab.click("#reset")
    assert tab.texts('svg.live text[text-anchor="end"]') == ticks


def test_a_line_ends_where_the_first_seed_has_no_value(visit):
    runs = [RunCurves(s, (1, 2), {"loss": (1.0, None if s else 3.0)}) for s in (0, 1)]
    tab = visit(page(groups=(Group("g", tuple(runs)),), metrics=("loss",), targets={}))
    tab.run("document.querySelector('#plot').focus()")
    tab.press("End")
    assert tip_rows(tab) == [("g", "1", "± 0")]
    assert tab.text("#tip strong") == "round 1"


@pytest.mark.parametrize("value", [0.0, -3.0, 1e300, 5e-324])
def test_one_value_is_a_dot(visit, value):
    groups = (Group("g", (RunCurves(0, (1,), {"loss": (value,)}),)),)
    tab = visit(page(groups=groups, metrics=("loss",), targets={}))
    box = tab.box("circle.alone")
    frame = tab.box(PLOT)
    assert frame["left"] < box["left"] and box["right"] < frame["right"]
    assert frame["top"] < box["top"] and box["bottom"] < frame["bottom"]


# ---- table ---------------------------------------------------------------------------------------


def first_column(tab):
    return tab.texts("#results tbody td:first-child")


def test_a_click_sorts_numbers_as_numbers_and_a_second_one_turns_round(visit):
    tab = visit(page())
    head = "#results th:nth-child(2)"
    tab.click(f"{head} button")
    assert first_column(tab) == ["extra", "fedavg", "scaffold"]
    assert tab.run(f"document.querySelector('{head}').getAttribute('aria-sort')") == "descending"
    tab.click(f"{head} button")
    assert first_column(tab) == ["scaffold", "fedavg", "extra"]


def test_rows_without_a_value_come_last_both_ways(visit):
    tab = visit(page())
    for expected in (["scaffold", "extra", "fedavg"], ["extra", "scaffold", "fedavg"]):
        tab.click("#results th:nth-child(3) button")
        assert first_column(tab) == expected


def test_the_table_sorts_by_keyboard(visit):
    tab = visit(page())
    tab.run("document.querySelector('#results th:nth-child(1) button').focus()")
    tab.press("Enter")
    assert first_column(tab) == ["extra", "fedavg", "scaffold"]


# ---- partition -----------------------------------------------------------------------------------


def test_few_clients_are_bubbles_with_their_numbers(visit):
    tab = visit(page())
    held = [c for row in partition().counts for c in row if c > 0]
    assert tab.count("#partition circle.bubble") == len(held)
    tab.hover("#partition circle.bubble")
    assert re.fullmatch(r"client \d+kind \d: \d+ of \d+ examples", tab.text("#partition .tip"))


def test_a_thousand_clients_are_a_heat_map(visit):
    tab = visit(page(partition=partition(1000, 10)))
    assert tab.count("#partition image") == 1 and tab.count("#partition circle") == 0
    tab.choose("#order", "class")
    tab.hover("#partition image")
    assert "examples" in tab.text("#partition .tip")


# ---- everything ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [400, 700, 1280])
def test_nothing_sticks_out_sideways(visit, width):
    made = page(
        groups=many_groups(16, 100),
        metrics=("test_loss",),
        title="x" * 120,
        command="undrift run " + "y" * 300,
        experiment="z" * 400,
        facts=(("k" * 60, "v" * 200),),
        partition=partition(70, 70),
    )
    tab = visit(made, width=width)
    tab.hover(PLOT)
    assert tab.run("document.documentElement.scrollWidth") == tab.run(
        "document.documentElement.clientWidth"
    )


@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_follows_the_system(visit, dark):
    tab = visit(page(), dark=dark)
    ground = tab.run("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == ("rgb(20, 24, 28)" if dark else "rgb(255, 255, 255)")


def test_hostile_texts_are_shown_as_text(visit):
    tab = visit(hostile_page())
    assert tab.count("img") == 0 and tab.text("h1") == HOSTILE
    assert tab.text("#legend span") == HOSTILE and tab.text("#command") == HOSTILE
    tab.hover(PLOT)
    assert tip_rows(tab)[0][0] == HOSTILE


def test_a_page_without_values_starts_too(visit):
    tab = visit(page(groups=(), metrics=()))
    assert "No round with a value" in tab.text(".nothing")
    tab.click("#results th:nth-child(2) button")
    assert first_column(tab)[0] == "extra"


def test_without_scripts_picture_and_table_are_shown(visit, browser):
    tab = visit(page(), scripts=False)
    tab.send("Emulation.setScriptExecutionDisabled", value=False)
    assert tab.shown("#plot svg path.mean") and tab.shown("#results")
    assert not tab.shown("#controls") and tab.shown("noscript p")


def test_copy_says_that_it_copied(visit):
    tab = visit(page())
    tab.click('button[data-copy="command"]')
    assert tab.text('button[data-copy="command"]') == "Copied"


def test_sixteen_groups_of_a_thousand_rounds_are_drawn(visit):
    tab = visit(page(groups=many_groups(16, 1000), metrics=("test_loss",)))
    tab.click("#runs")
    assert lines_shown(tab) == 16 and tab.count("path.run") == 48
    tab.hover(PLOT)
    assert len(tip_rows(tab)) == 16


def test_the_policy_refuses_what_does_not_belong_to_the_page(browser, tmp_path):
    path = write_page(tmp_path / "report.html", page())
    foreign = '<img src="https://example.org/x.png"><script>window.foreign = 1</script></main>'
    path.write_text(path.read_text().replace("</main>", foreign))
    tab = browser.open(path)
    assert len(tab.complaints()) == 2 and tab.run("window.foreign") is None
    tab.close()
