"""Small files in the formats of EMNIST, LEAF, Sent140, Shakespeare and GloVe, for the tests."""

import csv
import gzip
import json
import struct
import zlib

import numpy as np

from undrift.sources.emnist import SPLITS, idx_names
from undrift.sources.examples import Pixels

from . import small


def emnist_pixels(split, per_class=3, tested=1):
    """Upright pictures, the same number of every class, labels from 0."""
    classes = len(SPLITS[split][0])
    sides = []
    for seed, count in ((1, per_class), (2, tested)):
        labels = np.repeat(np.arange(classes, dtype=np.uint8), count)
        sides += [small.noise(len(labels), 28, 28, 1, seed=seed), labels]
    return Pixels(*sides)


def emnist_idx(split, pixels):
    """The makers' files: pictures turned, letters from 1, gzipped."""
    first = int(split == "letters")
    arrays = [
        *(pixels.train_x[..., 0].transpose(0, 2, 1), pixels.train_y + first),
        *(pixels.test_x[..., 0].transpose(0, 2, 1), pixels.test_y + first),
    ]
    files = zip(idx_names(split), arrays, strict=True)
    return {f"{n}.gz": gzip.compress(small.idx(a.astype(np.uint8)), 1) for n, a in files}


# ---- MAT-files -----------------------------------------------------------------------------------
KINDS = {"u1": (2, 9), "i1": (1, 8), "f8": (9, 6), "u2": (4, 11), "i4": (5, 12), "u4": (6, 13)}


def element(kind, data, order="<"):
    if 0 < len(data) <= 4:
        return struct.pack(f"{order}I", len(data) << 16 | kind) + data.ljust(4, b"\0")
    return struct.pack(f"{order}II", kind, len(data)) + data + b"\0" * (-len(data) % 8)


def matrix(kind, shape, name, parts, order="<"):
    flags = struct.pack(f"{order}II", kind, 0)
    head = element(6, flags, order) + element(
        5, struct.pack(f"{order}{len(shape)}i", *shape), order
    )
    return element(14, head + element(1, name.encode(), order) + b"".join(parts), order)


def mat_value(value, name="", order="<"):
    if isinstance(value, dict):
        names = b"".join(n.encode().ljust(32, b"\0") for n in value)
        parts = [element(5, struct.pack(f"{order}i", 32), order), element(1, names, order)]
        parts += [mat_value(v, "", order) for v in value.values()]
        return matrix(2, (1, 1), name, parts, order)
    kind, shape = KINDS[value.dtype.str[1:]], value.shape
    data = value.astype(value.dtype.newbyteorder(order)).tobytes(order="F")
    return matrix(kind[1], shape, name, [element(kind[0], data, order)], order)


def mat_file(variables, order="<", compress=True):
    head = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack(f"{order}H", 0x0100)
    body = b""
    for name, value in variables.items():
        made = mat_value(value, name, order)
        if compress:
            packed = zlib.compress(made, 1)
            made = struct.pack(f"{order}II", 15, len(packed)) + packed
        body += made
    return head + (b"IM" if order == "<" else b"MI") + body


def emnist_mat(split, pixels, **options):
    first = int(split == "letters")

    def side(x, y):
        rows = x[..., 0].transpose(0, 2, 1).reshape(len(x), 784)
        labels = (y + first).astype(np.float64)[:, None]
        return {"images": rows, "labels": labels, "writers": np.zeros((len(x), 1))}

    mapping = np.arange(len(SPLITS[split][0]), dtype=np.uint8)[:, None]
    train, test = side(*pixels[:2]), side(*pixels[2:])
    return mat_file({"dataset": {"train": train, "test": test, "mapping": mapping}}, **options)


# ---- LEAF ----------------------------------------------------------------------------------------
def leaf(path, people):
    """Write {name: (x, y)} as one of LEAF's files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {
        "users": list(people),
        "num_samples": [len(x) for x, _ in people.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in people.items()},
    }
    path.write_text(json.dumps(made))
    return path


def writer(count, seed, values=256):
    pixels = small.noise(count, 784, seed=seed, high=values) / 255
    return pixels.round(6).tolist(), [(seed + k) % 62 for k in range(count)]


def writers(counts):
    return {f"f{k:04d}_{k % 7}": writer(n, k) for k, n in enumerate(counts)}


GOOD, BAD = "love great happy fun thanks", "sad hate sick tired awful"


def tweets(count, seed):
    """Texts and polarities (0 or 1), told apart by their words."""
    made = []
    for k in range(count):
        label = (seed + k) % 2
        words = (GOOD if label else BAD).split()
        made.append((f"@friend {words[k % 5]} {words[(k + 1) % 5]} day {k}!", label))
    return made


def leaf_tweets(counts):
    people = {}
    for seed, (name, count) in enumerate(counts.items()):
        rows = tweets(count, seed)
        x = [
            [str(k), "Mon", "NO_QUERY", name, text, "training"] for k, (text, _) in enumerate(rows)
        ]
        people[name] = (x, [label for _, label in rows])
    return people


def tweet_csv(path, counts):
    """The official layout: every cell quoted, latin-1, no header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="latin-1", newline="") as file:
        rows = csv.writer(file, quoting=csv.QUOTE_ALL)
        for seed, (name, count) in enumerate(counts.items()):
            for k, (text, label) in enumerate(tweets(count, seed)):
                rows.writerow([4 * label, k, "Mon Apr 06", "NO_QUERY", name, text])
    return path


def glove(path, vectors):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{word} {' '.join(map(str, numbers))}\n" for word, numbers in vectors.items()]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def windows(text, length=80):
    spots = range(len(text) - length)
    return [text[i : i + length] for i in spots], [text[i + length] for i in spots]
