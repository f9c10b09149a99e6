"""One bad input: what is typed, how it ends and what undrift says about it."""

from __future__ import annotations

import io
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import undrift as fl
from undrift.cli import main
from undrift.errors import UndriftError

RUN = "runs/my/fedavg/seed-0"

EXPERIMENT = """\
rounds = 2
data = { use = "synthetic", clients = 6, sizes = 20, features = 5, classes = 3 }
model = { use = "mlp", hidden = 4 }
algorithm = { use = "fedavg", lr = 0.1 }
work = { steps = 2, batch = 5 }
sampler = { use = "uniform", count = 3 }
engine = { device = "cpu" }
"""

TABLE = "clinic,age,smoker,outcome\n" + "".join(
    f"{'ABC'[i % 3]},{20 + i},{'yes' if i % 4 else 'no'},{'ill' if i % 2 else 'well'}\n"
    for i in range(30)
)

Step = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """What a user does in a folder with `my.toml` and `clinics.csv`, and how it must end."""

    group: str
    title: str
    typed: str  # as the documentation shows it
    do: Step  # gives an exit code, or raises
    ends: int | type[UndriftError]
    says: str  # a regular expression
    after: Step | None = None  # that nothing was lost
    needs: tuple[str, ...] = ()  # modules
    expected_bug: str = ""  # what happens today, for a case that is switched off

    @property
    def name(self) -> str:
        return f"{self.group}: {self.title}"


class Outcome(NamedTuple):
    """How a case ended, and what was written to stderr (after a clean end: to both)."""

    ended: int | type[BaseException]
    said: str


def happen(case: Case, folder: Path) -> Outcome:
    """Let a case happen in an empty folder; what is no error of undrift's own comes through."""
    (folder / "my.toml").write_text(EXPERIMENT)
    (folder / "clinics.csv").write_text(TABLE)
    out, err = io.StringIO(), io.StringIO()
    with alone(folder):
        with redirect_stdout(out), redirect_stderr(err):
            try:
                ended: Any = case.do(folder) or 0
            except SystemExit as stop:
                ended = stop.code
            except UndriftError as error:
                ended = type(error)
                err.write(str(error))
        if case.after is not None:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                case.after(folder)
    said = err.getvalue() + (out.getvalue() if ended == 0 else "")
    return Outcome(ended, said.replace(str(folder), "FOLDER").strip("\n"))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Work in a folder as a process of its own would, and put everything back."""
    here, path, modules = os.getcwd(), list(sys.path), set(sys.modules)
    environment, arguments, shown = dict(os.environ), sys.argv, warnings.formatwarning
    handlers, on_term = list(logging.root.handlers), signal.getsignal(signal.SIGTERM)
    os.chdir(folder)
    os.environ["COLUMNS"] = "80"
    sys.argv, logging.root.handlers[:] = ["undrift"], []
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, logging.root.handlers[:] = arguments, handlers
        sys.path[:], warnings.formatwarning = path, shown
        signal.signal(signal.SIGTERM, on_term)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]


# ------------------------------------------------------------------------------ making cases
def call(words: Sequence[str]) -> int:
    """Run one command; runs are quiet and one at a time unless they say otherwise."""
    quick = ["--quiet", "--jobs", "1"] if words[:1] in (["run"], ["compare"]) else []
    return main([*words, *([] if "--jobs" in words else quick)])


def command(
    group: str,
    title: str,
    line: str,
    says: str,
    code: int = 2,
    *,
    before: Step | None = None,
    words: Sequence[str] | None = None,
    **rest: Any,
) -> Case:
    """Type a line into a shell; `words` gives what a line cannot hold."""
    arguments = shlex.split(line)[1:] if words is None else list(words)

    def do(folder: Path) -> int:
        if before is not None:
            before(folder)
        return call(arguments)

    return Case(group, title, line, do, code, says, **rest)


def setting(group: str, title: str, change: str, says: str, code: int = 2, **rest: Any) -> Case:
    """Override a setting of `my.toml`, or several."""
    return command(group, title, f"undrift run my.toml {change}".strip(), says, code, **rest)


def python(
    group: str, title: str, code: str, error: type[UndriftError], says: str, **rest: Any
) -> Case:
    """Run one line of Python."""

    def do(folder: Path) -> None:
        exec(code, scope())

    return Case(group, title, code, do, error, says, **rest)


def scope() -> dict[str, Any]:
    """Name what the lines of Python use: x [8, 6], y [8] of 3 classes, and a network for them."""
    x, y = torch.linspace(-1, 1, 48).reshape(8, 6), torch.arange(8) % 3
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))

    def trainer(**changes: Any) -> fl.Trainer:
        parts: dict[str, Any] = {"task": fl.Task(net), "algorithm": fl.fedavg(0.1)} | changes
        return fl.Trainer(federation=fl.Federation.of([(x, y), (x, y)]), **parts)

    return {"fl": fl, "torch": torch, "nn": nn, "x": x, "y": y, "net": net, "trainer": trainer}


# ------------------------------------------------------------------------- before and after
def then(*steps: Step) -> Step:
    """Do one thing after the other."""

    def do(folder: Path) -> None:
        for step in steps:
            step(folder)

    return do


def wrote(name: str, content: str | bytes) -> Step:
    """Write a file first."""

    def do(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return do


def ran(line: str, code: int = 0) -> Step:
    """Run a command whose words do not count, and which must end as told."""

    def do(folder: Path) -> None:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            ended = call(shlex.split(line)[1:])
        assert ended == code, f"{line}: exit code {ended}"

    return do


def made(name: str) -> Step:
    """Check that a file is there."""

    def do(folder: Path) -> None:
        assert (folder / name).exists(), name

    return do


def left_no(name: str) -> Step:
    """Check that a file is not there."""

    def do(folder: Path) -> None:
        assert not (folder / name).exists(), name

    return do


def kept(name: str, content: str | bytes) -> Step:
    """Check that a file is as it was."""

    def do(folder: Path) -> None:
        expected = content if isinstance(content, bytes) else content.encode()
        assert (folder / name).read_bytes() == expected, name

    return do
