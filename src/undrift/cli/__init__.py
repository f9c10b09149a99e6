"""The command line."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

from undrift.cli import (
    agents,
    catalogue,
    data,
    deploy,
    experiments,
    folders,
    proofs,
    reproduce,
    speed,
    using,
)
from undrift.cli.common import printable
from undrift.errors import UndriftError
from undrift.interrupts import StoppedAtOnce, stop_on_signals
from undrift.version import __version__

__all__ = ["main", "parser"]

PARTS = (*(experiments, folders, using, reproduce, agents, deploy, data, catalogue, proofs, speed),)
STOPPED = "stopped; what is done is kept, the same command goes on"
AT_ONCE = "stopped at once; the same command goes on from the last checkpoint"
EXAMPLES = """\
first steps:
  undrift run digits                                  train FedAvg on the embedded digits
  undrift compare digits algorithm.use=fedavg,scaffold seed=0,1,2
  undrift init mine.csv --client hospital             write an experiment file for your own table
  undrift show scaffold                               settings, defaults and paper
"""


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="undrift",
        description="Federated learning that does not drift.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"undrift {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in PARTS:
        module.add_commands(commands)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error of ours is one line, not a traceback."""
    chosen = _parsed(arguments)
    _set_up()
    try:
        code: int = chosen.action(chosen)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough, as `head` does; the rest was not done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except UndriftError as error:
        print(f"undrift: {printable(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        what = f"{error.strerror}: {str(error.filename)[:200]}" if error.filename else str(error)
        print(f"undrift: {printable(what)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        at_once = isinstance(error, StoppedAtOnce)
        with suppress(OSError):  # the terminal may be gone
            print(f"undrift: {AT_ONCE if at_once else STOPPED}", file=sys.stderr)
        return 130


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Let settings stand anywhere: argparse wants them together."""
    made = parser()
    chosen, rest = made.parse_known_args(arguments)
    room = next((name for name in ("changes", "names") if name in chosen), None)
    settings = [a for a in rest if room and not a.startswith("-")]
    strange = [a for a in rest if a not in settings]
    if strange:
        made.error(f"unknown arguments: {' '.join(strange)}")
    if room and settings:
        setattr(chosen, room, [*getattr(chosen, room), *settings])
    return chosen


def _set_up() -> None:
    """Let `kill` and a closed terminal stop as Ctrl-C does, and warnings be one line."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # child processes: no current folder on the path
    with suppress(ValueError):  # not in the main thread: somebody else handles signals
        stop_on_signals()
    logging.basicConfig(format="undrift: %(message)s", stream=sys.stderr)
    warnings.formatwarning = lambda message, *_, **__: f"undrift: {message}\n"
