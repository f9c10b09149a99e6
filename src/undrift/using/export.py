"""Write a model to one file: safetensors, ONNX, or its card alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from undrift.experiment.environment import commit
from undrift.state import disk
from undrift.using import exported, onnx_file
from undrift.using.card import card_of
from undrift.using.package import Package
from undrift.using.predictions import check_new
from undrift.using.runs import read_run
from undrift.version import __version__

CARD = ".md"
SUFFIXES = (exported.SUFFIX, onnx_file.SUFFIX, CARD)


def export(
    run: Path | str, to: Path | str | None = None, *, trust: bool = False, force: bool = False
) -> tuple[Path, Package]:
    """Write the newest model of a run to a file, whose name's end says which kind."""
    if to is not None:
        check_new(Path(to), SUFFIXES, force=force)  # before anything is read
    package = _dated(read_run(run, trust=trust))
    place = Path(f"{package.about['name']}{exported.SUFFIX}") if to is None else Path(to)
    check_new(place, SUFFIXES, force=force)
    card, suffix = card_of(package), place.suffix.lower()
    if suffix == CARD:
        data = card.encode()
    elif suffix == onnx_file.SUFFIX:
        data = onnx_file.encode(package, card, trust)
    else:
        package.module(trust)  # what could not be used is not written
        data = exported.encode(package, card)
    disk.write_atomically(place, [data])
    return place, package


def _dated(package: Package) -> Package:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    told = {"exported": now, "exported_by": __version__, "commit": commit()}
    return replace(package, about={**package.about, **told})
