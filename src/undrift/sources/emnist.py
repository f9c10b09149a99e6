"""EMNIST: digits and letters by hand (Cohen et al. 2017), in the makers' idx and MATLAB files.

Both kinds of file keep a picture column after column; here they stand upright.  Letters are
numbered from 1 in the files and from 0 here, upper and lower case as one class.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from undrift.errors import ConfigError, unknown_name
from undrift.models.settings import whole
from undrift.sources import forms
from undrift.sources.examples import Bytes8, Examples, Pixels, Unreadable
from undrift.sources.forms import Form, PictureSet
from undrift.sources.idx import parse_idx
from undrift.sources.matlab import read_matlab
from undrift.sources.normalise import check_norm
from undrift.sources.picture_sets import as_examples
from undrift.sources.place import data_directory
from undrift.sources.ways import Official

SIDE = 28
CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
# lower-case letters that do not look like their upper case
MERGED = string.digits + string.ascii_uppercase + "abdefghnqrt"
# classes, pictures to train and to test on; the makers' figures for the files that they offer
SPLITS: Mapping[str, tuple[str, tuple[int, int]]] = {
    "letters": (string.ascii_lowercase, (124_800, 20_800)),
    "digits": (string.digits, (240_000, 40_000)),
    "balanced": (MERGED, (112_800, 18_800)),
    "byclass": (CHARACTERS, (697_932, 116_323)),
    "bymerge": (MERGED, (697_932, 116_323)),
    "mnist": (string.digits, (60_000, 10_000)),
}
OFFICIAL = Official(
    "https://biometrics.nist.gov/cs_links/EMNIST",
    (("gzip.zip", "md5:58c8d27c78d21e728a6bc7b3cc06412e"),),
)


def emnist(
    split: str = "letters",
    letters: int | None = None,
    normalise: str = "default",
    pixels: int | None = None,
    verify: bool = True,
    directory: Path | str | None = None,
) -> Examples:
    """Load one split of EMNIST; `letters=10` keeps the first ten letters, as FedDyn does.

    Splits: letters, digits, balanced, byclass, bymerge, mnist.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, list(SPLITS), "sources.emnist")
    data = EMNIST[split]
    check_norm(data, normalise)
    if pixels is not None:
        whole("pixels", pixels)
    if letters is not None:
        data = _fewer(data, split, letters)
    raw, found = forms.read(EMNIST[split], Path(directory or data_directory()), verify)
    raw = _first(raw, len(data.class_names))
    name = "train" if normalise in ("default", "feddyn") else normalise
    return as_examples(data, raw, found, name, pixels)


def _fewer(data: PictureSet, split: str, letters: int) -> PictureSet:
    if split != "letters":
        raise ConfigError(f"letters = {letters} needs split = 'letters', got {split!r}")
    if whole("letters", letters, 2) > len(data.class_names):
        raise ConfigError(f"letters must be at most {len(data.class_names)}, got {letters}")
    return data._replace(class_names=data.class_names[:letters])


def _first(raw: Pixels, classes: int) -> Pixels:
    train, test = raw.train_y < classes, raw.test_y < classes
    if train.all() and test.all():
        return raw
    return Pixels(raw.train_x[train], raw.train_y[train], raw.test_x[test], raw.test_y[test])


# --------------------------------------------------------------------------------------- files
def idx_names(split: str) -> tuple[str, ...]:
    """Name the four files of a split."""
    parts = [f"emnist-{split}-{part}" for part in ("train", "test")]
    return tuple(
        f"{p}-{kind}" for p in parts for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )


def read_idx(files: Mapping[str, bytes], split: str) -> Pixels:
    """Read the idx files of a split, gzipped or not."""
    names = idx_names(split)
    arrays = [parse_idx(files[n], n, 3 if "images" in n else 1) for n in names]
    train_x, train_y, test_x, test_y = arrays
    return Pixels(
        *(_upright(train_x), _labels(train_y, split)), *(_upright(test_x), _labels(test_y, split))
    )


def read_mat(files: Mapping[str, bytes], split: str) -> Pixels:
    """Read the MATLAB file of a split: dataset.train.images [n, 784] and so on."""
    name = f"emnist-{split}.mat"
    dataset = read_matlab(files[name], name).get("dataset")
    sides = [dataset.get(part) if isinstance(dataset, dict) else None for part in ("train", "test")]
    if not all(isinstance(side, dict) for side in sides):
        raise Unreadable(f"{name} holds no structure `dataset` with `train` and `test`")
    arrays = []
    for side in sides:
        images, labels = (side.get(key) for key in ("images", "labels"))  # type: ignore[union-attr]
        if not _is_bytes(images) or images.ndim != 2 or images.shape[1] != SIDE * SIDE:
            raise Unreadable(f"{name}: `images` is no array of rows of {SIDE * SIDE} bytes")
        if not isinstance(labels, np.ndarray):
            raise Unreadable(f"{name} holds no `labels`")
        rows = np.ascontiguousarray(images).reshape(-1, SIDE, SIDE)
        arrays += [_upright(rows), _labels(labels.ravel(), split)]
    return Pixels(*arrays)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8


def _upright(x: Bytes8) -> Bytes8:
    return np.ascontiguousarray(x.transpose(0, 2, 1))[..., None]


def _labels(y: Any, split: str) -> Bytes8:
    first, count = (1 if split == "letters" else 0), len(SPLITS[split][0])
    if len(y) and not (y.min() >= first and y.max() < first + count):
        raise Unreadable(
            f"its labels lie in {y.min()} ... {y.max()}, those of {split} in {first} ... "
            f"{first + count - 1}"
        )
    made: Bytes8 = (y - first).astype(np.uint8)
    return made


def _forms(split: str) -> tuple[Form, ...]:
    names, mat = idx_names(split), (f"emnist-{split}.mat",)
    idx, matlab = partial(read_idx, split=split), partial(read_mat, split=split)
    return (
        Form("idx files", ("emnist", "emnist/gzip", "gzip", "EMNIST/raw"), names, idx),
        Form("idx files", ("emnist/gzip.zip", "gzip.zip"), names, idx),
        Form("MATLAB file", ("emnist", "emnist/matlab", "matlab"), mat, matlab),
        Form("MATLAB file", ("emnist/matlab.zip", "matlab.zip"), mat, matlab),
    )


def _split(split: str) -> PictureSet:
    names, counts = SPLITS[split]
    return PictureSet(
        name="emnist",
        shape=(SIDE, SIDE, 1),
        counts=counts,
        content=None,  # the makers publish none
        class_names=tuple(names),
        # FedDyn's are the mean and deviation of the training pictures
        norms={"half": ((0.5,), (0.5,)), "feddyn": ((), ())},
        forms=_forms(split),
        ways=(OFFICIAL,),
    )


EMNIST: Mapping[str, PictureSet] = {split: _split(split) for split in SPLITS}
