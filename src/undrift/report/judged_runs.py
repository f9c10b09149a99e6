"""Whose model a page tells of: that of each variant's first seed, read from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from undrift.errors import UndriftError
from undrift.experiment.comparison import Comparison
from undrift.experiment.folder import open_run
from undrift.experiment.pool import run_folder
from undrift.report.judged import Judged, judged_from
from undrift.using.card import card_of
from undrift.using.runs import read_run

if TYPE_CHECKING:
    from undrift.report.results import Reported

MOST_MODELS = 12  # on one page


def judged_of(comparison: Comparison, runs: Sequence[Reported], out: Path) -> tuple[Judged, ...]:
    """Read the evaluations that there are; a damaged one is as none, the report has the rest."""
    places = {
        (r.experiment.label, r.experiment.seed_number): r.folder or run_folder(out, r.experiment)
        for r in runs
    }
    found = []
    for variant in comparison.variants:
        known = ((seed, places.get((variant.label, seed))) for seed in variant.seeds)
        made = (_read(place, variant.label, seed) for seed, place in known if place is not None)
        first = next((one for one in made if one is not None), None)
        if first is not None:
            found.append(first)
    return tuple(found[:MOST_MODELS])


def _read(place: Path, label: str, seed: int) -> Judged | None:
    with suppress(UndriftError):
        told = open_run(place).evaluation()
        return None if told is None else judged_from(f"{label}, seed {seed}", told, _card(place))
    return None


def _card(place: Path) -> str:
    """Write the model card of a run; one whose network is not known has none."""
    with suppress(UndriftError):
        return card_of(read_run(place))
    return ""
