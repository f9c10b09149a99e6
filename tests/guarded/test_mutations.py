"""Truncated, changed and stretched files of every reader: good, or refused by an error of ours."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import pickle
import random
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pytest
import torch

from undrift.errors import UndriftError
from undrift.experiment.folder import RunFolder, whole_history
from undrift.experiment.spec import Experiment
from undrift.experiment.tables import read_table
from undrift.federated.wire import Form, pack, unpack, words_of
from undrift.guarded.binary import parse_npy
from undrift.models.table import read_table as read_vectors
from undrift.papers.records import read_records
from undrift.rules.policy import decode_policy, shipped_policies
from undrift.sources.boxes import read_members
from undrift.sources.glove import read_glove
from undrift.sources.idx import parse_idx
from undrift.sources.leaf import read_users
from undrift.sources.matlab import read_matlab
from undrift.sources.pickled import read_pickle
from undrift.sources.pictures import _picture
from undrift.sources.sent140 import _tweets
from undrift.sources.shakespeare import _text
from undrift.state import checkpoint
from undrift.tabular.source import table

from .bounded import Ended, bounded, outcome

TRIES = 150
INTERESTING = [b"[" * 300, b"{" * 300, b'"', b",", b"\n", b"\0" * 8, b"\xff" * 8, b"9" * 400, b"-",
               b"1e999", b"nan", b"\xed\xa0\x80", b"\\ud800", b"null", b"''", b"a.a.a", b"{}",
               struct.pack("<I", 2**31), struct.pack(">I", 2**31)]  # fmt: skip


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Change a few places of a file."""
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at, end = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
        strange, some = draw.choice(INTERESTING), data[at : min(end, at + 200)]
        flipped = bytes(b ^ 1 << draw.randrange(8) for b in data[at : at + 1])
        data = draw.choice(
            (
                data[:at],
                data[:at] + strange + data[at:],
                data[:at] + strange[:8] + data[at + 8 :],
                data[:at] + draw.randbytes(1) + data[at + 1 :],
                data[:at] + flipped + data[at + 1 :],
                data[:at] + data[min(end, at + 20) :],
                data[:at] + some * draw.choice((1, 3, 50)) + data[at:],
            )
        )
    return data


# ------------------------------------------------------------------------------- sound examples
EXPERIMENT = b"""rounds = 3
label = "a"
[data]
use = "synthetic"
clients = 6
sizes = 20
features = 5
[model]
use = "mlp"
hidden = 0x1f
[algorithm]
use = "fedavg"
lr = 0.1
[work]
steps = 2
"""
LINES = b"".join(
    b'{"round": %d, "train_loss": 0.5, "clients": [0, 1], "skipped": []}\n' % k for k in range(1, 5)
)
CSV = b"clinic,age,smoker,outcome\n" + b"".join(
    b"%c,%d,yes,%s\n" % (b"AB"[k % 2], 20 + k, [b"ill", b'"well"'][k % 3 % 2]) for k in range(12)
)
LEAF = json.dumps({"users": ["a", "b"], "num_samples": [2, 1], "user_data": {
    "a": {"x": [[1.0, 2.0], [0.5, 1]], "y": [0, 1]}, "b": {"x": [[3, 4]], "y": [1]}}})  # fmt: skip
TWEETS = b'"0","1","Mon","NO_QUERY","ann","so sad"\n"4","2","Tue","NO_QUERY","bob","so ""glad"""\n'
RECORDS = json.dumps({"table": "t", "cells": [
    {"setting": "a", "method": "b", "kind": "full", "rounds": 3, "seeds": [1]}]})  # fmt: skip
TREE = {"w": torch.ones(3), "n": {"count": torch.tensor(2), "flag": torch.tensor([True])}}


def saved(array) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def zipped(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return out.getvalue()


def tarred(name: str, data: bytes, mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        entry = tarfile.TarInfo(name)
        entry.size, entry.pax_headers = len(data), {"comment": "x" * 30}
        archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def mat() -> bytes:
    def element(kind, data):
        return struct.pack("<II", kind, len(data)) + data + b"\0" * (-len(data) % 8)

    flags = element(6, struct.pack("<II", 9, 0)) + element(5, struct.pack("<ii", 2, 3))
    matrix = element(14, flags + element(1, b"images") + element(2, bytes(range(6))))
    packed = zlib.compress(matrix)
    head = b"MATLAB 5.0".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    return head + matrix + struct.pack("<II", 15, len(packed)) + packed


def png() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(out, "PNG")
    return out.getvalue()


def parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    columns = {"age": [20.0, 30.5, 41.0], "clinic": ["A", "B", "A"], "outcome": [0, 1, 0]}
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def payload() -> bytes:
    chunks = checkpoint._encode(TREE | {"n": torch.tensor(2)}, {
        "round": "2", "meta": '{"a": [1, {"$float": "nan"}]}', "config": "{}"})  # fmt: skip
    return b"".join(bytes(c) for c in chunks)[checkpoint._HEADER_SIZE :]


def resealed(data: bytes) -> bytes:
    """Make the digest of a changed payload right again, as whoever forges one would."""
    lead = struct.pack("<8sIQ", b"\x89UNDRIFT", 1, len(data))
    return lead + hashlib.sha256(lead + data).digest() + data


# ------------------------------------------------------------------------------------- readers
def at(name: str, read):
    """Let a reader of files read bytes."""

    def do(folder, data):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return do


def history(path):
    found = whole_history(RunFolder(path.parent))
    return found.metrics, [found.best(name) for name in found.metrics]


def summary(path):
    return RunFolder(path.parent).summary()


def people(path):
    arrays = np.float32, np.int64
    return list(read_users([path], lambda *both: tuple(map(np.array, both, arrays))))


def forged(path):
    path.write_bytes(resealed(path.read_bytes()))
    return checkpoint.read(path)


def tweets(path):
    return list(_tweets(path))


def policy() -> bytes:
    return next(iter(shipped_policies().values())).read_bytes()


def settings(path):
    return Experiment.from_table(read_table(path))


NPY = saved(np.arange(12, dtype=np.float32).reshape(3, 4))
IDX = struct.pack(">BBBBII", 0, 0, 8, 2, 3, 4) + bytes(12)
VECTORS = b"the 0.1 -0.2 3\nso 1 2 3\n"
BATCH = pickle.dumps({"data": [1, 2], "labels": (3, "x")}, 2)
NAME = "training.1600000.processed.noemoticon.csv"
ROUND = "round-00000002.undrift"
READERS = {
    "experiment.toml": (EXPERIMENT, at("experiment.toml", settings)),
    "toml of a run": (EXPERIMENT, at("experiment.toml", lambda p: RunFolder(p.parent).table())),
    "summary.json": (b'{"rounds": 4, "a": [1, 2.5, null]}', at("summary.json", summary)),
    "rounds.jsonl": (LINES, at("rounds.jsonl", history)),
    "records": (RECORDS.encode(), at("t.json", read_records)),
    "csv": (CSV, at("t.csv", lambda p: table(p, "outcome", "clinic"))),
    "tsv": (CSV.replace(b",", b"\t"), at("t.tsv", lambda p: table(p, "outcome"))),
    "parquet": (parquet, at("t.parquet", lambda p: table(p, "outcome", "clinic"))),
    "npy": (NPY, lambda _, data: parse_npy(data)),
    "word vectors": (NPY, at("v.npy", lambda p: read_vectors(str(p), 3, 4))),
    "idx": (IDX, lambda _, data: parse_idx(data, "train", 2)),
    "idx.gz": (gzip.compress(IDX), lambda _, data: parse_idx(data, "train", 2)),
    "zip": (zipped("a/b.bin", b"abc" * 50), at("a.zip", lambda p: read_members(p, ["b.bin"]))),
    "tar.gz": (tarred("a/b.bin", b"abc" * 50), at("a.tgz", lambda p: read_members(p, ["b.bin"]))),
    "tar": (tarred("a/b.bin", b"abc", "w"), at("a.tar", lambda p: read_members(p, ["b.bin"]))),
    "pickle": (BATCH, lambda _, data: read_pickle(data, "batch")),
    "matlab": (mat, lambda _, data: read_matlab(data, "x.mat")),
    "png": (png, lambda _, data: _picture(data, "x.png")),
    "leaf": (LEAF.encode(), at("l.json", people)),
    "glove": (VECTORS, at("g.txt", lambda p: read_glove(p, ["", "", "the"]))),
    "tweets": (TWEETS, at("t.csv", tweets)),
    "tweets.zip": (zipped(NAME, TWEETS), at("t.zip", tweets)),
    "text.xz": (lzma.compress(b"First Citizen:\nBefore we go\n"), at("t.txt.xz", _text)),
    "checkpoint": (lambda: resealed(payload()), at(ROUND, checkpoint.read)),
    "forged checkpoint": (payload, at(ROUND, forged)),
    "policy": (policy, lambda _, data: decode_policy(data, "p")),
    "message": (lambda: pack(TREE, {"round": 2}), lambda _, data: unpack(data, Form(TREE))),
    "words": (lambda: pack(TREE, {"round": 2}), lambda _, data: words_of(data)),
}
NEEDS = {"parquet": "pyarrow", "png": "PIL"}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_stands_changed_files(name, tmp_path):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    given, read = READERS[name]
    data = given() if callable(given) else given
    assert outcome(lambda: read(tmp_path, data)).how == "good", "the example itself"

    def all_of_them():
        for seed in range(TRIES):
            changed = mutated(data, random.Random(f"{name} {seed}"))
            ended = outcome(lambda changed=changed: read(tmp_path, changed))
            if ended.how == "raw":
                raise AssertionError(f"{name}, seed {seed}: {ended.said}; {changed[:200]!r}")
            _check_message(ended)

    ended = bounded(all_of_them, megabytes=1500 if name == "parquet" else 400)
    assert ended.how == "good", ended


def _check_message(ended: Ended) -> None:
    assert ended.how == "good" or (ended.said and len(ended.said) < 1500), ended.said
    assert "MemoryError" not in ended.said, ended.said


def test_the_mutations_are_found_out_by_a_reader_that_lets_through():
    """The tests above can fail."""
    ended = bounded(lambda: json.loads(b"["))
    assert ended.how == "raw" and "JSONDecodeError" in ended.said
    assert bounded(lambda: bytearray(2 * 10**9)).how == "raw"
    assert issubclass(UndriftError, Exception)
