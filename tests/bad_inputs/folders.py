"""Experiment files and folders of runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from undrift.errors import ChangedExperiment, ConfigError
from undrift.experiment.folder import RunFolder

from .case import (
    EXPERIMENT,
    RUN,
    Case,
    Step,
    call,
    command,
    kept,
    left_no,
    made,
    python,
    ran,
    setting,
    then,
    wrote,
)

FILES, FOLDERS = "Experiment files", "Folders of runs"
LONG = "x" * 300


# ------------------------------------------------------------------------------------- files
def file(title: str, content: str | bytes, says: str, **rest: Any) -> Case:
    """Run an experiment file with something wrong in it."""
    return command(
        FILES, title, "undrift run bad.toml", says, before=wrote("bad.toml", content), **rest
    )


def folder_named(name: str) -> Step:
    """Make a folder first."""
    return lambda folder: (folder / name).mkdir(parents=True)


FILE_CASES = [
    command(FILES, "not there", "undrift run bad.toml", r"bad\.toml: no such file or directory"),
    command(
        FILES, "a folder", "undrift run bad.toml", r"is a folder", before=folder_named("bad.toml")
    ),
    file("not TOML", "rounds = = 3", r"bad\.toml: this is not TOML: .*line 1, column 10"),
    file("a setting twice", "rounds = 3\nrounds = 4", r"not TOML: Cannot overwrite a value"),
    file("not UTF-8", b"name = '\xe9'", r"is no experiment file: byte 8 is not UTF-8"),
    file(
        "5 megabytes",
        "#" * 5_000_000,
        r"is no experiment file: .* 5000000 where at most 4000000 are read",
    ),
    file(
        "nested without end",
        "a = " + "[" * 100_000,
        r"not TOML: lists within lists: 100000 where at most 64",
    ),
    file(
        "a key of 40,000 parts",
        "a" + ".a" * 40_000 + " = 1",
        r"not TOML: parts of one key: 40001 where at most 64 .* UNDRIFT_LIMITS='depth=40001'",
    ),
    file("empty", "", r"the experiment has no \[data\]: every one needs data, a model and an alg"),
    file("no model", "[data]\nuse = 'digits'", r"the experiment has no \[model\]"),
    file(
        "a date for a number",
        EXPERIMENT.replace("= 2\n", "= 2020-01-01\n"),
        r"rounds must be a whol",
    ),
    file(
        "a mark of Notepad at the start: read as if it were not there",
        "\ufeff" + EXPERIMENT,
        r"2 rounds",
        code=0,
    ),
    command(
        FILES,
        "a name that is too long",
        "undrift run xxx... (300 letters)",
        r"too long",
        words=["run", f"{LONG}.toml"],
    ),
    command(
        FILES,
        "a pipe without a writer",
        "undrift run bad.toml",
        r"is no file",
        before=lambda folder: os.mkfifo(folder / "bad.toml"),
    ),
    python(
        FILES,
        "a name with a zero byte",
        r"fl.load_experiments('my\0.toml')",
        ConfigError,
        r"my\\x00",
    ),
    python(
        FILES,
        "a number for a name",
        "fl.load_experiments(3)",
        ConfigError,
        r"3",
    ),
    python(
        FILES,
        "overrides that are no list",
        "fl.load_experiments('my.toml', 'rounds=3')",
        ConfigError,
        r"list",
    ),
    python(
        FILES,
        "a sweep where one experiment is wanted",
        "fl.Experiment('digits', 'mlp', fl.fedavg(0.1), rounds=[2, 3])",
        ConfigError,
        r"rounds must be a whole number.*got \[2, 3\]",
    ),
    python(
        FILES,
        "an algorithm by its name",
        "fl.Experiment('digits', 'mlp', 'fedavg')",
        ConfigError,
        r"'fedavg' is no Algorithm",
    ),
    python(
        FILES,
        "a partition by its name",
        "fl.Experiment('digits', 'mlp', fl.fedavg(0.1), 'iid')",
        ConfigError,
        r"partition",
    ),
    python(
        FILES,
        "a module for a model",
        "fl.Experiment('digits', net, fl.fedavg(0.1))",
        ConfigError,
        r"own objects go to a Trainer, or are named as 'package.module:function'",
    ),
]


# ----------------------------------------------------------------------------------- folders
def named(title: str, change: str, word: str, **rest: Any) -> Case:
    """Give a run a name that would lead elsewhere."""
    says = rf"{word} cannot name a folder: use up to 100 letters"
    return setting(FOLDERS, title, change, says, after=left_no("runs"), **rest)


def linked(folder: Path) -> None:
    wrote("elsewhere/thesis.doc", "mine")(folder)
    (folder / RUN).parent.mkdir(parents=True)
    (folder / RUN).symlink_to(folder / "elsewhere")


def locked(folder: Path) -> int:
    with RunFolder(RUN).locked():
        return call(["run", "my.toml"])


ONCE = ran("undrift run my.toml")
TWICE = then(ran("undrift run my.toml --out runs/a"), ran("undrift run my.toml --out runs/b"))

FOLDER_CASES = [
    named("a name that leaves the folder", "name=../up", r"name = '\.\./up'"),
    named("a label at the root", "label=/etc", r"label = '/etc'"),
    named("two dots", "label=..", r"label = '\.\.'"),
    named("the home folder", "name=~", r"name = '~'"),
    named("no name", "name=", r"name = ''"),
    named("a name of 300 letters", f"label={LONG}", r"label = 'x+'"),
    command(
        FOLDERS,
        "a name with a zero byte",
        r"undrift run my.toml name=$'a\0b'",
        r"name = 'a\\x00b' cannot name a folder",
        words=["run", "my.toml", "name=a\0b"],
    ),
    setting(
        FOLDERS,
        "a number for a name",
        "name=3",
        r"name = 3 .*(quotes|text)",
    ),
    setting(FOLDERS, "no folder", "--out ''", r"--out '' is no folder"),
    setting(
        FOLDERS,
        "a file for a folder",
        "--out my.toml",
        r"my\.toml is a file",
        after=kept("my.toml", EXPERIMENT),
    ),
    setting(
        FOLDERS,
        "a folder that cannot be made",
        "--out /proc/runs",
        r"cannot create the folder /proc/runs.*Nothing was written",
    ),
    setting(
        FOLDERS,
        "a folder whose name is too long",
        f"--out {LONG}",
        r"too long",
    ),
    setting(
        FOLDERS,
        "a folder with files of yours",
        "",
        r"holds other files \(thesis\.doc\) and no",
        before=wrote(f"{RUN}/thesis.doc", "mine"),
        after=kept(f"{RUN}/thesis.doc", "mine"),
    ),
    setting(
        FOLDERS,
        "a link to a folder with files of yours",
        "",
        r"holds other files \(thesis\.d",
        before=linked,
        after=kept("elsewhere/thesis.doc", "mine"),
    ),
    setting(
        FOLDERS,
        "another experiment in the same folder",
        "algorithm.lr=0.2",
        r"holds another experiment:\n  algorithm\.local\.lr: 0\.1 there, 0\.2 now\nChoose ano",
        before=ONCE,
        after=then(ran("undrift run my.toml rounds=3"), made(f"{RUN}/lock")),
    ),
    Case(
        FOLDERS,
        "a run that another process is at",
        "undrift run my.toml",
        locked,
        2,
        r"is being run by another process: wait for it, or choose another folder",
        after=ONCE,
    ),
    python(
        FOLDERS,
        "another trainer in the same folder",
        "fl.run(trainer(), 'here', rounds=1); "
        "fl.run(trainer(algorithm=fl.fedavg(0.2)), 'here', rounds=2)",
        ChangedExperiment,
        r"lr: 0\.1 there, 0\.2 now",
    ),
    python(
        FOLDERS,
        "a number for a folder",
        "fl.run(trainer(), 3, rounds=1)",
        ConfigError,
        r"a run is kept in a folder, given by its path; got 3",
    ),
    command(
        FOLDERS, "evaluate where there is no run", "undrift evaluate runs", r"runs holds no run"
    ),
    command(
        FOLDERS, "report where there is no run", "undrift report .", r"\. holds no run: give the"
    ),
    command(
        FOLDERS,
        "show where there is no run",
        "undrift show runs",
        r"named 'runs'",
    ),
    command(
        FOLDERS,
        "two runs of one label and seed",
        "undrift report runs",
        r"runs/a.*runs/b",
        before=TWICE,
    ),
    command(
        FOLDERS,
        "a picture of an unknown kind",
        "undrift partition my.toml --out p.doc",
        r"p\.doc: the picture's name must end in \.png, \.svg, \.pdf",
        needs=("matplotlib",),
    ),
    command(
        FOLDERS,
        "a picture in a folder that is not there",
        "undrift partition my.toml --out pictures/p.png",
        r"",
        0,
        needs=("matplotlib",),
        after=made("pictures/p.png"),
    ),
]


CASES: list[Case] = [*FILE_CASES, *FOLDER_CASES]
