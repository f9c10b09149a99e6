"""Sources that need no files: digits and the synthetic ones."""

import pytest
import torch

from undrift import sources
from undrift.errors import ConfigError


def test_digits_are_embedded():
    made = sources.load("digits")
    assert made.train_x.shape == (1437, 1, 8, 8) and made.test_x.shape == (360, 1, 8, 8)
    assert made.train_x.min() == 0 and made.train_x.max() == 1 and made.classes == 10
    assert torch.bincount(torch.cat([made.train_y, made.test_y])).tolist() == [
        *(178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
    ]


def test_the_split_of_digits_depends_on_its_seed_alone():
    one, two = sources.load("digits"), sources.load("digits")
    other = sources.load("digits", split_seed=1)
    assert torch.equal(one.test_x, two.test_x) and not torch.equal(one.test_x, other.test_x)
    assert one.train_x.sum() + one.test_x.sum() == other.train_x.sum() + other.test_x.sum()


def test_digits_can_be_learned_by_a_line():
    made = sources.load("digits")
    x, t = made.train_x.flatten(1), made.test_x.flatten(1)
    w = torch.linalg.lstsq(x, torch.eye(10)[made.train_y], driver="gelsd").solution
    assert ((t @ w).argmax(1) == made.test_y).float().mean() > 0.9


def test_synthetic_has_natural_clients_with_their_own_test_examples():
    made = sources.load("synthetic", clients=4, sizes=[10, 20, 30, 5])
    assert torch.bincount(made.train_clients).tolist() == [9, 18, 27, 5]
    assert torch.bincount(made.test_clients, minlength=4).tolist() == [1, 2, 3, 0]
    assert made.train_x.shape == (59, 60) and made.train_y.max() < 10
    assert made.info.form == "generated"


def test_synthetic_sizes_are_log_normal_by_default():
    made = sources.load("synthetic", clients=200, features=2, test_share=0)
    sizes = torch.bincount(made.train_clients)
    assert len(sizes) == 200 and sizes.min() >= 50 and len(made.test_x) == 0
    assert 50 + 35 < sizes.median() < 50 + 80  # exp(4) is 55


def test_synthetic_is_a_function_of_its_seed():
    def make(seed):
        return sources.load("synthetic", clients=3, sizes=8, seed=seed)

    one, two, other = make(1), make(1), make(2)
    assert torch.equal(one.train_x, two.train_x) and torch.equal(one.train_y, two.train_y)
    assert not torch.equal(one.train_x, other.train_x)


def test_a_clients_data_do_not_depend_on_how_many_there_are():
    few = sources.load("synthetic", clients=2, sizes=8)
    many = sources.load("synthetic", clients=5, sizes=8)
    assert torch.equal(few.train_x, many.train_x[: len(few.train_x)])


def spread_of_means(**settings):
    made = sources.load("synthetic", clients=40, sizes=100, test_share=0, **settings)
    means = torch.stack([made.train_x[made.train_clients == k].mean() for k in range(40)])
    return means.std().item()


def test_beta_moves_the_inputs_of_clients_apart():
    assert spread_of_means(beta=0) < 0.3
    assert spread_of_means(beta=2) == pytest.approx(2, rel=0.4)
    assert spread_of_means(iid=True) < 0.05


def test_the_variance_of_inputs_falls_as_in_the_paper():
    made = sources.load("synthetic", clients=1, sizes=20_000, features=10, test_share=0)
    variance = made.train_x.double().var(0)
    expected = torch.arange(1, 11, dtype=torch.float64) ** -1.2
    assert torch.allclose(variance, expected, rtol=0.1)


def test_iid_clients_share_one_model():
    made = sources.load(
        "synthetic-regression", clients=5, sizes=50, features=3, noise=0, iid=True, test_share=0
    )
    x = torch.cat([made.train_x, torch.ones(250, 1)], 1).double()
    residual = made.train_y.double() - x @ torch.linalg.lstsq(x, made.train_y.double()).solution
    assert residual.abs().max() < 1e-5


def test_regression_gives_numbers_that_a_clients_own_line_explains():
    made = sources.load("synthetic-regression", clients=3, sizes=200, features=4, noise=0.1)
    assert made.classes == 0 and made.train_y.shape == (540, 1)
    own = made.train_clients == 1
    x = torch.cat([made.train_x[own], torch.ones(int(own.sum()), 1)], 1).double()
    y = made.train_y[own].double()
    residual = y - x @ torch.linalg.lstsq(x, y).solution
    assert residual.std().item() == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("synthetik", {}, "sources: no source named 'synthetik'. Did you mean 'synthetic'"),
        ("synthetic", {"alhpa": 1}, "sources.synthetic: .*'alhpa'. Did you mean 'alpha'"),
        ("synthetic", {"alpha": -1}, "alpha must be a number in"),
        ("synthetic", {"beta": float("nan")}, "beta must be a number in"),
        ("synthetic", {"clients": 0}, "clients must be at least 1"),
        ("synthetic", {"clients": 2.5}, "clients must be a whole number"),
        ("synthetic", {"clients": 3, "sizes": [1, 2]}, "sizes lists 2 clients but clients = 3"),
        ("synthetic", {"sizes": 0}, "sizes must be at least 1"),
        ("synthetic", {"classes": 1}, "classes must be at least 2"),
        ("synthetic", {"test_share": 1}, "test_share must be a number in"),
        ("synthetic", {"seed": "a"}, "seed must be a whole number"),
        ("synthetic-regression", {"noise": "much"}, "noise must be a number in"),
        ("digits", {"test_share": 1.5}, "test_share must be a number in"),
        ("digits", {"normalise": "unit"}, "no setting named 'normalise'"),
        ("mnist", {"normalise": "feddyne"}, "sources.mnist: no normalisation named 'feddyne'"),
        ("mnist", {"pixels": 0}, "pixels must be at least 1"),
        ("mnist", {"data": 1}, "no setting named 'data'"),
    ],
)
def test_mistakes_are_named(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        sources.load(name, **settings)
