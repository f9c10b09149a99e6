"""Checksums of files and of decoded pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from undrift.sources.examples import Bytes8, Pixels, Unreadable


def pixel_digest(pixels: Pixels) -> str:
    """Give the sha256 of the pixels, [n, H, W, channels], train then test."""
    digest = hashlib.sha256()
    for x in (pixels.train_x, pixels.test_x):
        digest.update(np.ascontiguousarray(x).data)
    return digest.hexdigest()


def content_digest(x: Bytes8, y: Bytes8) -> str:
    """Give a sha256 of the labelled pictures that does not depend on their order.

    So every form of a data set has the same one, also where a form sorts its pictures.
    """
    rows = np.concatenate([x.reshape(len(x), -1), y[:, None]], axis=1)
    each = sorted(hashlib.sha256(row.data).digest() for row in rows)
    return hashlib.sha256(b"".join(each)).hexdigest()


def watched(chunks: Iterable[bytes], expected: str) -> Iterator[bytes]:
    """Pass chunks on and refuse the last one unless all have the digest "md5:..." expected."""
    kind, _, value = expected.partition(":")
    digest = hashlib.new(kind, usedforsecurity=False)
    for chunk in chunks:
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != value:
        raise Unreadable(f"its {kind} is {digest.hexdigest()}, it should be {value}")
