"""Small files that ask for much: by a header, by compression, by nesting, by many columns."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pytest

from undrift.errors import CheckpointError, CorruptCheckpoint
from undrift.federated.letters import Up, read_words
from undrift.federated.wire import words_of
from undrift.guarded.binary import gunzip, parse_npy, unxz
from undrift.guarded.limits import VARIABLE
from undrift.models.table import read_table as read_vectors
from undrift.rules.policy import decode_policy
from undrift.sources.boxes import read_members
from undrift.sources.glove import read_glove
from undrift.sources.idx import parse_idx
from undrift.sources.matlab import read_matlab
from undrift.sources.pickled import read_pickle
from undrift.sources.pictures import read_rows
from undrift.state import checkpoint
from undrift.tabular.source import table

from .bounded import bounded

ZEROS = bytes(40 * 2**20)
SIZE = len(ZEROS)
NAME = "data_batch_1.bin"


@pytest.fixture(autouse=True)
def _smaller(monkeypatch):
    limits = "data_bytes=20000000 archive_bytes=60000000 text_bytes=20000000 archive_entries=10000"
    monkeypatch.setenv(VARIABLE, limits)


def npy(shape, descr="<f4", body=b""):
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}}}".encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


def zipped(method=zipfile.ZIP_DEFLATED, claims=None, name=NAME):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr(name, ZEROS)
    made = bytearray(out.getvalue())
    if claims is not None:  # in both headers
        for sign, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
            struct.pack_into("<I", made, made.index(sign) + at, claims)
    return bytes(made)


def tarred(size=SIZE, kind=tarfile.REGTYPE, name=NAME, count=1):
    entry = tarfile.TarInfo(name)
    entry.size, entry.type = size, kind
    return entry.tobuf(tarfile.GNU_FORMAT) * count


def index_of_nothing():
    """Make a zip whose index claims four gigabytes."""
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, 2**32 - 2, 0, 0)
    return b"PK\x03\x04" + bytes(100) + end


def doubling(levels=60):
    """Make a pickle whose dictionaries hold the one before at two places."""
    value = {}
    for _ in range(levels):
        value = {"a": {"x": value}, "b": {"x": value}}
    return pickle.dumps(value, 2)


def deep_key():
    """Make a pickle with a tuple of tuples of tuples ... as a key."""
    return b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s."


def in_folder(data, suffix):
    def read(folder):
        path = folder / f"archive{suffix}"
        path.write_bytes(data)
        read_members(path, [NAME])

    return read


def file_of(data, name, read):
    def do(folder):
        (folder / name).write_bytes(data)
        read(folder / name)

    return do


def sealed_checkpoint(table, body=b""):
    text = json.dumps(table).encode()
    payload = struct.pack("<Q", len(text)) + text + body
    lead = struct.pack("<8sIQ", b"\x89UNDRIFT", 1, len(payload))
    return lead + checkpoint._digest(lead, [payload]) + payload


SHARED = {"__metadata__": {"round": "2", "meta": "{}", "config": "{}"}} | {
    f"w{k}": {"dtype": "F32", "shape": [250_000], "data_offsets": [0, 1_000_000]}
    for k in range(1000)
}
DEEP = {"__metadata__": {"round": "2", "meta": "[" * 900 + "]" * 900, "config": "{}"}}


def as_text(read, name, data):
    """Read a pixel file of a data set from memory."""
    return lambda folder: read(data, name)


def message(text):
    return struct.pack("<Q", len(text)) + text


def words_from(text):
    about = b'{"__metadata__": {"undrift": ' + json.dumps(text).encode() + b"}}"
    return lambda folder: read_words(Up, words_of(message(about), 10**7))


def png(width, height):
    def part(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", data) + part(b"IEND", b"")


def matlab(count=8):
    head = b"x".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    packed = zlib.compress(struct.pack("<II", 14, len(ZEROS)) + ZEROS)
    return head + (struct.pack("<II", 15, len(packed)) + packed) * count


WIDE = b",".join(b"c%d" % k for k in range(20_000))
BOMBS = {
    "npy: a shape of 2**40": lambda _: parse_npy(npy((2**40,))),
    "npy: a shape whose product overflows": lambda _: parse_npy(npy((2**62, 2**62, 2**62))),
    "npy: a negative shape": lambda _: parse_npy(npy((-1, -4), body=bytes(16))),
    "npy: a wide type": lambda _: parse_npy(npy((1,), "<U99999999")),
    "npy: a deep header": lambda _: parse_npy(npy((), "[" * 5000)),
    "npy: objects": lambda _: parse_npy(npy((1,), "|O", bytes(8))),
    "npy: word vectors": file_of(npy((2**40, 4)), "v.npy", lambda p: read_vectors(str(p), 9, 4)),
    "gzip": lambda _: gunzip(gzip.compress(ZEROS)),
    "gzip of gzip": lambda _: gunzip(gzip.compress(gzip.compress(ZEROS) * 500)),
    "xz": lambda _: unxz(lzma.compress(ZEROS), "text_bytes"),
    "idx: axes of 2**32": as_text(
        lambda d, n: parse_idx(d, n, 3), "train", b"\0\0\x08\x03" + b"\xff" * 12
    ),
    "idx in gzip": as_text(lambda d, n: parse_idx(d, n, 1), "train", gzip.compress(ZEROS)),
    "zip": in_folder(zipped(), ".zip"),
    "zip: claims little": in_folder(zipped(claims=10), ".zip"),
    "zip: claims much": in_folder(zipped(claims=2**32 - 2), ".zip"),
    "zip: bzip2": in_folder(zipped(zipfile.ZIP_BZIP2, claims=10), ".zip"),
    "zip: lzma": in_folder(zipped(zipfile.ZIP_LZMA, claims=10), ".zip"),
    "zip: an index of 4 GB": in_folder(index_of_nothing(), ".zip"),
    "tar in gzip": in_folder(gzip.compress(tarred() + ZEROS), ".tgz"),
    "tar in bzip2": in_folder(bz2.compress(tarred() + ZEROS), ".tbz"),
    "tar in xz": in_folder(lzma.compress(tarred() + ZEROS), ".txz"),
    "tar: claims 2**60": in_folder(tarred(2**60), ".tar"),
    "tar: goes back": in_folder(tarred(-512), ".tar"),
    "tar: another file is huge": in_folder(gzip.compress(tarred(name="x") + ZEROS), ".tgz"),
    "tar: notes of gigabytes": in_folder(gzip.compress(tarred(kind=tarfile.XHDTYPE) + ZEROS), ".t"),
    "tar: a name of gigabytes": in_folder(
        gzip.compress(tarred(kind=tarfile.GNUTYPE_LONGNAME) + ZEROS), ".tgz"
    ),
    "tar: endless entries": in_folder(gzip.compress(tarred(0, name="x", count=50_000)), ".tgz"),
    "matlab": as_text(read_matlab, "x.mat", matlab()),
    "pickle: doubling dictionaries": as_text(read_pickle, "batch", doubling()),
    "pickle: a deep key": as_text(read_pickle, "batch", deep_key()),
    "pickle: a number of a million digits": as_text(
        read_pickle, "b", b"L" + b"9" * 10**6 + b"L\n."
    ),
    "png: 2**31 pixels a side": lambda _: read_rows(
        {n: png(2**31 - 1, 2**31 - 1) for n in ("data_batch_1.png",)}
    ),
    "checkpoint: tensors that share bytes": file_of(
        sealed_checkpoint(SHARED, bytes(1_000_000)), "round-00000002.undrift", checkpoint.read
    ),
    "checkpoint: deep settings": file_of(
        sealed_checkpoint(DEEP), "round-00000002.undrift", checkpoint.read
    ),
    "policy: deep": as_text(decode_policy, "p", message(b"[" * 100_000)),
    "policy: a huge table": as_text(decode_policy, "p", struct.pack("<Q", 2**63) + b"{}"),
    "message: deep words": words_from("[" * 900 + "]" * 900),
    "message: a deep table": lambda _: words_of(message(b'{"a":' * 900 + b"1" + b"}" * 900), 10**7),
    "glove: a line without end": file_of(
        b"the " + b"1 " * 10_000_000, "glove.txt", lambda p: read_glove(p, ["", "", "the"])
    ),
    "csv: a header without end": file_of(b"a," * 20_000_000, "t.csv", lambda p: table(p, "a")),
    "csv: a million columns": file_of(
        b",".join(b"c%d" % k for k in range(1_000_000)), "t.csv", lambda p: table(p, "c1")
    ),
    "csv: a cell without end": file_of(
        b'a,b\n1,"' + b"x" * 10_000_000, "t.csv", lambda p: table(p, "a")
    ),
    "csv: a row without end": file_of(
        b"a,b\n" + b"1," * 10_000_000, "t.csv", lambda p: table(p, "a")
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name, tmp_path):
    ended = bounded(lambda: BOMBS[name](tmp_path))
    assert ended.how == "refused", ended
    assert "MemoryError" not in ended.said, ended


def test_tensors_that_share_bytes_are_a_corrupt_checkpoint(tmp_path):
    path = tmp_path / "round-00000002.undrift"
    path.write_bytes(sealed_checkpoint(SHARED, bytes(1_000_000)))
    with pytest.raises(CorruptCheckpoint, match="starts at byte 0 instead of 1000000"):
        checkpoint.read(path)
    with pytest.raises(CheckpointError, match="cannot be kept"):
        folder = checkpoint.CheckpointFolder(tmp_path / "new")
        folder.save(1, {}, {"seed": 10**400}, {})


# ------------------------------------------------------------------------------- honest and large
def wide_table(path, columns, rows, end="\n"):
    names = [*(f"c{k}" for k in range(columns)), "kind"]
    line = ",".join("1" for _ in range(columns))
    body = end.join(f"{line},{'ab'[k % 2]}" for k in range(rows))
    path.write_text(",".join(names) + end + body + end)
    return path


def test_a_table_of_20000_columns_is_read_in_little_memory(tmp_path):
    """Its header is longer than a cell may be, and 4096 of its rows would take gigabytes."""
    path = wide_table(tmp_path / "wide.csv", 20_000, 60)
    ended = bounded(lambda: table(path, "kind"), megabytes=900)
    assert ended.how == "good", ended
    assert table(path, "kind").train_x.shape[1] == 20_000


@pytest.mark.parametrize("change", ["one cell more", "an open quote", "a long cell", "not UTF-8"])
def test_what_is_wrong_with_a_wide_table_is_told_with_its_line(change, tmp_path):
    path = wide_table(tmp_path / "wide.csv", 20_000, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = {
        "one cell more": b"1," + lines[2],
        "an open quote": b'"' + lines[2],
        "a long cell": b"x" * 200_000 + lines[2],
        "not UTF-8": b"\xff" + lines[2],
    }[change]
    path.write_bytes(b"".join(lines))
    ended = bounded(lambda: table(path, "kind"))
    assert ended.how == "refused", ended
    assert "wide.csv, line 3" in ended.said


def test_numbers_of_a_table_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "table_values=50")
    ended = bounded(lambda: table(wide_table(tmp_path / "t.csv", 10, 10), "kind"))
    assert ended.how == "refused"
    assert "t.csv" in ended.said and "features=[...]" in ended.said


def test_what_is_honest_is_read():
    array = np.arange(12, dtype=">u2").reshape(3, 4)
    for given in (array, np.asfortranarray(array), np.zeros((0, 3)), np.array(2.5)):
        out = io.BytesIO()
        np.save(out, given)
        read = parse_npy(out.getvalue())
        assert read.dtype == given.dtype and np.array_equal(read, given)
    assert gunzip(gzip.compress(b"one") + gzip.compress(b"two")) == b"onetwo"
    assert unxz(lzma.compress(b"text"), "text_bytes") == b"text"
    shared = {"x": 1}
    assert read_pickle(pickle.dumps({"a": shared, "b": shared}, 2), "b") == {
        "a": shared,
        "b": shared,
    }
