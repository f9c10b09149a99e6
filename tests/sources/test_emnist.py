"""EMNIST from the makers' idx and MATLAB files."""

import io
import struct

import numpy as np
import pytest
import torch

from undrift import sources
from undrift.errors import ConfigError, DataError
from undrift.sources.emnist import EMNIST, SPLITS
from undrift.sources.matlab import read_matlab

from . import people, small

LETTERS = people.emnist_pixels("letters")
IDX = people.emnist_idx("letters", LETTERS)
MAT = people.emnist_mat("letters", LETTERS)

FORMS = {
    "idx": lambda d: small.write(d / "emnist", IDX),
    "idx of torchvision": lambda d: small.write(d / "EMNIST/raw", IDX),
    "gzip.zip": lambda d: small.zip_of(
        d / "emnist/gzip.zip", {f"gzip/{n}": f for n, f in IDX.items()}
    ),
    "mat": lambda d: small.write(d / "emnist/matlab", {"emnist-letters.mat": MAT}),
    "matlab.zip": lambda d: small.zip_of(
        d / "emnist/matlab.zip", {"matlab/emnist-letters.mat": MAT}
    ),
}


def load(folder, **settings):
    return sources.load("emnist", directory=folder, verify=False, **settings)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_upright_letters_numbered_from_zero(form, tmp_path):
    FORMS[form](tmp_path)
    made = load(tmp_path, normalise="unit")
    upright = torch.from_numpy(LETTERS.train_x[..., 0]).float() / 255
    assert torch.equal(made.train_x[:, 0], upright)
    assert torch.equal(made.train_y, torch.from_numpy(LETTERS.train_y).long())
    assert made.test_x.shape == (26, 1, 28, 28) and made.test_y.tolist() == list(range(26))
    assert made.classes == 26 and made.info.class_names[25] == "z"


def test_the_first_ten_letters_normalised_by_themselves_are_feddyns(tmp_path):
    FORMS["idx"](tmp_path)
    made = load(tmp_path, letters=10)
    assert made.classes == 10 and made.train_y.tolist() == sorted([*range(10)] * 3)
    assert made.test_x.shape == (10, 1, 28, 28)
    kept = LETTERS.train_x[:30] / 255
    assert made.info.mean[0] == pytest.approx(kept.mean()) and made.info.normalise == "train"
    assert made.info.std[0] == pytest.approx(kept.std())
    assert made.train_x.mean().abs() < 1e-4
    assert torch.equal(made.train_x, load(tmp_path, letters=10, normalise="feddyn").train_x)
    half = load(tmp_path, letters=10, normalise="half", pixels=14)
    assert half.train_x.shape == (30, 1, 14, 14) and half.info.mean == (0.5,)


@pytest.mark.parametrize(("split", "classes"), [("digits", 10), ("balanced", 47), ("byclass", 62)])
def test_other_splits(split, classes, tmp_path):
    pixels = people.emnist_pixels(split, per_class=1)
    small.write(tmp_path / "emnist", people.emnist_idx(split, pixels))
    made = load(tmp_path, split=split)
    assert made.classes == classes and made.train_y.tolist() == list(range(classes))
    small.write(tmp_path / "m/emnist", {f"emnist-{split}.mat": people.emnist_mat(split, pixels)})
    assert torch.equal(load(tmp_path / "m", split=split).train_x, made.train_x)


def test_the_numbers_of_classes_and_pictures_are_the_makers():
    sizes = {split: (len(names), *counts) for split, (names, counts) in SPLITS.items()}
    assert sizes["letters"] == (26, 26 * 4800, 26 * 800)
    assert sizes["digits"] == (10, 10 * 24_000, 10 * 4_000)
    assert sizes["balanced"] == (47, 47 * 2400, 47 * 400)
    assert sizes["byclass"] == (62, 814_255 - 116_323, 116_323)


def test_a_part_of_the_pictures_is_refused_unless_asked_for(tmp_path):
    FORMS["idx"](tmp_path)
    with pytest.raises(DataError, match=r"78, 26\) pictures .* \(124800, 20800\).*data get emnist"):
        sources.load("emnist", directory=tmp_path)


def test_missing_files_say_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"`undrift data get emnist`.*emnist-digits-train-images"):
        load(tmp_path, split="digits")


def test_labels_outside_the_split_are_refused(tmp_path):
    turned = {name: data for name, data in IDX.items() if "images" in name}
    zeros = people.emnist_idx("balanced", LETTERS)  # labels from 0
    turned |= {n.replace("balanced", "letters"): f for n, f in zeros.items() if "labels" in n}
    small.write(tmp_path / "emnist", turned)
    with pytest.raises(DataError, match=r"labels lie in 0 ... 25, those of letters in 1 ... 26"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "leters"}, "no split named 'leters'. Did you mean 'letters'"),
        ({"split": "digits", "letters": 10}, "letters = 10 needs split = 'letters', got 'digits'"),
        ({"letters": 27}, "letters must be at most 26, got 27"),
        ({"letters": 1}, "letters must be at least 2"),
        ({"normalise": "trian"}, "no normalisation named 'trian'. Did you mean 'train'"),
    ],
)
def test_mistakes_are_named(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **settings)


def test_it_is_listed_and_obtained_whichever_split_is_there(tmp_path, monkeypatch):
    def listed():
        return next(a for a in sources.available(tmp_path) if a.name == "emnist")

    assert listed().state == "missing"
    files = people.emnist_idx("digits", people.emnist_pixels("digits", 1))
    small.write(tmp_path / "emnist", dict([*files.items()][:2]))
    assert listed().state == "incomplete"
    small.write(tmp_path / "emnist", files)
    assert listed().state == "found" and listed().bytes == sum(map(len, files.values()))
    with pytest.raises(DataError, match=r"it has .* pictures"):  # found and verified, not fetched
        sources.get("emnist", directory=tmp_path)
    assert EMNIST["letters"].ways[0].files[0][0] == "gzip.zip"


# ---- MAT-files -----------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compress", [True, False])
def test_mat_files_of_either_byte_order(order, compress):
    numbers = np.arange(6, dtype=np.uint16).reshape(2, 3)
    tree = {"a": {"deep": {"n": numbers}, "f": np.array([[0.5, -1.0]])}, "b": numbers.T.copy()}
    read = read_matlab(people.mat_file(tree, order, compress), "x.mat")
    assert np.array_equal(read["a"]["deep"]["n"], numbers) and np.array_equal(read["b"], numbers.T)
    assert read["a"]["f"].tolist() == [[0.5, -1.0]]


def test_mat_files_that_scipy_writes():
    scipy = pytest.importorskip("scipy.io")
    images = small.noise(4, 784)
    side = {"images": images, "labels": np.array([[1], [2], [3], [26]], np.uint8)}
    tree = {"dataset": {"train": side, "test": side, "mapping": np.eye(3)}, "text": "left out"}
    for compress in (True, False):
        out = io.BytesIO()
        scipy.savemat(out, tree, do_compression=compress)
        read = read_matlab(out.getvalue(), "x.mat")
        assert np.array_equal(read["dataset"]["train"]["images"], images)
        assert read["dataset"]["test"]["labels"].ravel().tolist() == [1, 2, 3, 26]
        assert np.array_equal(read["dataset"]["mapping"], np.eye(3)) and "text" not in read


PLAIN = people.emnist_mat("letters", people.emnist_pixels("letters", 1), compress=False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no MAT-file of level 5"),
        (b"MATLAB 7.3 MAT-file".ljust(124) + struct.pack("<H", 0x0200) + b"IM", "another level"),
        (MAT[:-40], "no complete MAT-file"),
        (PLAIN[:5000], "no complete MAT-file"),
        (MAT[:200] + b"!" + MAT[201:], "no complete MAT-file"),
        (people.mat_file({"other": np.zeros((1, 1))}), "no structure `dataset`"),
        (people.mat_file({"dataset": {"train": {}, "test": {}}}), "`images` is no array"),
    ],
)
def test_broken_mat_files_are_named(data, message, tmp_path):
    small.write(tmp_path / "emnist", {"emnist-letters.mat": data})
    with pytest.raises(DataError, match=rf"emnist.*{message}"):
        load(tmp_path)


def test_no_cut_of_a_mat_file_is_a_crash(tmp_path):
    for end in range(0, len(PLAIN), 997):
        small.write(tmp_path / "emnist", {"emnist-letters.mat": PLAIN[:end]})
        with pytest.raises(DataError):
            load(tmp_path)
