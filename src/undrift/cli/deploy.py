"""`undrift deploy init | try | run | check | keys`: from a simulation to machines."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote

from undrift.cli.common import Commands, add_experiment, add_trust, finite, load_experiments
from undrift.deploy.check import check
from undrift.deploy.folder import DOOR, PORT, Wanted, init, renew_keys
from undrift.deploy.local import Local
from undrift.deploy.operate import operate
from undrift.errors import ConfigError
from undrift.experiment.folder import RunFolder, whole_history
from undrift.experiment.history import main_metric
from undrift.federated.running import REFUSED


def add_commands(commands: Commands) -> None:
    """Describe the commands of a federation of machines."""
    deploy = commands.add_parser("deploy", help="run an experiment over silos, with Flower")
    kinds = deploy.add_subparsers(dest="deployment", required=True, metavar="WHAT")
    made = kinds.add_parser("init", help="write the folder of a federation")
    made.add_argument("folder", metavar="FOLDER", help="a new folder")
    add_experiment(made)
    made.add_argument("--clients", type=int, help="silos (default: the experiment's clients)")
    made.add_argument("--host", default="127.0.0.1", help="under which silos reach the server")
    told = f"of the server ({DOOR} by default, {PORT} on this machine)"
    made.add_argument("--port", type=int, help=told)
    made.add_argument("--insecure", action="store_true", help="no TLS, no keys: a try-out only")
    made.set_defaults(action=do_init)
    for name, action, told in (
        ("try", do_try, "start a federation on this machine and run its experiment"),
        ("run", do_run, "run the experiment over the nodes of a running federation"),
        ("check", do_check, "look whether a running federation is all right"),
        ("keys", do_keys, "take the public keys in silos/ into the federation"),
    ):
        one = kinds.add_parser(name, help=told)
        one.add_argument("folder", metavar="FOLDER", help="written by `undrift deploy init`")
        one.set_defaults(action=action)
        if name == "try":
            one.add_argument("--seconds", type=finite, default=3600.0, help="at most (3600)")
        if name == "run":
            one.add_argument("--out", metavar="FOLDER", help="default: operator/run")
        if name == "check":
            one.add_argument("--port", type=int, default=PORT, help="of the SuperLink")
            add_trust(one)


def do_init(chosen: argparse.Namespace) -> int:
    """Write the folder."""
    experiments = load_experiments(chosen)
    if len(experiments) != 1:
        raise ConfigError(f"a federation runs one experiment, not {len(experiments)}: no sweeps")
    wanted = Wanted(chosen.clients, chosen.host, chosen.port, chosen.insecure)
    place = init(Path(chosen.folder), experiments[0], wanted)
    print(f"{place}: read README.md there, or try it: undrift deploy try {quote(chosen.folder)}")
    if chosen.insecure:
        print("INSECURE: no TLS and no keys. For one machine and a try-out only.")
    return 0


def do_try(chosen: argparse.Namespace) -> int:
    """Start server and nodes on the loopback interface, run, and end them again."""
    place = _project(chosen.folder)
    if chosen.seconds <= 0:
        raise ConfigError(f"--seconds {chosen.seconds:g} leaves no time: give more than 0")
    with Local(place) as local:
        print(f"starting a server and {local.clients} nodes; logs are in {local.work}", flush=True)
        local.up()
        print("running", flush=True)
        out = local.run(chosen.seconds, tell=lambda line: print(line, flush=True))
    _show(out)
    _show_models(place)
    return 0


def do_run(chosen: argparse.Namespace) -> int:
    """Run to the end, or go on; an error unless every round was trained."""
    place = _project(chosen.folder)
    out = Path(chosen.out).absolute() if chosen.out else place / "operator" / "run"
    operate(place, out)
    _show(out)
    return 0


def _show(out: Path) -> None:
    """Print what a run has reached, and how many reports are not in it."""
    history = whole_history(RunFolder(out))
    metric = main_metric(history)
    missing = sum(len(record["skipped"]) for record in history)
    asked = sum(len(record["clients"]) for record in history)
    note = f"; {missing} of {asked} reports are missing, {out / REFUSED} says why"
    numbers = f"{metric} {history.last(metric):.4g}"
    print(f"{out}: {len(history)} rounds, {numbers}{note if missing else ''}")


def _show_models(place: Path) -> None:
    """Tell where silos have the model with which they predict on their own rows."""
    found = sorted(
        place.glob("silos/*/state/*/model.safetensors"), key=lambda path: path.stat().st_mtime
    )
    if found:
        print(f"every silo has the model now: undrift predict {quote(str(found[-1]))} ROWS.csv")


def do_check(chosen: argparse.Namespace) -> int:
    """Print one line for everything that was looked at; exit code 1 if something is wrong."""
    wrong = 0
    for finding in check(_project(chosen.folder), chosen.port, trust=chosen.trust):
        print(finding, flush=True)
        wrong += not finding.good
    return 1 if wrong else 0


def do_keys(chosen: argparse.Namespace) -> int:
    """Write the silos' public keys into the federation."""
    count = renew_keys(_project(chosen.folder))
    print(f"{count} keys are in federation.toml; sh operator/register.sh lets them in")
    return 0


def _project(folder: str) -> Path:
    place = Path(folder)
    if not (place / "app" / "silos" / "federation.toml").is_file():
        raise ConfigError(f"{place} is no federation: `undrift deploy init {quote(folder)} digits`")
    return place.resolve()
