"""The record of one cell: our numbers, the paper's, and how ours were made."""

from __future__ import annotations

import fnmatch
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undrift.experiment.environment import commit
from undrift.experiment.family import Setting
from undrift.experiment.folder import RunFolder
from undrift.experiment.history import History
from undrift.experiment.pool import Task
from undrift.experiment.spec import Experiment
from undrift.guarded.text import read_json
from undrift.papers.plan import Options
from undrift.papers.records import UNFINISHED
from undrift.papers.scores import compared, curve, printed, score
from undrift.papers.stand_in import FORM
from undrift.sources import Info
from undrift.state.disk import make_directory, write_atomically

Entry = dict[str, Any]
UNCHECKED = ("femnist", "shakespeare")  # no checksum is known: LEAF's scripts draw their own files


class About:
    """What a setting's runs do not know of themselves: FOLDER/about.json."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "about.json"

    def read(self) -> dict[str, Any]:
        """Read what is known; what is damaged is not."""
        try:
            found = read_json(self.path)
        except (OSError, ValueError, RecursionError):
            found = {}
        known = found.items() if isinstance(found, dict) else ()
        return {name: value for name, value in known if _sound(name, value)}

    def _write(self, values: Mapping[str, Any]) -> None:
        make_directory(self.path.parent)
        write_atomically(self.path, [(json.dumps(values, indent=1) + "\n").encode()])

    def note_start(self, info: Info, verified: bool, begun: Mapping[str, bool]) -> None:
        """Write down which data are used, and with which commit these methods go on.

        `begun` tells of each method whether it has rounds already.  Files that were not verified
        may be anything: they do not count as the real ones.  Where no checksum is known, `real` is
        None.
        """
        known_form = info.form in (FORM, "generated") or info.source not in UNCHECKED
        doubt = "not verified" if not verified else "" if known_form else "no checksum known"
        data = {
            "name": info.source,
            "form": f"{info.form}, {doubt}" if doubt else info.form,
            "real": (verified and info.form not in (FORM, "generated")) if known_form else None,
        }
        known, now = self.read(), commit()
        commits = dict(known.get("commits", {}))
        for label, has_rounds in begun.items():
            before = commits.get(label, [known.get("commit")] if has_rounds else [])
            commits[label] = [*(one for one in before if one != now), now]
        self._write({**known, "data": data, "commits": commits})

    def commits(self, label: str) -> list[str | None]:
        """List the commits that made a method's rounds, the last one last."""
        known = self.read()
        found: list[str | None] = known.get("commits", {}).get(label, [known.get("commit")])
        return found

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Add to the time that each method has taken."""
        known = self.read()
        old = known.get("seconds", {})
        known["seconds"] = {**old, **{n: old.get(n, 0.0) + s for n, s in seconds.items()}}
        self._write(known)

    def take_unwritten(self) -> float:
        """Give the time that no session tells of yet."""
        known = self.read()
        total = sum(known.get("seconds", {}).values())
        fresh: float = total - known.get("written", 0.0)
        if fresh > 0:
            self._write({**known, "written": total})
        return fresh


def _sound(name: str, value: Any) -> bool:
    parts = {"seconds": int | float, "commits": list}  # of dictionaries, by method
    if name in parts:
        return isinstance(value, dict) and all(isinstance(v, parts[name]) for v in value.values())
    kinds = {"data": dict, "written": int | float}
    return isinstance(value, kinds.get(name, object))


def cell_entries(
    setting: Setting, options: Options, found: Sequence[tuple[Task, History]], about: About
) -> list[Entry]:
    """Make a record of every method that has something to tell."""
    by_label: dict[str, list[tuple[Task, History]]] = {}
    for task, history in found:
        by_label.setdefault(task.experiment.label, []).append((task, history))
    made = [_entry(setting, options, label, runs, about) for label, runs in by_label.items()]
    return [one for one in made if one is not None]


def _entry(
    setting: Setting,
    options: Options,
    label: str,
    runs: Sequence[tuple[Task, History]],
    about: About,
) -> Entry | None:
    experiment = runs[0][0].experiment
    rounds = min(len(history) for _, history in runs)
    histories = [History(tuple(history)[:rounds]) for _, history in runs]
    metric = setting.paper.get("metric", "test_accuracy")
    if not rounds or not all(any(metric in r for r in h) for h in histories):
        return None
    paper = printed(setting.paper, setting.cells[label])
    kind = options.kind(setting) if rounds == experiment.rounds else UNFINISHED
    first, *others = experiment.evaluate.models
    ours = score(setting.paper, histories, metric)
    counts = kind in ("full", "altered")
    known, commits = about.read(), about.commits(label)
    made = {
        "setting": setting.name,
        "title": setting.title,
        "method": label,
        "name": setting.paper["methods"][label],
        "kind": kind,
        "ours": ours,
        "paper": paper,
        **(compared(ours, paper) if counts else {"difference": None, "differs": None}),
        "rounds": rounds,
        "seeds": [_seed(task.experiment) for task, _ in runs],
        "data": known.get("data"),
        "inference": first,
        "others": {n: score(setting.paper, histories, f"{n}_{metric}") for n in others},
        "curve": curve(histories, metric),
        **_more_curves(setting, histories),
        "seconds": round(known.get("seconds", {}).get(label, 0.0), 1),
        "commit": commits[-1],
        **({"commits": commits} if len(commits) > 1 else {}),
        **_policy(experiment),
        **_made_with(runs[0][0].folder, experiment),
    }
    return {**made, "changes": list(options.changes)} if options.changes else made


def _more_curves(setting: Setting, histories: Sequence[History]) -> Entry:
    """Keep what else the paper draws; `norm_*` are all norms that a method has."""
    wanted = setting.paper.get("also", [])
    names = [n for n in histories[0].metrics if any(fnmatch.fnmatch(n, w) for w in wanted)]
    return {"curves": {n: curve(histories, n) for n in names}} if names else {}


def _policy(experiment: Experiment) -> Entry:
    """Tell which policy steered: its name may come to mean another one."""
    policies = [getattr(rule, "policy", None) for rule in experiment.algorithm.rules]
    found = next((one for one in policies if one is not None), None)
    if found is None:
        return {}
    return {"policy": {"source": Path(found.source).name, "digest": found.digest}}


def _seed(experiment: Experiment) -> dict[str, int]:
    return experiment.seeds._asdict()


def _made_with(folder: Path, experiment: Experiment) -> Entry:
    """Tell versions, device and precision, as the run's own folder does."""
    starts = _starts(folder)
    last = starts[-1] if starts else {}
    gpu = last.get("gpu")
    precision = experiment.engine.precision or ("tf32" if gpu else experiment.task.dtype)
    return {
        "versions": {n: last.get(n) for n in ("undrift", "torch")},
        "device": gpu or platform.processor() or platform.machine() or "cpu",
        "precision": precision,
    }


def _starts(folder: Path) -> list[dict[str, Any]]:
    path = RunFolder(folder).path / "environment.json"
    try:
        found = read_json(path)["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return found if isinstance(found, list) else []
