"""Small data sets in the real formats, written by the tests."""

import gzip
import io
import json
import struct
import tarfile
import zipfile

import numpy as np
from PIL import Image

from undrift.core.random import bits, fold
from undrift.sources.catalogue import PICTURES
from undrift.sources.digests import content_digest
from undrift.sources.examples import Pixels
from undrift.sources.idx import IDX_FILES


def noise(*shape, seed=0, high=256):
    import torch

    draws = bits(fold(seed, "pictures"), torch.arange(int(np.prod(shape)))) % high
    return draws.numpy().astype(np.uint8).reshape(shape)


def pictures(side=28, channels=1, train=20, test=4, classes=10):
    """Random pictures with random labels."""
    return Pixels(
        noise(train, side, side, channels, seed=1),
        noise(train, seed=2, high=classes),
        noise(test, side, side, channels, seed=3),
        noise(test, seed=4, high=classes),
    )


def small(name, pixels, **changes):
    """A real data set's description, with the size and checksums of the given pictures."""
    data = PICTURES[name]
    return data._replace(
        counts=(len(pixels.train_x), len(pixels.test_x)),
        content=(
            content_digest(pixels.train_x, pixels.train_y),
            content_digest(pixels.test_x, pixels.test_y),
        ),
        forms=tuple(form._replace(pixels="") for form in data.forms),
        **changes,
    )


def idx(array):
    array = np.ascontiguousarray(array)
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.tobytes()


def idx_files(pixels):
    arrays = (pixels.train_x[..., 0], pixels.train_y, pixels.test_x[..., 0], pixels.test_y)
    return {name: idx(a) for name, a in zip(IDX_FILES, arrays, strict=True)}


def zipped(files):
    return {f"{name}.gz": gzip.compress(data, 1) for name, data in files.items()}


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def tar(path, files, prefix="package/"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(prefix + name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def zip_of(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def planes(x):
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def parts(pixels, names):
    """Name equal slices of the training pictures, and the test pictures last."""
    count = len(names) - 1
    xs, ys = np.split(pixels.train_x, count), np.split(pixels.train_y, count)
    return zip(names, [*xs, pixels.test_x], [*ys, pixels.test_y], strict=True)


def binaries(pixels, names, coarse=False):
    def record(x, y):
        labels = [np.zeros_like(y)[:, None]] * coarse + [y[:, None]]
        return np.concatenate([*labels, planes(x)], axis=1).tobytes()

    return {name: record(x, y) for name, x, y in parts(pixels, names)}


def pickles(pixels, names, key="labels"):
    return {name: python2_batch(planes(x), y, key) for name, x, y in parts(pixels, names)}


def text(word):
    return b"U" + bytes([len(word)]) + word.encode()


def python2_batch(rows, labels, key="labels", call="numpy.core.multiarray\n_reconstruct"):
    """The instructions that Python 2 wrote into a CIFAR batch (protocol 2)."""
    data = rows.tobytes()
    numbers = b"".join(b"K" + bytes([v]) for v in labels)
    shape = b"M" + struct.pack("<H", len(rows)) + b"M" + struct.pack("<H", rows.shape[1]) + b"\x86"
    array = b"c" + call.encode() + b"\nq\x02cnumpy\nndarray\nq\x03K\x00\x85" + text("b")
    array += b"\x87R(K\x01" + shape
    array += b"cnumpy\ndtype\nq\x04" + text("u1") + b"K\x00K\x01\x87Rq\x05(K\x03" + text("|")
    array += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<I", len(data))
    array += data + b"tb"
    entries = text("batch_label") + text("training batch 1 of 5")
    entries += text(key) + b"]q\x06(" + numbers + b"e" + text("data") + array
    entries += text("filenames") + b"]q\x07(" + text("a.png") + b"e"
    return b"\x80\x02}q\x01(" + entries + b"u."


def encoded(array, kind):
    out = io.BytesIO()
    Image.fromarray(array).save(out, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return out.getvalue()


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz_files(pixels):
    arrays = pixels._replace(train_x=pixels.train_x[..., 0], test_x=pixels.test_x[..., 0])
    return {f"{name}.npy": npy(a) for name, a in arrays._asdict().items()}


def rows_files(pixels):
    names = (*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png")
    files = {n: encoded(x.reshape(len(x), 1024, 3), "PNG") for n, x, _ in parts(pixels, names)}
    files["train_lables.json"] = json.dumps(pixels.train_y.tolist()).encode()
    files["test_lables.json"] = json.dumps(pixels.test_y.tolist()).encode()
    return files


def mosaic_files(pixels):
    """Mosaics of two tiles in a row."""
    names = (*(f"train_{i}.webp" for i in range(5)), "test.webp")

    def mosaic(x):
        return x.reshape(-1, 2, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 64, 3)

    files = {n: encoded(mosaic(x), "WEBP") for n, x, _ in parts(pixels, names)}
    return files | {"train_y.npy": npy(pixels.train_y), "test_y.npy": npy(pixels.test_y)}
