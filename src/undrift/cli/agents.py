"""`undrift train-agent`: a policy that steers a federation's server."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from undrift.cli.common import UNFINISHED, Commands, finite
from undrift.errors import ConfigError

POLICY, RECORD = "policy.safetensors", "record.json"


def add_commands(commands: Commands) -> None:
    """Describe the command."""
    made = commands.add_parser(
        "train-agent", help="train a policy for fedrl; going on where it stopped"
    )
    made.add_argument(
        "experiment", metavar="EXPERIMENT", help="a TOML file with an [agent], or a shipped one"
    )
    made.add_argument(
        "changes", nargs="*", default=[], metavar="NAME=VALUE", help="e.g. agent.rollouts=50"
    )
    made.add_argument("--out", metavar="FOLDER", help="default: runs/agent-NAME")
    made.add_argument(
        "--minutes", type=finite, metavar="M", help="stop after so long; the same command goes on"
    )
    made.add_argument("--quiet", action="store_true", help="show errors and results only")
    made.set_defaults(action=do_train)


def do_train(chosen: argparse.Namespace) -> int:
    """Train an agent, judge it, and write its policy and its record."""
    from undrift.agent.making import make_policy  # needs an extra

    minutes = chosen.minutes
    if minutes is not None and minutes <= 0:
        raise ConfigError(f"--minutes {minutes:g} leaves no time: give more than 0")
    name = Path(chosen.experiment).stem
    out = Path(chosen.out) if chosen.out else Path("runs") / f"agent-{name}"
    if out.is_file():
        raise ConfigError(f"--out {out} is a file: give a folder")
    until = None if minutes is None else time.monotonic() + 60 * minutes
    record = make_policy(
        chosen.experiment,
        chosen.changes,
        out,
        told=_silent if chosen.quiet else _told,
        stop=lambda: until is not None and time.monotonic() > until,
    )
    if record is None:
        print(f"{out}: stopped before the end; the same command goes on")
        return UNFINISHED
    for way, score in record["evaluation"].items():
        rounds = ", ".join("-" if r is None else str(r) for r in score["rounds"])
        print(f"{way:8} return {score['mean_return']:8.3f}   rounds to target: {rounds}")
    print(f"policy {record['digest'][:12]}... is in {out / POLICY}, how it was made in {RECORD}")
    return 0


def _silent(found: dict[str, Any]) -> None:
    """Say nothing."""


def _told(found: dict[str, Any]) -> None:
    text = (
        f"rollout {found['rollout']}: return {found['return']:.2f} in {found['rounds']:.1f} rounds"
    )
    print(f"{text} ({found['seconds']:.1f} s)", file=sys.stderr, flush=True)
