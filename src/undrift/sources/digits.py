"""Hand-written digits of 8x8 pixels, inside the package: 1,797 of them, ten classes.

Optical Recognition of Handwritten Digits (Alpaydin and Kaynak 1998), UCI Machine Learning
Repository, CC BY 4.0; the copy that scikit-learn ships.
"""

from __future__ import annotations

import io
import math
from importlib.resources import files

import torch

from undrift.core.random import fold, permutation
from undrift.errors import DataError
from undrift.guarded.binary import BROKEN, open_zip, parse_npy
from undrift.models.settings import number, whole
from undrift.sources.examples import Examples, Info

FILE = "digits.npz"


def digits(test_share: float = 0.2, split_seed: int = 0) -> Examples:
    """Give the digits, [n, 1, 8, 8] in [0, 1]; the split is random, for there is no official one.

    >>> digits()
    Examples(digits: 1437 to train, 360 to test, x [1, 8, 8], 10 classes)
    """
    number("test_share", test_share, 0, 1)
    x, y = _read()
    order = permutation(fold(whole("split_seed", split_seed, 0), "digits")[None], len(x), len(x))[0]
    cut = len(x) - max(1, min(len(x) - 1, math.ceil(test_share * len(x))))
    train, test = order[:cut], order[cut:]
    info = Info("digits", "embedded", None, "unit", (0.0,), (1.0,), tuple("0123456789"))
    return Examples(x[train], y[train], x[test], y[test], 10, info)


def _read() -> tuple[torch.Tensor, torch.Tensor]:
    try:
        data = files("undrift.sources").joinpath(FILE).read_bytes()
        with open_zip(io.BytesIO(data)) as arrays:
            x, y = (parse_npy(arrays.read(f"{name}.npy")) for name in "xy")
    except (OSError, *BROKEN) as error:
        raise DataError(
            f"the embedded {FILE} cannot be read ({error}): install undrift again"
        ) from error
    # pixels count the inked cells of a 4x4 block
    return torch.from_numpy(x).float().div(16)[:, None], torch.from_numpy(y).long()
