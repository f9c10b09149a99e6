"""What several commands share."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from undrift.errors import ConfigError
from undrift.experiment.events import Listener
from undrift.experiment.history import History
from undrift.experiment.spec import Experiment, load
from undrift.report.terminal import TerminalView
from undrift.trackers import open_trackers

Commands = Any  # argparse's own type is private
DONE, FOUND, WRONG, UNFINISHED = 0, 1, 2, 3  # exit codes, see docs/commands.md


def add_experiment(made: argparse.ArgumentParser) -> None:
    """Add the experiment and its overrides."""
    made.add_argument(
        "experiment", metavar="EXPERIMENT", help="a TOML file, or a name of `undrift list`"
    )
    made.add_argument(
        "changes",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="settings by dotted name, e.g. algorithm.lr=0.05; commas or a list make a sweep",
    )
    add_trust(made)


def add_trust(made: argparse.ArgumentParser) -> None:
    """Add the word without which code that a folder names is not run."""
    made.add_argument(
        "--trust",
        action="store_true",
        help="import the code that a run's folder names: only where you trust whoever wrote it",
    )


def add_running(made: argparse.ArgumentParser) -> None:
    """Add where and how runs go on."""
    made.add_argument("--out", metavar="FOLDER", help="default: runs/NAME of the experiment")
    made.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: the cores)")
    made.add_argument(
        "--track",
        action="append",
        default=[],
        metavar="TRACKER",
        help="also write to tensorboard, wandb or mlflow; may be given several times",
    )
    made.add_argument("--quiet", action="store_true", help="show errors and results only")


def tell_empty(runs: Iterable[tuple[str, History]]) -> tuple[int, int]:
    """Say which runs had rounds that changed nothing; count those runs, and those of only such."""
    some = never = 0
    for name, history in runs:
        empty = history.empty_rounds()
        if empty:
            some, never = some + 1, never + (len(empty) == len(history))
            print(
                f"undrift: {printable(name)}: {len(empty)} of {len(history)} rounds, the first "
                f"of them {empty[0]}, changed nothing: every client's update was left out",
                file=sys.stderr,
            )
    return some, never


def load_experiments(chosen: argparse.Namespace, more: Sequence[str] = ()) -> list[Experiment]:
    """Read the experiment with its overrides, sweeps written out."""
    return load(chosen.experiment, [*chosen.changes, *more], trust=chosen.trust or None)


def out_folder(chosen: argparse.Namespace, experiments: Sequence[Experiment]) -> Path:
    """Choose where runs are kept."""
    place = Path(chosen.experiment)
    if chosen.out is None and place.is_dir():  # a run's own folder: go on there
        out = place.parent.parent
        if len(experiments) > 1 or (out / experiments[0].folder).resolve() != place.resolve():
            raise ConfigError(f"{place} was moved or is not one run: say with --out where to go on")
        return out
    if chosen.out is None:
        return Path("runs") / experiments[0].name
    if not chosen.out or "\0" in chosen.out:
        raise ConfigError(f"--out {chosen.out!r} is no folder")
    out = Path(chosen.out)
    if out.is_file():
        raise ConfigError(f"--out {out} is a file: give a folder")
    return out


@contextmanager
def listening(chosen: argparse.Namespace, out: Path, total: int) -> Iterator[list[Listener]]:
    """Open the terminal view and the trackers, and close them whatever happens."""
    found: list[Listener] = [] if chosen.quiet else [TerminalView(sys.stderr, total=total)]
    found += open_trackers(chosen.track, out)
    try:
        yield found
    finally:
        for listener in reversed(found):
            listener.close()


def printable(text: str) -> str:
    r"""Show control characters instead of sending them to the terminal.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def say(text: str, end: str = "\n") -> None:
    """Print what files say: their control characters are shown, not sent to the terminal."""
    print(printable(text), end=end)


def to_stderr(text: str) -> None:
    """Tell how things go, beside the results."""
    print(printable(text), file=sys.stderr)


def finite(value: str) -> float:
    """Read a finite number."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"give a number, not {value!r}")
    return number


def count_seeds(value: str) -> list[int]:
    """Read `--seeds 3` as 0,1,2."""
    if not value.isdigit() or not 1 <= int(value) <= 10_000:
        raise argparse.ArgumentTypeError(f"give a number of seeds, 1 or more, not {value!r}")
    return list(range(int(value)))
