"""Tables, data sets, examples in Python."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

from undrift.errors import DataError

from .case import TABLE, Case, Step, command, left_no, python, ran, setting, then, wrote

TABLES, SETS, EXAMPLES = "Your own table", "Data sets", "Examples in Python"
INIT = "undrift init clinics.csv --target outcome --client clinic"
NO_FILE = left_no("clinics.toml")
IDX = [f"{a}-{b}-ubyte" for a in ("train", "t10k") for b in ("images-idx3", "labels-idx1")]


def table(title: str, content: str | bytes, says: str, **rest: Any) -> Case:
    """Start from a table with something wrong in it; no experiment file may be left."""
    return command(
        TABLES, title, INIT, says, before=wrote("clinics.csv", content), after=NO_FILE, **rest
    )


def init(title: str, line: str, says: str, **rest: Any) -> Case:
    """Start from the sound table in a wrong way."""
    return command(TABLES, title, f"undrift init {line}", says, after=NO_FILE, **rest)


FROM_TABLE = "\"data={use='table', path='clinics.csv', target='outcome', client='clinic'%s}\""

TABLE_CASES = [
    init("a column that is not there", "clinics.csv --target outcom", r"mean 'outcome'\?"),
    init(
        "a client column that is not there",
        "clinics.csv --target outcome --client clnic",
        r"clinics\.csv: no column named 'clnic'\. Did you mean 'clinic'\?",
    ),
    init(
        "the target as client",
        "clinics.csv --target outcome --client outcome",
        r"column 'outcome' is asked for two times: target and client must differ",
    ),
    init("no target", "clinics.csv", r"required: --target"),
    init("a file that is not there", "clinic.csv --target outcome", r"clinic\.csv is not there: c"),
    init("a folder", ". --target outcome", r"is no table"),
    init(
        "a spreadsheet",
        "clinics.xlsx --target outcome",
        r"cannot read '\.xlsx'; use \.csv, \.tsv, \.parquet",
        before=wrote("clinics.xlsx", b"PK\3\4"),
    ),
    init(
        "a file that is there already",
        "clinics.csv --target outcome --out my.toml",
        r"my\.toml is there already: choose another name with --out",
    ),
    table("a header and no rows", "clinic,age,outcome\n", r"has a header but no rows"),
    table("an empty file", "", r"is empty: its first line should name the columns"),
    table(
        "an empty client", TABLE + ",33,no,ill\n", r"line 32, column 'clinic': the cell is empty"
    ),
    table(
        "many cells that are wrong",
        TABLE + "A,old,no,ill\n,33,no,ill\n",
        r"has 2 problems:\n  line 32, column 'age': 'old' is no .*\n  line 33, column 'clinic'",
    ),
    table("a short line", TABLE + "A,33,no\n", r"line 32 has 3 cells where the header names 4"),
    table("a long line", TABLE + "A,33,no,ill,x\n", r"line 32 has 5 cells where the header names"),
    table(
        "a text among numbers",
        TABLE + "A,unknown,no,ill\n",
        r"line 32, column 'age': 'unknown' is no number, but 30 of 31 cells",
    ),
    table("NaN among numbers", TABLE + "A,NAN,no,ill\n", r"line 32, column 'age': NAN is no fin"),
    table("infinity among numbers", TABLE + "A,inf,no,ill\n", r"'age': inf is no finite number"),
    table("one class", TABLE.replace("ill", "well"), r"holds one class only \('well'\)"),
    table("two columns of one name", TABLE.replace("age", "clinic"), r"two columns are named 'cli"),
    table("a column without a name", TABLE.replace("age", ""), r"column 2 has no name; name it"),
    table("no features", "clinic,outcome\nA,ill\nB,well\n", r"no column is left for the features"),
    table("a quote that never ends", TABLE + 'A,"33,no,ill\n', r"line 32 cannot be read"),
    table("a table in Latin-1", TABLE.encode() + b"A,33,n\xe9,ill\n", r"line 32 is not UTF-8.*sav"),
    table("a table in UTF-16", TABLE.encode("utf-16"), r"is not UTF-8.*save the table as UTF-8"),
    table("a binary file", b"\0" * 3000, r"is no text: it holds zero bytes"),
    table(
        "a column of names",
        "clinic,name,outcome\n" + "".join(f"A,n{i},{'ab'[i % 2]}\n" for i in range(80)),
        r"no column is left for the features; name: an identifier \(80 different values",
    ),
    setting(
        TABLES,
        "the target among the features",
        FROM_TABLE % ", features=['age', 'outcome']",
        r"column 'outcome' is asked for two times",
    ),
    setting(TABLES, "no path", "data=table", r"data 'table': needs the setting 'path'"),
    setting(
        TABLES,
        "numbers asked for where there are words",
        FROM_TABLE % ", kind='numbers'",
        r"has 2 problems.*'well' is no number.*'ill' is no number",
    ),
    setting(
        TABLES,
        "a word for a switch",
        FROM_TABLE % ", standardise='maybe'",
        r"standardise .*true or false",
    ),
    setting(
        TABLES,
        "the table has changed, in a run that goes on",
        f"sampler=everyone rounds=3 {FROM_TABLE % ', split_seed=1'}",
        r"begun with other data",
        before=then(
            ran(f"undrift run my.toml sampler=everyone {FROM_TABLE % ', split_seed=1'}"),
            wrote("clinics.csv", TABLE.replace("25", "52")),
        ),
    ),
]


def holding(**files: bytes) -> Step:
    """Let UNDRIFT_DATA be a folder with these files of mnist."""

    def do(folder: Path) -> None:
        os.environ["UNDRIFT_DATA"] = str(folder / "data")
        (folder / "data/mnist").mkdir(parents=True)
        for name, content in files.items():
            (folder / "data/mnist" / name).write_bytes(content)

    return do


CUT_OFF = b"\0\0\x08\x03" + b"\0\0\0\x0a" * 3 + b"cut off"
HALF_GZIP = gzip.compress(bytes(range(256)) * 9, mtime=0)[:200]


def mnist(title: str, before: Step, says: str) -> Case:
    """Run the shipped experiment on MNIST."""
    return command(SETS, title, "undrift run mnist", says, before=before)


SET_CASES = [
    mnist("not there", holding(), r"mnist is not in FOLDER/data: run `undrift data get mnist`"),
    mnist("one file of four", holding(**{IDX[0]: b""}), r"does not hold .*To complete it, run"),
    mnist(
        "cut off",
        holding(**dict.fromkeys(IDX, CUT_OFF)),
        r"has 23 bytes where its header asks for 1016\. Delete it, then run",
    ),
    mnist(
        "half a gzip file",
        holding(**{f"{name}.gz": HALF_GZIP for name in IDX}),
        r"is no complete gzip file .*Delete it, then run `undrift data get mnist`",
    ),
]

OF = "fl.Federation.of([%s])"

EXAMPLE_CASES = [
    python(EXAMPLES, "no clients", OF % "", DataError, r"at least one client, got none"),
    python(EXAMPLES, "empty clients only", OF % "(x[:0], y[:0])", DataError, r"are empty; give at"),
    Case(
        EXAMPLES,
        "one empty client among others: it is never asked",
        "fl.Federation.of([(x, y), (x[:0], y[:0])])",
        python(EXAMPLES, "", OF % "(x, y), (x[:0], y[:0])", DataError, "").do,
        0,
        "",
    ),
    python(EXAMPLES, "NaN", OF % "(x * float('nan'), y)", DataError, r"client 0, example 0, holds"),
    python(EXAMPLES, "infinity", OF % "(x / 0, y)", DataError, r"holds NaN or infinity; clean or"),
    python(EXAMPLES, "too few targets", OF % "(x, y[:7])", DataError, r"x has 8 examples but y ha"),
    python(
        EXAMPLES,
        "shapes that differ",
        OF % "(x, y), (x[:, :5], y)",
        DataError,
        r"x of client 1 is \[5\] .*but client 0 has \[6\].*bring all clients to one shape",
    ),
    python(EXAMPLES, "words", OF % "(['a', 'b'], [0, 1])", DataError, r"cannot be made a tensor"),
    python(
        EXAMPLES,
        "a label that the model has no output for",
        "fl.Trainer(fl.Task(net), fl.Federation.of([(x, y + 1)]), fl.fedavg(0.1))",
        DataError,
        r"client 0 has the label 3, but the module has 3 outputs",
    ),
    python(
        EXAMPLES,
        "a negative label",
        "fl.Trainer(fl.Task(net), fl.Federation.of([(x, y - 1)]), fl.fedavg(0.1))",
        DataError,
        r"client 0 has the label -1",
    ),
    python(
        EXAMPLES,
        "an index beyond the examples",
        "fl.Federation.split(x, y, [[0, 99]])",
        DataError,
        r"client 0: index 99 is out of range; there are 8 examples",
    ),
    python(
        EXAMPLES,
        "an example of two clients",
        "fl.Federation.split(x, y, [[0, 1], [1]])",
        DataError,
        r"example 1 is given to clients 0 and 1; give it once, or pass allow_shared=True",
    ),
    python(
        EXAMPLES,
        "a test set of another length than its labels",
        "fl.run(trainer(), rounds=1, test=(x, y[:3]))",
        DataError,
        r"as many targets: 8 and 3",
    ),
    python(
        EXAMPLES,
        "a test set of another shape",
        "fl.run(trainer(), rounds=1, test=(x[:, :2], y))",
        DataError,
        r"fails on the test set, inputs \[2\]",
    ),
    python(
        EXAMPLES,
        "a test set without labels",
        "fl.run(trainer(), rounds=1, test=x)",
        DataError,
        r"test",
    ),
    python(
        EXAMPLES,
        "NaN in the test set",
        "fl.run(trainer(), rounds=1, test=(x * float('nan'), y))",
        DataError,
        r"test.*NaN or infinity",
    ),
]

CASES: list[Case] = [*TABLE_CASES, *SET_CASES, *EXAMPLE_CASES]
