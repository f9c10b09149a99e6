"""The compact forms: arrays in a zip, mosaics of small pictures, rows of pixels; by pillow."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from undrift.errors import MissingExtra
from undrift.guarded.binary import parse_npy
from undrift.guarded.limits import check
from undrift.guarded.text import parse_json
from undrift.sources.examples import Bytes8, Pixels, Unreadable

ARRAYS = ("train_x.npy", "train_y.npy", "test_x.npy", "test_y.npy")
MOSAICS = tuple(f"train_{i}.webp" for i in range(5))
MOSAIC_FILES = (*MOSAICS, "test.webp", "train_y.npy", "test_y.npy")
ROWS = tuple(f"data_batch_{i}.png" for i in range(1, 6))
ROW_FILES = (*ROWS, "test_batch.png", "train_lables.json", "test_lables.json")  # spelled so
SIDE = 32  # pixels of a picture


def read_arrays(files: Mapping[str, bytes]) -> Pixels:
    """Read an npz of grey pictures."""
    train_x, train_y, test_x, test_y = (_array(files[n], n) for n in ARRAYS)
    if train_x.ndim != 3 or test_x.ndim != 3:
        raise Unreadable("train_x and test_x should have three axes")
    return Pixels(train_x[..., None], train_y, test_x[..., None], test_y)


def read_mosaics(files: Mapping[str, bytes]) -> Pixels:
    """Read square mosaics of tiles, row by row."""
    train = np.concatenate([_tiles(_picture(files[n], n), n) for n in MOSAICS])
    test = _tiles(_picture(files["test.webp"], "test.webp"), "test.webp")
    return Pixels(
        *(train, _array(files["train_y.npy"], "train_y.npy")),
        *(test, _array(files["test_y.npy"], "test_y.npy")),
    )


def read_rows(files: Mapping[str, bytes]) -> Pixels:
    """Read pictures that have one small picture in every row."""
    train = np.concatenate([_rows(_picture(files[n], n), n) for n in ROWS])
    test = _rows(_picture(files["test_batch.png"], "test_batch.png"), "test_batch.png")
    return Pixels(
        *(train, _numbers(files["train_lables.json"], "train_lables.json")),
        *(test, _numbers(files["test_lables.json"], "test_lables.json")),
    )


def need_pillow() -> Any:
    """Import pillow, or say how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra(
            "pillow is needed to read this form of the data: pip install 'undrift[images]'"
        ) from error
    return Image


def _picture(data: bytes, name: str) -> Bytes8:
    image = need_pillow()
    try:
        with image.open(io.BytesIO(data), formats=("WEBP", "PNG")) as opened:
            check("picture_pixels", "pixels that it claims", opened.width * opened.height)
            return np.asarray(opened.convert("RGB"))
    except Exception as error:  # pillow's decoders raise all kinds on broken files
        raise Unreadable(f"{name} is no complete picture ({error})") from error


def _tiles(mosaic: Bytes8, name: str) -> Bytes8:
    height, width, _ = mosaic.shape
    if height % SIDE or width % SIDE:
        raise Unreadable(f"{name} is {width}x{height}, no mosaic of {SIDE}x{SIDE} tiles")
    grid = mosaic.reshape(height // SIDE, SIDE, width // SIDE, SIDE, 3)
    return grid.transpose(0, 2, 1, 3, 4).reshape(-1, SIDE, SIDE, 3)


def _rows(picture: Bytes8, name: str) -> Bytes8:
    if picture.shape[1] != SIDE * SIDE:
        raise Unreadable(f"{name} is {picture.shape[1]} pixels wide, not {SIDE * SIDE}")
    return picture.reshape(-1, SIDE, SIDE, 3)


def _array(data: bytes, name: str) -> Bytes8:
    try:
        array = parse_npy(data)
    except Unreadable as error:
        raise Unreadable(f"{name} is no complete array ({error})") from error
    if array.dtype != np.uint8:
        raise Unreadable(f"{name} is no array of unsigned bytes")
    return array


def _numbers(data: bytes, name: str) -> Bytes8:
    try:
        numbers = parse_json(data)
    except Unreadable as error:
        raise Unreadable(f"{name} is no complete json ({error})") from error
    good = isinstance(numbers, list) and all(type(v) is int and 0 <= v < 256 for v in numbers)
    if not good:
        raise Unreadable(f"{name} is no list of class numbers")
    return np.array(numbers, np.uint8)
