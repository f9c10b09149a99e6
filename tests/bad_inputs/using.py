"""New rows, exported files and what they are asked of."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save

import undrift as fl
from undrift.errors import ConfigError, DataError
from undrift.using.export import export

from .case import (
    EXPERIMENT,
    TABLE,
    Case,
    Step,
    call,
    command,
    kept,
    left_no,
    made,
    python,
    ran,
    scope,
    then,
    wrote,
)

PREDICT, EXPORT = "Predictions for new rows", "Exported files"
FOLDER = "runs/clinics/fedavg/seed-0"
NEW = "age,smoker\n40,yes\n50,no\n"


# -------------------------------------------------------------------------------- sound models
@cache
def files() -> dict[str, bytes]:
    """Train on the table once; give the files of the run, and the exported one."""
    with tempfile.TemporaryDirectory() as place:
        table, run = Path(place) / "clinics.csv", Path(place) / "run"
        table.write_text(TABLE)
        data = {"use": "table", "path": str(table), "target": "outcome", "client": "clinic"}
        given = {"name": "clinics", "rounds": 1, "data": data, "model": "logistic"}
        given |= {"algorithm": {"use": "fedavg", "lr": 0.1}, "engine": {"device": "cpu"}}
        fl.run(fl.load_experiments(given)[0], run)
        export(run, Path(place) / "model.safetensors")
        held = {str(p.relative_to(place)): p for p in run.rglob("*") if p.is_file()}
        held["model.safetensors"] = Path(place) / "model.safetensors"
        found = {name: path.read_bytes() for name, path in held.items()}
    return {name.replace("run/", FOLDER + "/", 1): data for name, data in found.items()}


def model(folder: Path) -> None:
    """Have a run, an exported model and new rows."""
    for name, data in {**files(), "new.csv": NEW.encode()}.items():
        wrote(name, data)(folder)


def changed(name: str, change: Callable[[bytes], bytes]) -> Step:
    """Change a file of a sound model."""

    def do(folder: Path) -> None:
        model(folder)
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return do


def gone(*names: str) -> Step:
    """Lose files of a sound model."""

    def do(folder: Path) -> None:
        model(folder)
        for name in names:
            for path in (folder / FOLDER).glob(name):
                path.unlink()

    return do


# ----------------------------------------------------------------------------------- new rows
def rows(title: str, content: str | bytes, says: str, **rest: Any) -> Case:
    """Predict for a table with something wrong in it."""
    line, before = "undrift predict model.safetensors new.csv", wrote("new.csv", content)
    return command(PREDICT, title, line, says, before=then(model, before), **rest)


def predict(title: str, line: str, says: str, before: Step = model, **rest: Any) -> Case:
    """Ask for predictions in a wrong way."""
    return command(PREDICT, title, f"undrift predict {line}", says, before=before, **rest)


PREDICT_CASES = [
    rows(
        "columns that are missing, all of them",
        "clinic,ages\nA,40\n",
        r"2 problems:.*'age' is not there.*'smoker' is not there",
    ),
    rows(
        "text in a column of numbers: that row has no prediction",
        "age,smoker\nold,yes\n50,no\n",
        r"2 rows, 1 with errors: column 'age': 'old' is no number",
        code=1,
    ),
    rows(
        "an infinity: that row has no prediction",
        "age,smoker\n40,yes\ninf,no\n",
        r"2 rows, 1 with errors: column 'age': inf",
        code=1,
    ),
    rows(
        "the same mistake in many rows",
        "age,smoker\n" + "old,yes\n" * 5,
        r"5 rows, 5 with errors: column 'age': 'old' is no number \(5\)",
        code=1,
    ),
    rows(
        "a row that is too short",
        "age,smoker\n40\n50,no\n",
        r"2 rows, 1 with errors: line 2 has 1 cells? where the header names 2",
        code=1,
    ),
    rows(
        "an unknown level, an empty cell: they are told of by nobody",
        "age,smoker\n,perhaps\n",
        r"1 row, none with an error",
        code=0,
    ),
    rows("an empty file", "", r"new\.csv.*(is empty|no header|no row)"),
    rows("no row: nothing is predicted", "age,smoker\n", r"0 rows, none with an error", code=0),
    rows("another encoding", b"age,smoker\n40,\xe9\n", r"new\.csv.*UTF-8"),
    rows(
        "a column twice",
        "age,age,smoker\n40,41,yes\n",
        r"(several|two) columns are named 'age'; rename all but one",
    ),
    rows("binary junk", b"\0\x01\x02" * 50, r"new\.csv"),
    predict("a table that is not there", "model.safetensors old.csv", r"old\.csv is not there"),
    predict(
        "a table of another kind",
        "model.safetensors my.toml",
        r"my\.toml: cannot read '\.toml'; use \.csv, \.tsv, \.parquet",
    ),
    predict("a model that is not there", "old.safetensors new.csv", r"old\.safetensors: no such"),
    predict(
        "a model of another kind",
        "clinics.csv new.csv",
        r"neither the folder of a run nor a file of `undrift export` \(\.safetensors or \.onnx\)",
    ),
    predict("a folder without a run", "runs new.csv", r"runs holds no run"),
    predict(
        "a run that was not trained on a table",
        "runs/my/fedavg/seed-0 new.csv",
        r"was not trained on a table: call it from Python with a tensor",
        before=then(model, ran("undrift run my.toml rounds=1")),
    ),
    predict(
        "a run without a checkpoint",
        f"{FOLDER} new.csv",
        r"has no checkpoint yet: `undrift run` it first",
        before=gone("summary.json", "checkpoint/*"),
    ),
    predict(
        "a run that is not complete: its newest checkpoint predicts",
        f"{FOLDER} new.csv",
        r"is not complete: this is its model after round 1 of 1.*2 rows, none with an error",
        before=gone("summary.json"),
        code=0,
    ),
    predict(
        "--out names a file that is there",
        "model.safetensors new.csv --out clinics.csv",
        r"clinics\.csv is there already: choose another name, or say --force",
        after=kept("clinics.csv", TABLE),
    ),
    predict(
        "--out with another ending",
        "model.safetensors new.csv --out out.xlsx",
        r"out\.xlsx: the name must end in one of \.csv, \.tsv",
        after=left_no("out.xlsx"),
    ),
    predict(
        "--out in a folder that is not there",
        "model.safetensors new.csv --out there/out.csv",
        r"there is no folder there: make it first",
    ),
    predict(
        "--out, with errors: the rows are written all the same",
        "model.safetensors new.csv --out out.csv",
        r"1 with errors.* -> out\.csv",
        before=then(model, wrote("new.csv", "age,smoker\nold,yes\n50,no\n")),
        code=1,
        after=made("out.csv"),
    ),
    predict(
        "half of preparation.json",
        f"{FOLDER} new.csv",
        r"preparation\.json.*(damaged|no preparation)",
        before=changed(f"{FOLDER}/preparation.json", lambda data: data[: len(data) // 2]),
    ),
    predict(
        "another model.json",
        f"{FOLDER} new.csv",
        r"model\.json: gives = 'votes' makes no sense",
        before=changed(
            f"{FOLDER}/model.json", lambda data: data.replace(b"probabilities", b"votes")
        ),
    ),
    predict(
        "half of the weights",
        f"{FOLDER} new.csv",
        r"model\.safetensors: this is no safetensors file, or it was cut off.*Restore it",
        before=changed(f"{FOLDER}/model.safetensors", lambda data: data[: len(data) // 2]),
    ),
    command(
        PREDICT,
        "a run of a table that goes on with other rows",
        "undrift run t.toml rounds=3",
        r"begun with other data or \[columns\] .*: column 'age', fill, was .*, is .* now",
        before=then(
            wrote("t.toml", EXPERIMENT.replace(
                'use = "synthetic", clients = 6, sizes = 20, features = 5, classes = 3',
                'use = "table", path = "clinics.csv", target = "outcome", client = "clinic"',
            ).replace("count = 3", "fraction = 1.0")),
            ran("undrift run t.toml"),
            wrote("clinics.csv", TABLE.replace(",2", ",9")),
        ),
    ),
]  # fmt: skip


# -------------------------------------------------------------------------------------- files
def broken(title: str, name: str, content: Callable[[], bytes], says: str, **rest: Any) -> Case:
    """Predict with a file that is no sound model."""
    line = f"undrift predict {name} new.csv"

    def before(folder: Path) -> None:
        model(folder)
        (folder / name).write_bytes(content())

    return command(EXPORT, title, line, says, before=before, **rest)


def exporting(title: str, line: str, says: str, before: Step = model, **rest: Any) -> Case:
    """Export in a wrong way."""
    return command(EXPORT, title, f"undrift export {line}", says, before=before, **rest)


def without_onnx(folder: Path) -> int:
    with mock.patch.dict(sys.modules, {"onnx": None}):
        return call(["export", FOLDER, "--to", "m.onnx"])


def of_somebody_else() -> bytes:
    return save({"weight": torch.zeros(3)}, {"format": "pt"})


def exported() -> bytes:
    return files()["model.safetensors"]


EXPORT_CASES = [
    broken("half of it", "bad.safetensors", lambda: exported()[:600], r"or it was cut off"),
    broken(
        "one bit of it changed",
        "bad.safetensors",
        lambda: exported()[:-1] + bytes([exported()[-1] ^ 1]),
        r"not as it was written, its SHA-256 differs: copy it again",
    ),
    broken("nothing in it", "bad.safetensors", bytes, r"this is no safetensors file"),
    broken(
        "weights of somebody else",
        "bad.safetensors",
        of_somebody_else,
        r"not written by `undrift export`: it holds weights, and does not say of which network",
    ),
    broken(
        "a header that promises terabytes",
        "bad.safetensors",
        lambda: (2**42).to_bytes(8, "little") + b"{}",
        r"bytes of names and texts: 4398046511104 where at most 100000000 are read",
    ),
    exporting("another ending", f"{FOLDER} --to m.pt", r"must end in one of \.safetensors, \.onnx"),
    exporting(
        "a file that is there",
        f"{FOLDER} --to model.safetensors",
        r"model\.safetensors is there already: choose another name, or say --force",
    ),
    exporting("a folder without a run", "runs --to m.md", r"runs holds no run"),
    exporting("a folder as --to", f"{FOLDER} --to runs.md", r"runs\.md is a folder", before=then(
        model, lambda folder: (folder / "runs.md").mkdir())),
    Case(
        EXPORT, "ONNX without its extra", f"undrift export {FOLDER} --to m.onnx",
        lambda folder: (model(folder), without_onnx(folder))[1], 2,
        r"ONNX needs onnx, which is not installed: pip install 'undrift\[onnx\]'",
        after=left_no("m.onnx"),
    ),
    exporting(
        "a network of somebody's own",
        f"{FOLDER} --to m.safetensors",
        r"'nets:mine': code that is not part of undrift.*--trust",
        before=changed(
            f"{FOLDER}/model.json", lambda data: data.replace(b'"logistic"', b'"nets:mine"')
        ),
        after=left_no("m.safetensors"),
    ),
    exporting(
        "a run of a trainer of your own",
        "runs/mine --to m.safetensors",
        r"was run from Python with objects of your own: load its model\.safetensors",
        before=lambda folder: exec("fl.run(trainer(), 'runs/mine', rounds=1)", scope()),
    ),
]  # fmt: skip


def loaded(title: str, code: str, error: Any, says: str) -> Case:
    """Use a model in Python in a wrong way."""
    found = python(EXPORT, title, code, error, says)

    def do(folder: Path) -> object:
        model(folder)
        return found.do(folder)

    return Case(EXPORT, title, code, do, error, says)


PYTHON_CASES = [
    loaded("a tensor of another shape", "fl.load_model('model.safetensors')(x)", DataError,
           r"rows are \[8, 6\], but model\.safetensors reads \[n, 3\]"),
    loaded("values of classes", "fl.load_model('model.safetensors')('new.csv').values", ConfigError,
           r"predicts classes, not numbers: read \.probabilities"),
    loaded("no path", "fl.load_model(3)", ConfigError, r"from a folder or a file, got 3"),
]  # fmt: skip

CASES = [*PREDICT_CASES, *EXPORT_CASES, *PYTHON_CASES]
