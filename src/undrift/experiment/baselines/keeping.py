"""baselines.json of a comparison's folder: what is there is not computed again.

Each baseline of each seed has a key, a digest of everything that decides it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from undrift.describe import describe, describe_own
from undrift.errors import UndriftError
from undrift.experiment.baselines import boosting, fitted
from undrift.experiment.baselines.rows import (
    ALONE,
    ALWAYS,
    BOOSTING,
    KINDS,
    POOLED,
    Baselines,
    Row,
    over_seeds,
)
from undrift.experiment.baselines.scene import Answer, Scene, scene_of, values_of
from undrift.experiment.spec import Experiment
from undrift.guarded.text import read_json
from undrift.state import disk

log = logging.getLogger("undrift")
FILE, VERSION = "baselines.json", 1
MOST_ROWS = 200_000  # of a table whose models are trained unasked
MOST_SITES = 50  # that are dealt, and trained alone when asked for
Tell = Callable[[str], None]


def baselines_of(
    experiments: Sequence[Experiment], out: Path, tell: Tell = log.info, *, compute: bool = True
) -> Baselines:
    """Find the baselines of a comparison in its folder, and compute what is missing there.

    They belong to the first variant: its data, model, work and local optimizer.  With
    `compute=False`, where an experiment is not as it ran, the folder's word is taken.
    """
    shelf = Shelf(out / FILE)
    by_seed: dict[int, list[Experiment]] = {}
    for experiment in experiments:
        by_seed.setdefault(experiment.seed_number, []).append(experiment)
    rows: list[Row] = []
    notes: dict[str, None] = {}
    for seed, variants in by_seed.items():
        if variants[0].evaluate.baselines is False:
            continue
        found = _of_seed(variants, shelf, tell) if compute else None
        rows += shelf.of_seed(seed) if found is None else found.rows
        notes |= dict.fromkeys(() if found is None else found.notes)
    notes |= dict.fromkeys(row.note for row in rows if row.note)
    return Baselines(over_seeds(rows), tuple(notes))


class Found(NamedTuple):
    """The baselines of one seed."""

    rows: list[Row]
    notes: list[str]


def _of_seed(variants: Sequence[Experiment], shelf: Shelf, tell: Tell) -> Found | None:
    """Find or compute the baselines of one seed; None where the data have gone."""
    try:
        scene = scene_of(variants[0])
    except UndriftError as error:
        log.info("baselines are not checked against the data: %s", error)
        return None
    if scene is None:
        return Found([], [])
    wanted, notes = wanted_of(scene)
    found = Found([], notes)
    for kind in KINDS:
        key, seed = key_of(scene, kind), scene.experiment.seed_number
        row = shelf.find(kind, seed, {key}) or _of_others(variants[1:], shelf, kind, seed)
        if row is None and kind in wanted:
            row = _computed(scene, kind, key, tell, notes)
            if row is not None:
                shelf.put(row)
        if row is not None:
            found.rows.append(row)
    return found


def _of_others(variants: Sequence[Experiment], shelf: Shelf, kind: str, seed: int) -> Row | None:
    """Find the baseline of another variant: a report may tell of them in another order."""
    if not any(row.kind == kind for row in shelf.of_seed(seed)):
        return None
    with suppress(UndriftError):
        scenes = filter(None, map(scene_of, variants))
        return shelf.find(kind, seed, {key_of(scene, kind) for scene in scenes})
    return None


def _computed(scene: Scene, kind: str, key: str, tell: Tell, notes: list[str]) -> Row | None:
    """Compute a baseline; one that fails leaves a note and stops nothing."""
    seed = scene.experiment.seed_number
    if kind != ALWAYS:
        tell(f"baseline: {LABELS[kind]}, seed {seed}")
    try:
        label, answers = _answers(scene, kind)
        values, note = values_of(scene, answers), _judged_note(scene, kind, answers)
    except UndriftError as error:
        notes.append(f"{LABELS[kind].capitalize()}: none, {str(error).splitlines()[0]}")
        return None
    return Row(kind, label, seed, key, values, note) if values else None


LABELS = {
    ALWAYS: "always the same",
    ALONE: "each site alone",
    POOLED: "all data pooled",
    BOOSTING: boosting.LABEL,
}


def _answers(scene: Scene, kind: str) -> tuple[str, dict[str, Answer]]:
    if kind == ALWAYS:
        return fitted.constant(scene)
    made = {ALONE: fitted.alone, POOLED: fitted.pooled, BOOSTING: boosting.boosted}[kind]
    return LABELS[kind], made(scene)


def _judged_note(scene: Scene, kind: str, answers: dict[str, Answer]) -> str:
    """Say where rows of no training site have no model."""
    for name, (_, rows) in answers.items():
        if kind == ALONE and rows is not None and len(rows) < len(scene.papers[name].y):
            total = len(scene.papers[name].y)
            return (
                f"Each site alone is judged on {len(rows)} of {total} {name} rows: the others "
                "belong to no site that trains."
            )
    return ""


def wanted_of(scene: Scene) -> tuple[set[str], list[str]]:
    """Choose the baselines to compute, and say why others are left out."""
    asked, found = scene.experiment.evaluate.baselines is True, {ALWAYS}
    if not (asked or scene.is_table):
        return found, []
    rows = len(scene.rows)
    if not asked and rows > MOST_ROWS:
        return found, [
            f"Models of single sites and of pooled data are left out beyond {MOST_ROWS:,} training "
            f"rows ({rows:,} here): evaluate.baselines = true trains them."
        ]
    found.add(POOLED)
    owned = any(scene.owner(name) is not None for name in scene.papers)
    if owned and (scene.is_natural or (asked and len(scene.dealt.parts) <= MOST_SITES)):
        found.add(ALONE)
    if scene.is_table and boosting.is_installed():
        found.add(BOOSTING)
    return found, [] if boosting.is_installed() or not scene.is_table else [boosting.MISSING]


# ------------------------------------------------------------------------------------------ keys
def key_of(scene: Scene, kind: str) -> str:
    """Digest everything that decides a baseline."""
    experiment, examples = scene.experiment, scene.dealt.examples
    table = experiment.to_table()
    tensors = [scene.y, scene.rows, *(p.y for p in scene.papers.values())]
    owners = [o for name in scene.papers if (o := scene.owner(name)) is not None]
    told: dict[str, Any] = {
        "version": VERSION,
        "kind": kind,
        "task": table.get("task"),
        "metrics": list(experiment.evaluate.metrics),
        "clients": experiment.evaluate.clients,
        "classes": [list(scene.meaning.names), *examples.info.target_scale],
    }
    if kind != ALWAYS:
        tensors += [examples.train_x, *(p.x for p in scene.papers.values())]
        told["seed"] = list(experiment.seeds)
    if kind in (ALONE, POOLED):
        told |= {n: table.get(n) for n in ("model", "work", "rounds")}
        told["local"] = describe(experiment.algorithm.local)
        told["code"] = describe_own({n: table.get(n) for n in ("model", "task")}, experiment.home)
        told["parts"] = [len(part) for part in scene.dealt.parts]
    told["data"] = describe([*tensors, *owners])
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]


# ------------------------------------------------------------------------------------------ file
class Shelf:
    """Reads and writes baselines.json; each baseline is safe as soon as it is computed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = _read(path)

    def of_seed(self, seed: int) -> list[Row]:
        """Give what is there of one seed."""
        return [row for row in self.rows if row.seed == seed]

    def find(self, kind: str, seed: int, keys: set[str]) -> Row | None:
        """Find a baseline that nothing has changed since."""
        rows = (r for r in self.of_seed(seed) if r.kind == kind and r.key in keys)
        return next(rows, None)

    def put(self, row: Row) -> None:
        """Keep a baseline in the place of the one before."""
        self.rows = [r for r in self.rows if (r.kind, r.seed) != (row.kind, row.seed)]
        self.rows.append(row)
        told = {"version": VERSION, "rows": [r._asdict() for r in self.rows]}
        disk.make_directory(self.path.parent)
        disk.write_atomically(self.path, [(json.dumps(told, indent=1) + "\n").encode()])


def _read(path: Path) -> list[Row]:
    """Read what is there; a damaged file is as none, for it can be computed again."""
    try:
        found = read_json(path)
        rows = [Row(**row) for row in found["rows"]] if found["version"] == VERSION else []
    except (OSError, ValueError, KeyError, TypeError, UndriftError):
        return []
    return [row for row in rows if _is_sound(row)]


def _is_sound(row: Row) -> bool:
    texts = all(isinstance(v, str) for v in (row.kind, row.label, row.key, row.note))
    if not texts or row.kind not in KINDS or not isinstance(row.seed, int):
        return False
    if not isinstance(row.values, dict):
        return False
    numbers = [v for v in row.values.values() if v is not None]
    return all(type(v) in (int, float) and math.isfinite(v) for v in numbers)
