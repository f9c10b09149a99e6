"""Damaged runs, interruptions, hostile text."""

from __future__ import annotations

import io
import json
import resource
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

from undrift.errors import CheckpointError
from undrift.report.terminal import TerminalView

from .case import RUN, Case, Step, call, command, made, python, ran, setting

DAMAGE, STOPS, HOSTILE = "Damaged runs", "A full disk, Ctrl-C", "Hostile text"
ONCE = ran("undrift run my.toml")


# ------------------------------------------------------------------------------------ damage
def changed(name: str, change: Callable[[bytes], bytes]) -> Step:
    """Run, then damage a file of the run."""

    def do(folder: Path) -> None:
        ONCE(folder)
        (path,) = (folder / RUN).glob(name)
        path.write_bytes(change(path.read_bytes()))

    return do


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def cut_in_line_2(content: bytes) -> bytes:
    return content[: content.index(b"\n") + 9]


def gone(name: str) -> Step:
    """Run, then lose a file of the run."""

    def do(folder: Path) -> None:
        ONCE(folder)
        for path in (folder / RUN).glob(name):
            path.unlink()

    return do


def damaged(
    title: str,
    before: Step,
    says: str,
    line: str = "run my.toml rounds=3",
    code: int = 2,
    group: str = DAMAGE,
    **rest: Any,
) -> Case:
    """Go on with a run of which something is damaged."""
    return command(group, title, f"undrift {line}", says, code, before=before, **rest)


CHECKPOINT = "checkpoint/*.undrift"

DAMAGE_CASES = [
    damaged(
        "half a checkpoint", changed(CHECKPOINT, half), r"is corrupt: it has \d+ bytes instead"
    ),
    damaged(
        "a checkpoint of zeros", changed(CHECKPOINT, lambda b: bytes(len(b))), r"is corrupt: it"
    ),
    damaged(
        "half a checkpoint, judged",
        changed(CHECKPOINT, half),
        r"is corrupt: it has",
        f"evaluate {RUN}",
    ),
    damaged(
        "no checkpoint, judged",
        gone(CHECKPOINT),
        r"has no checkpoint yet: `undrift run` it first",
        f"evaluate {RUN}",
    ),
    damaged(
        "half of the rounds",
        changed("rounds.jsonl", cut_in_line_2),
        r"rounds\.jsonl has 1 sound rounds \(line 2 is not whole\) but the checkpoint",
    ),
    damaged(
        "half a line more: it is trained again",
        changed("rounds.jsonl", lambda b: b + b'{"rou'),
        r"3 rounds",
        code=0,
    ),
    damaged(
        "half of the rounds, reported",
        changed("rounds.jsonl", cut_in_line_2),
        r"rounds\.jsonl",
        "report runs",
    ),
    damaged(
        "half an experiment.toml",
        changed("experiment.toml", half),
        r"restore .*experiment\.toml|experiment\.toml: .*restore",  # where the cut falls
    ),
    damaged(
        "an empty experiment.toml",
        changed("experiment.toml", lambda b: b""),
        r"restore|delete",
    ),
    damaged("no experiment.toml", gone("experiment.toml"), r"holds other files .*no experiment"),
    damaged(
        "no experiment.toml, shown",
        gone("experiment.toml"),
        r"no experiment",
        f"show {RUN}",
    ),
    damaged(
        "a text for the rounds in experiment.toml",
        changed("experiment.toml", lambda b: b.replace(b"rounds = 2", b"rounds = 'x'")),
        r"rounds",
    ),
    damaged(
        "half a summary.json",
        changed("summary.json", half),
        r"summary\.json is damaged.*delete this one file",
    ),
    damaged(
        "half an environment.json",
        changed("environment.json", lambda b: b"{"),
        r"environment\.json is damaged",
    ),
    damaged(
        "another environment.json",
        changed("environment.json", lambda b: b"[1, 2]"),
        r"environment\.json",
    ),
    damaged(
        "no summary.json: it is written again",
        gone("summary.json"),
        r"2 rounds",
        "run my.toml",
        0,
        after=made(f"{RUN}/summary.json"),
    ),
]


# --------------------------------------------------------------------------------- interrupted
def limited(name: str) -> Step:
    """Run four rounds where files may grow a little less than one of the run's needs."""

    def do(folder: Path) -> int:
        ran("undrift run my.toml rounds=4 --out whole")(folder)
        (needed,) = (folder / "whole/fedavg/seed-0").glob(name)
        ONCE(folder)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (needed.stat().st_size - 9, hard))
        try:
            return call(["run", "my.toml", "rounds=4"])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return do


def goes_on(folder: Path) -> None:
    """Check that the same command goes on to the numbers of an undisturbed run."""
    ran("undrift run my.toml rounds=4")(folder)
    ran("undrift run my.toml rounds=4 --out whole")(folder)
    assert losses(folder / RUN) == losses(folder / "whole/fedavg/seed-0")


def losses(run: Path) -> list[float]:
    lines = (run / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line)["train_loss"] for line in lines]


def interrupted(folder: Path) -> int:
    def stop(view: TerminalView, run: Any, record: Any) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    with mock.patch.object(TerminalView, "round", stop):
        return call(["run", "my.toml", "rounds=4", "--jobs", "1"])


def interrupted_then_shown(folder: Path) -> int:
    ONCE(folder)
    with redirect_stderr(io.StringIO()):
        interrupted(folder)
    return call(["show", RUN])


STOP_CASES = [
    Case(
        STOPS,
        "no room for a round",
        "undrift run my.toml rounds=4",
        limited("rounds.jsonl"),
        2,
        r"cannot write .*rounds\.jsonl: file too large\. Rounds up to the last checkpoint are safe",
        goes_on,
    ),
    Case(
        STOPS,
        "no room for a checkpoint",
        "undrift run my.toml rounds=4",
        limited(CHECKPOINT),
        2,
        r"cannot write .*undrift: file too large\. What was there before is untouched",
        goes_on,
    ),
    Case(
        STOPS,
        "Ctrl-C",
        "undrift run my.toml rounds=4",
        interrupted,
        130,
        r"stopped; what is done is kept, the same command goes on",
        goes_on,
    ),
    Case(
        STOPS,
        "Ctrl-C in a longer run, then a look at it",
        f"undrift show {RUN}",
        interrupted_then_shown,
        0,
        r"3 of 4 rounds, not complete",
        goes_on,
    ),
    python(
        STOPS,
        "a checkpoint that cannot be written",
        "trainer().save('/proc/checkpoint')",
        CheckpointError,
        r"cannot create the folder /proc/checkpoint",
    ),
]


# -------------------------------------------------------------------------------- hostile text
RED = "\x1b[31mred"


def relabelled(label: str) -> Step:
    change = f'label = "{label}"'.encode()
    return changed("experiment.toml", lambda b: b.replace(b'label = "fedavg"', change))


HOSTILE_CASES = [
    command(
        HOSTILE,
        "a label that colours the terminal",
        r"undrift run my.toml label=$'\e[31mred'",
        r"label = '\\x1b\[31mred' cannot name a folder",
        words=["run", "my.toml", f"label={RED}"],
    ),
    command(
        HOSTILE,
        "a label of two lines",
        r"undrift run my.toml label=$'a\nb'",
        r"label = 'a\\nb' cannot name a folder",
        words=["run", "my.toml", "label=a\nb"],
    ),
    setting(
        HOSTILE,
        "a label with HTML in it",
        "'label=<script>alert(1)</script>'",
        r"label = '<script>alert\(1\)</script>' cannot name a folder",
    ),
    command(
        HOSTILE,
        "an algorithm that colours the terminal",
        r"undrift run my.toml algorithm.use=$'\e[31mred'",
        r"no algorithm named '\\x1b\[31mred'",
        words=["run", "my.toml", f"algorithm.use={RED}"],
    ),
    command(
        HOSTILE,
        "a file name that colours the terminal",
        r"undrift run $'\e[31mred.toml'",
        r"31mred\.toml",
        words=["run", f"{RED}.toml"],
    ),
    damaged(
        "a run of somebody else, with a label that colours the terminal",
        relabelled("\\u001b[31mred"),
        r"label = '\\x1b\[31mred' cannot name a folder",
        "report runs",
        group=HOSTILE,
    ),
    damaged(
        "the same, shown",
        relabelled("\\u001b[31mred"),
        r"x1b.*red",
        f"show {RUN}",
        0,
        group=HOSTILE,
    ),
]

CASES: list[Case] = [*DAMAGE_CASES, *STOP_CASES, *HOSTILE_CASES]
