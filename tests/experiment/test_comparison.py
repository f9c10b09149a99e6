from __future__ import annotations

import math

import pytest

from undrift.errors import ConfigError
from undrift.experiment.baselines import Baseline, Baselines
from undrift.experiment.comparison import comparison_of, mean_curve
from undrift.experiment.history import History
from undrift.experiment.statistics import paired_difference, spread, student_quantile


def history(*values: float, metric: str = "test_accuracy") -> History:
    return History(tuple({"round": i + 1, metric: v} for i, v in enumerate(values)))


def density(t: float, freedom: int) -> float:
    norm = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    return norm * (1 + t * t / freedom) ** (-(freedom + 1) / 2)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 9, 30])
def test_students_quantile_against_its_density(freedom: int) -> None:
    end, steps = student_quantile(0.975, freedom), 20_000
    grid = [end * (i + 0.5) / steps for i in range(steps)]
    inside = sum(density(t, freedom) for t in grid) * end / steps
    assert inside == pytest.approx(0.475, abs=1e-6)


def test_paired_differences_take_out_what_seeds_share() -> None:
    base = [0.5, 0.7, 0.9]  # seeds differ far more than the algorithms do
    found = paired_difference([b + 0.01 + 0.001 * i for i, b in enumerate(base)], base)
    assert found.clear and found.mean == pytest.approx(0.011)
    assert spread([1.0]).mean == 1.0 and math.isnan(spread([1.0]).std)
    assert math.isnan(spread([1.0, math.nan]).mean)


def three(label: str, lasts: list[float]) -> list[tuple[str, int, History]]:
    return [(label, seed, history(0.1, last)) for seed, last in enumerate(lasts)]


def test_the_verdict_says_who_differs_by_more_than_the_seeds() -> None:
    runs = three("fedavg", [0.80, 0.81, 0.79]) + three("good", [0.90, 0.912, 0.895])
    runs += three("bad", [0.70, 0.71, 0.69]) + three("noisy", [0.95, 0.60, 0.99])
    made = comparison_of("x", runs, target=0.85)
    better, worse, unclear = made.verdict()
    assert "Better than fedavg" in better and "good (+10.2 points" in better
    assert "Worse than fedavg" in worse and "bad (-10.0 points" in worse
    assert unclear.endswith("over 3 seeds: noisy.")
    cells = {line.label: made.cells(line) for line in made.lines()}
    assert cells["good"][1:5] == ["90.2 ± 0.9", "90.2 ± 0.9", "2", "2"]
    assert cells["fedavg"][3:] == ["> 2", "> 2", "", ""]
    assert cells["noisy"][3] == "2" and "*" in cells["bad"][6]
    assert "| good |" in made.markdown()


def test_a_small_loss_is_a_good_one() -> None:
    runs = [("a", s, history(1.0, 0.9 + s / 100, metric="test_loss")) for s in range(3)]
    runs += [("b", s, history(1.0, 0.5 + s / 101, metric="test_loss")) for s in range(3)]
    made = comparison_of("x", runs, target=0.6)
    assert made.verdict()[0].startswith("Better than a")
    assert made.lines()[1].reached is not None
    assert made.lines()[1].reached.each == (2, 2, 2)


def test_one_seed_is_no_evidence() -> None:
    runs = [("a", 0, history(0.5)), ("b", 0, history(0.9))]
    assert "One seed cannot tell" in comparison_of("x", runs).verdict()[0]
    assert comparison_of("x", runs[:1]).verdict() == []


def test_mean_curves_use_rounds_that_all_seeds_have() -> None:
    runs = [("a", 0, history(0.2, 0.4, 0.6)), ("a", 1, history(0.4, 0.6))]
    (variant,) = comparison_of("x", runs).variants
    assert mean_curve(variant, "test_accuracy")["test_accuracy"] == pytest.approx([0.3, 0.5])


def test_the_order_can_be_given() -> None:
    runs = three("a", [0.1, 0.2, 0.3]) + three("b", [0.1, 0.2, 0.3])
    assert [v.label for v in comparison_of("x", runs, order=["b", "zz"]).variants] == ["b", "a"]
    with pytest.raises(ConfigError, match="no run to compare"):
        comparison_of("x", [])


def test_equal_steps_of_one_example_prove_nothing() -> None:
    runs = [("a", s, history(0.5, (100 + s) / 128)) for s in range(3)]
    runs += [("b", s, history(0.5, (101 + s) / 128)) for s in range(3)]
    (unclear,) = comparison_of("x", runs).verdict()
    assert "No clear difference" in unclear


def test_what_diverged_is_named_and_not_compared() -> None:
    lost = History(({"round": 1, "test_loss": 8e35}, {"round": 2, "test_loss": None}))
    runs = [("small", s, history(2.0, 1.0 + s / 10, metric="test_loss")) for s in range(2)]
    runs += [("large", s, lost) for s in range(2)]
    made = comparison_of("x", runs)
    assert made.verdict() == ["Diverged, at least with one seed: large."]
    assert made.cells(made.lines()[1])[1] == "diverged (2 of 2)"


def test_a_spread_is_better_when_small() -> None:
    assert history(0.3, 0.1, 0.2, metric="client_accuracy_std").best("client_accuracy_std") == 0.1


def test_a_metric_that_is_not_defined_is_not_called_diverged() -> None:
    records = [{"round": 1, "test_auc": None, "test_loss": loss} for loss in (0.5, None)]
    sound, lost = (History((record,)) for record in records)
    runs = [("a", 0, sound), ("a", 1, sound), ("b", 0, lost), ("b", 1, sound)]
    made = comparison_of("x", runs, metric="test_auc")
    assert [made.cells(line)[1] for line in made.lines()] == [
        "undefined (2 of 2)",
        "diverged (1 of 2)",
    ]
    assert made.verdict() == [
        "Diverged, at least with one seed: b.",
        "Undefined, at least with one seed: a, b.",
    ]
    with pytest.raises(ConfigError, match="test_acu"):
        comparison_of("x", runs, metric="test_acu").text()


def test_comparisons_rank_by_any_metric() -> None:
    for metric, better in (("test_auc", "b"), ("test_rmse", "a"), ("client_auc_std", "a")):
        runs = [("a", s, history(0.5 + s / 1000, metric=metric)) for s in range(3)]
        runs += [("b", s, history(0.7 + s / 1001, metric=metric)) for s in range(3)]
        (verdict,) = comparison_of("x", runs, metric=metric).verdict()
        assert verdict.startswith("Better" if better == "b" else "Worse")
        assert "points" not in verdict


def beside(*always: float, metric: str = "test_accuracy") -> Baselines:
    values = tuple({metric: value} for value in always)
    return Baselines((Baseline("always", "always 'well'", tuple(range(len(always))), values),))


@pytest.mark.parametrize(
    ("lasts", "told"),
    [
        ([0.79, 0.80, 0.80], "No variant is better than always saying 'well'."),
        ([0.80, 0.80, 0.83], "No variant is better than always saying 'well' by more than"),
        ([0.90, 0.91, 0.92], None),
    ],
)
def test_a_variant_that_always_beats(lasts: list[float], told: str | None) -> None:
    made = comparison_of("x", three("a", lasts), baselines=beside(0.80, 0.80, 0.80))
    said = [line for line in made.verdict() if "always" in line]
    assert len(said) == (told is not None) and all(line.startswith(told or "") for line in said)


def test_less_loss_than_always_is_better() -> None:
    runs = [("a", s, history(0.9, loss, metric="test_loss")) for s, loss in enumerate((0.5, 0.51))]
    made = comparison_of("x", runs, baselines=beside(0.6, 0.6, metric="test_loss"))
    assert made.verdict() == []
    made = comparison_of("x", runs, baselines=beside(0.4, 0.4, metric="test_loss"))
    assert made.verdict() == ["No variant is better than always saying 'well'."]


def test_a_baseline_without_the_metric_has_no_line() -> None:
    made = comparison_of("x", three("a", [0.1, 0.2, 0.3]), baselines=beside(0.8, math.nan, 0.8))
    assert made.baseline_cells() == [] and made.verdict() == []
    made = comparison_of("x", three("a", [0.1, 0.2, 0.3]), baselines=beside(0.8, 0.7, 0.9))
    assert made.baseline_cells() == [["always 'well'", "80.0 ± 10.0", "", "", ""]]
