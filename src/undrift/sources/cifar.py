"""CIFAR as its makers give it: the binary version, and the Python version without pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from undrift.sources.examples import Bytes8, Pixels, Unreadable
from undrift.sources.pickled import PickledArray, read_pickle

IMAGE = 3 * 32 * 32
# The last file of each is for testing.
CIFAR10_PICKLES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR10_BINARIES = tuple(f"{name}.bin" for name in CIFAR10_PICKLES)
CIFAR100_PICKLES = ("train", "test")
CIFAR100_BINARIES = ("train.bin", "test.bin")

Part = tuple[Bytes8, Bytes8]


def read_binaries(files: Mapping[str, bytes], names: Sequence[str], labels: int) -> Pixels:
    """Read the binary version; a record starts with `labels` bytes, the last is the class."""
    return _join([_binary_part(files[name], name, labels) for name in names])


def _binary_part(data: bytes, name: str, labels: int) -> Part:
    size = labels + IMAGE
    if not data or len(data) % size:
        raise Unreadable(f"{name} has {len(data)} bytes, no multiple of a record's {size}")
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    return _pictures(rows[:, labels:]), rows[:, labels - 1]


def read_pickles(files: Mapping[str, bytes], names: Sequence[str], key: str) -> Pixels:
    """Read the Python version; `key` names the classes: "labels" or "fine_labels"."""
    return _join([_pickled_part(files[name], name, key) for name in names])


def _pickled_part(data: bytes, name: str, key: str) -> Part:
    batch = read_pickle(data, name)
    if not isinstance(batch, dict) or not {"data", key} <= batch.keys():
        raise Unreadable(f"{name} holds no dictionary with 'data' and {key!r}")
    array, labels = batch["data"], batch[key]
    if not isinstance(array, PickledArray) or len(array.shape) != 2 or array.shape[1] != IMAGE:
        raise Unreadable(f"{name}: 'data' is no array of rows of {IMAGE} bytes")
    good = isinstance(labels, list) and all(type(v) is int and 0 <= v < 256 for v in labels)
    if not good or len(labels) != array.shape[0]:
        raise Unreadable(f"{name}: {key!r} is no list of {array.shape[0]} class numbers")
    rows = np.frombuffer(array.data, np.uint8).reshape(array.shape)
    return _pictures(rows), np.array(labels, np.uint8)


def _pictures(rows: Bytes8) -> Bytes8:
    # The files keep the colours apart, [n, 3, 32, 32].
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _join(parts: list[Part]) -> Pixels:
    *train, test = parts
    train_x, train_y = (np.concatenate(columns) for columns in zip(*train, strict=True))
    return Pixels(train_x, train_y, np.ascontiguousarray(test[0]), test[1])


read_cifar10_binaries = partial(read_binaries, names=CIFAR10_BINARIES, labels=1)
read_cifar100_binaries = partial(read_binaries, names=CIFAR100_BINARIES, labels=2)
read_cifar10_pickles = partial(read_pickles, names=CIFAR10_PICKLES, key="labels")
read_cifar100_pickles = partial(read_pickles, names=CIFAR100_PICKLES, key="fine_labels")
