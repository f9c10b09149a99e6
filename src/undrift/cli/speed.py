"""`undrift bench`: how long a round takes on this machine."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from undrift.arguments import known_device
from undrift.bench import ALGORITHMS, LOADS, bench
from undrift.cli.common import Commands
from undrift.core.precision import PRECISIONS
from undrift.data.checks import check_whole
from undrift.errors import DataError, unknown_name
from undrift.experiment.world import device_named
from undrift.version import __version__


def add_commands(commands: Commands) -> None:
    """Describe the command."""
    made = commands.add_parser("bench", help="measure a round on this machine against a plain loop")
    made.add_argument("works", nargs="*", metavar="WORK", help=f"some of {', '.join(LOADS)}")
    made.add_argument("--device", default="auto", help="cpu, cuda, or auto: a GPU if there is one")
    made.add_argument("--precision", help=f"on a GPU: {', '.join(PRECISIONS)} (default tf32)")
    made.add_argument("--rounds", type=int, default=3, metavar="N", help="turns (default 3)")
    made.add_argument("--tiny", action="store_true", help="little work, to try it out")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    made.set_defaults(action=do_bench)


def do_bench(chosen: argparse.Namespace) -> int:
    """Print one line per work and algorithm."""
    check_whole("--rounds", chosen.rounds)
    if chosen.precision is not None and chosen.precision not in PRECISIONS:
        raise unknown_name("precision", chosen.precision, list(PRECISIONS), "--precision")
    for name in chosen.works:
        if name not in LOADS:
            raise unknown_name("work", name, list(LOADS), "bench")
    device, found = str(known_device(device_named(chosen.device))), list[dict[str, object]]()
    if chosen.json is not None:
        _write(chosen.json, {})  # rather now than after the measurements
    print(f"undrift {__version__}, torch {torch.__version__}, {_machine(device)}")
    print(f"{'work':12} {'algorithm':10} {'plain loop':>12} {'undrift':>12} {'faster':>8}")
    for name in chosen.works or LOADS:
        for algorithm in ALGORITHMS:
            one = bench(
                name, algorithm, device=device, precision=chosen.precision,
                rounds=chosen.rounds, tiny=chosen.tiny,
            )  # fmt: skip
            found.append({**one._asdict(), "faster": one.faster})
            times = f"{one.loop * 1e3:9.1f} ms {one.undrift * 1e3:9.1f} ms"
            print(f"{name:12} {algorithm:10} {times} {one.faster:7.1f}x", flush=True)
    print("The loop is FedAvg in every line: one client after the other, torch.optim.SGD.")
    if chosen.json is not None:
        about = {
            "machine": _machine(device),
            "precision": chosen.precision,
            "rounds": chosen.rounds,
        }
        versions = {"torch": torch.__version__, "undrift": __version__}
        _write(chosen.json, {**about, **versions, "results": found})
    return 0


def _machine(device: str) -> str:
    return platform.processor() or "cpu" if device == "cpu" else torch.cuda.get_device_name()


def _write(path: Path, numbers: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(numbers, indent=1) + "\n")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error
