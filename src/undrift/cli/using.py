"""`undrift predict`, `undrift export`: a trained model in use."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from undrift.cli.common import DONE, FOUND, Commands, add_trust, printable, say
from undrift.errors import ConfigError
from undrift.using.export import SUFFIXES, export
from undrift.using.predictions import DELIMITERS, check_new
from undrift.using.predictor import load_model


def add_commands(commands: Commands) -> None:
    """Describe the commands that use a model."""
    predict = commands.add_parser("predict", help="predict for the rows of a new table")
    predict.add_argument("model", metavar="MODEL", help="the folder of a run, or an exported file")
    predict.add_argument("table", metavar="TABLE", help="a .csv, .tsv or .parquet file of new rows")
    predict.add_argument("--out", metavar="FILE", help="a .csv or .tsv file (default: prints)")
    predict.add_argument("--force", action="store_true", help="replace FILE if it is there")
    add_trust(predict)
    predict.set_defaults(action=do_predict)
    exporting = commands.add_parser("export", help="write the model of a run to one file")
    exporting.add_argument("run", metavar="RUN", help="the folder of a run")
    exporting.add_argument(
        "--to", metavar="FILE", help=f"ends in {', '.join(SUFFIXES)} (default: NAME.safetensors)"
    )
    exporting.add_argument("--force", action="store_true", help="replace FILE if it is there")
    add_trust(exporting)
    exporting.set_defaults(action=do_export)


def do_predict(chosen: argparse.Namespace) -> int:
    """Predict for every row of a table, in order."""
    if chosen.out is not None:
        check_new(Path(chosen.out), tuple(DELIMITERS), force=chosen.force)
    model = load_model(chosen.model, trust=chosen.trust)
    _tell(model.package.note)
    if model.package.preparation is None:
        raise ConfigError(
            f"{chosen.model} was not trained on a table: call it from Python with a tensor, "
            "undrift.load_model(...)(x)"
        )
    found = model(chosen.table)
    if chosen.out is not None:
        found.write(chosen.out, force=chosen.force)
    elif sys.stdout.isatty():
        say(found.text(), end="")
    else:
        sys.stdout.write(found.text())
    _tell(found.summary() + (f" -> {chosen.out}" if chosen.out else ""))
    return FOUND if found.errors else DONE


def do_export(chosen: argparse.Namespace) -> int:
    """Write a model to one file."""
    place, package = export(chosen.run, chosen.to, trust=chosen.trust, force=chosen.force)
    _tell(package.note)
    about = package.about
    say(f"{place}: {about['name']}, {about['label']}, after round {about['rounds']}")
    return DONE


def _tell(text: str) -> None:
    if text:
        print(f"undrift: {printable(text)}", file=sys.stderr)
