"""`undrift bench`: how long a round takes on this machine."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from undrift.arguments import known_device
from undrift.bench import ALGORITHMS, HAND, LOADS, USUAL, Measured, Spread, bench
from undrift.cli.common import Commands
from undrift.core.precision import PRECISIONS
from undrift.data.checks import check_whole
from undrift.errors import DataError, unknown_name
from undrift.experiment.world import device_named
from undrift.version import __version__


def add_commands(commands: Commands) -> None:
    """Describe the command."""
    made = commands.add_parser(
        "bench", help="measure a round on this machine against a plain loop of the same algorithm"
    )
    made.add_argument("works", nargs="*", metavar="WORK", help=f"some of {', '.join(LOADS)}")
    made.add_argument(
        "--algorithms", default=",".join(USUAL), metavar="A,B",
        help=f"with commas between them (default {','.join(USUAL)})",
    )  # fmt: skip
    made.add_argument("--device", default="auto", help="cpu, cuda, or auto: a GPU if there is one")
    made.add_argument("--precision", help=f"on a GPU: {', '.join(PRECISIONS)} (default tf32)")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="turns (default 5)")
    made.add_argument(
        "--threads", type=int, default=1, metavar="N", help="CPU threads of both (default 1)"
    )
    made.add_argument("--tiny", action="store_true", help="little work, to try it out")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    made.set_defaults(action=do_bench)


def do_bench(chosen: argparse.Namespace) -> int:
    """Print one line per work and algorithm."""
    algorithms = _checked(chosen)
    device, found = str(known_device(device_named(chosen.device))), list[Measured]()
    if chosen.json is not None:
        _write(chosen.json, {})  # rather now than after the measurements
    print(_heading(device, chosen.threads, chosen.rounds))
    for name in chosen.works or LOADS:
        for algorithm in algorithms:
            one = bench(
                name, algorithm, device=device, precision=chosen.precision,
                rounds=chosen.rounds, threads=chosen.threads, tiny=chosen.tiny,
            )  # fmt: skip
            found.append(one)
            print(_line(one), flush=True)
    print(_explained(found))
    if chosen.json is not None:
        about = {
            "machine": _machine(device),
            "precision": chosen.precision,
            "rounds": chosen.rounds,
            "threads": chosen.threads,
        }
        versions = {"torch": torch.__version__, "undrift": __version__}
        _write(chosen.json, {**about, **versions, "results": [_plain(one) for one in found]})
    return 0


def _checked(chosen: argparse.Namespace) -> list[str]:
    """Refuse unknown names before anything is measured; give the algorithms."""
    check_whole("--rounds", chosen.rounds)
    check_whole("--threads", chosen.threads)
    algorithms: list[str] = chosen.algorithms.split(",")
    precisions = [] if chosen.precision is None else [chosen.precision]
    for what, names, known, place in (
        ("precision", precisions, PRECISIONS, "--precision"),
        ("work", chosen.works, LOADS, "bench"),
        ("algorithm", algorithms, ALGORITHMS, "bench"),
    ):
        for name in names:
            if name not in known:
                raise unknown_name(what, name, list(known), place)
    return algorithms


def _heading(device: str, threads: int, turns: int) -> str:
    clock = "CPU time" if device == "cpu" else "Wall time"
    return (
        f"undrift {__version__}, torch {torch.__version__}, {_machine(device)}, "
        f"{threads} CPU thread{'s' * (threads > 1)}\n"
        f"{clock} of a round in ms, median (least to most) of {turns} turns\n"
        f"{'work':11} {'algorithm':10} {'plain loop':>27} {'undrift':>27} {'times faster':>20}  "
        "by wall time"
    )


def _line(one: Measured) -> str:
    loop, ours = (_shown(side, 1e3, 1) for side in (one.loop, one.undrift))
    faster, wall = _shown(one.faster, 1, 2), f"{one.wall_faster.median:.2f}"
    mark = "" if one.against == HAND else " *"
    return f"{one.load:11} {one.algorithm:10} {loop:>27} {ours:>27} {faster:>20}  {wall}{mark}"


def _shown(spread: Spread, unit: float, digits: int) -> str:
    least, median, most = (f"{unit * value:.{digits}f}" for value in spread)
    return f"{median} ({least} to {most})"


def _explained(found: list[Measured]) -> str:
    lines = [
        "Each line compares an algorithm with itself, in turns. The plain loop is written by hand:"
    ]
    lines.append("one client after the other, torch.optim.SGD, every client's batches shuffled.")
    if any(one.against != HAND for one in found):
        lines.append("* Not written by hand: undrift's own reference engine, one client at a time.")
    if any(one.clock == "cpu" for one in found):
        lines.append("CPU time counts this process alone; in wall time other processes count too.")
    return "\n".join(lines)


def _plain(one: Measured) -> dict[str, object]:
    """Write a measurement as JSON has it."""
    values = one._asdict().items()
    return {name: v._asdict() if isinstance(v, Spread) else v for name, v in values}


def _machine(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or "cpu")


def _write(path: Path, numbers: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(numbers, indent=1) + "\n")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error
