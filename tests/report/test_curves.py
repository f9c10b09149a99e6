"""Curves as files: the same bytes for the same curves, readable names, errors that help."""

import sys
from itertools import pairwise

import pytest

from report.pages import many_groups, two_groups
from undrift.errors import ConfigError, DataError, MissingExtra
from undrift.report.curves import COLOURS, DASHES, curves_figure, draw_curves, line_style, spread
from undrift.report.page_data import Group, RunCurves

matplotlib = pytest.importorskip("matplotlib")


def single(value, label="g"):
    return Group(label, (RunCurves(0, (1,), {"loss": (value,)}),))


def names_of(figure):
    axes = figure.axes[0]
    legend = axes.get_legend()
    return [t.get_text() for t in (legend.get_texts() if legend else axes.texts)]


def test_png_and_svg_are_written_whatever_the_suffix(tmp_path):
    made = draw_curves(tmp_path / "new" / "curves.pdf", two_groups(), "test_accuracy", title="t")
    assert [p.name for p in made] == ["curves.png", "curves.svg"]
    assert made[0].read_bytes().startswith(b"\x89PNG") and b"<svg" in made[1].read_bytes()


def test_the_same_curves_are_the_same_bytes(tmp_path):
    first, second = (
        [p.read_bytes() for p in draw_curves(tmp_path / n, two_groups(), "test_loss", target=0.5)]
        for n in "ab"
    )
    assert first == second and b"<dc:date>" not in first[1]


def test_settings_of_the_process_stay_as_they_were(tmp_path):
    before = dict(matplotlib.rcParams)
    draw_curves(tmp_path / "c", two_groups(), "test_loss")
    assert dict(matplotlib.rcParams) == before
    assert not getattr(sys.modules.get("matplotlib.pyplot"), "get_fignums", list)()


def test_few_groups_are_named_at_their_ends_and_many_in_a_legend():
    assert names_of(curves_figure(many_groups(8, 5), "test_loss")) != []
    assert curves_figure(many_groups(8, 5), "test_loss").axes[0].get_legend() is None
    assert len(names_of(curves_figure(many_groups(9, 5), "test_loss"))) == 9


def test_names_are_text_whatever_they_hold(tmp_path):
    odd = ["$\\frac{", "_hidden", "two\nlines", "x" * 80, ""]
    few = [single(0.1 * i, label) for i, label in enumerate(odd)]
    draw_curves(tmp_path / "few", few, "loss", title="$a_b")
    many = [*few, *(single(0.5, f"g{i}") for i in range(9))]
    draw_curves(tmp_path / "many", many, "loss")
    assert names_of(curves_figure(many, "loss"))[1:3] == ["_hidden", "two lines"]


def test_accuracies_are_drawn_in_percent_with_their_target():
    axes = curves_figure(two_groups(), "test_accuracy", target=0.5).axes[0]
    assert axes.get_ylabel() == "test accuracy (%)"
    assert "target 50" in [t.get_text() for t in axes.texts]
    assert axes.get_ylim()[1] > 50


def test_several_seeds_have_a_band_and_one_has_none():
    assert len(curves_figure(two_groups(), "test_accuracy").axes[0].collections) == 2
    assert len(curves_figure([single(0.5)], "loss").axes[0].collections) == 0


def test_a_group_without_the_metric_is_left_out():
    groups = [single(0.5), Group("other", (RunCurves(0, (1,), {"x": (1.0,)}),))]
    assert names_of(curves_figure(groups, "loss")) == ["g"]


def test_an_unknown_metric_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'test_loss'"):
        draw_curves(tmp_path / "c", two_groups(), "test_los")


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no run has a value"):
        draw_curves(tmp_path / "c", [single(float("nan"))], "loss")


def test_a_missing_matplotlib_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"undrift\[plots\]"):
        draw_curves(tmp_path / "c", two_groups(), "test_loss")


def test_thirty_two_lines_look_different():
    looks = {line_style(place) for place in range(len(COLOURS) * len(DASHES))}
    assert len(looks) == 32 and line_style(32) == line_style(0)


@pytest.mark.parametrize("heights", [[0.5] * 8, [0.0, 0.01, 1.0, 0.99], [-3.0, 9.0], [0.2, 0.8]])
def test_names_keep_their_order_and_a_gap(heights):
    placed = spread(dict(enumerate(heights)), 0.1)
    order = sorted(placed, key=placed.__getitem__)
    assert [heights[g] for g in order] == sorted(heights)
    stands = sorted(placed.values())
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(stands))
    assert stands[0] >= 0 and stands[-1] <= 1 + 1e-9
