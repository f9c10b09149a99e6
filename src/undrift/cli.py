"""The command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from undrift.errors import UndriftError
from undrift.rules.named import catalogue
from undrift.version import __version__


def list_algorithms() -> str:
    """Write one line per algorithm: its name and its paper."""
    entries = catalogue().values()
    width = max(len(entry.name) for entry in entries)
    return "\n".join(f"{entry.name:<{width}}  {entry.paper}" for entry in entries)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="undrift", description="Federated learning that does not drift."
    )
    made.add_argument("--version", action="version", version=f"undrift {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="name every algorithm, with its paper")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error of ours is one line, not a traceback."""
    chosen = parser().parse_args(arguments)
    try:
        if chosen.command == "list":
            print(list_algorithms(), flush=True)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UndriftError as error:
        print(f"undrift: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
