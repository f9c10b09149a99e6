"""The model of a run, read from its folder: no data are needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from undrift.core.task import Buffers, Task
from undrift.errors import ConfigError, DataError
from undrift.experiment.blueprint import PREPARATION, Blueprint, blueprint_of, read_blueprint
from undrift.experiment.folder import RunFolder, open_run
from undrift.experiment.spec import Experiment
from undrift.experiment.tables import Table, write_table
from undrift.experiment.world import build
from undrift.guarded.limits import Unreadable
from undrift.guarded.tensors import read_tensors
from undrift.state.checkpoint import CheckpointFolder
from undrift.tabular import Preparation
from undrift.using.package import Package

WEIGHTS = "model.safetensors"
UNSAID = ("address", "private_key")  # of the engine: nobody else's business
OVERALL = ("examples", "kind", "metrics", "classes", "confusion", "calibration")


def read_run(path: Path | str, *, trust: bool = False) -> Package:
    """Read the newest model of a run."""
    folder = open_run(path)
    table = folder.table() or {}
    if "trainer" in table:
        raise ConfigError(
            f"{path} was run from Python with objects of your own: load its model.safetensors into "
            "your module"
        )
    blueprint, preparation = _kept(folder, table) or _from_data(folder, table, trust)
    tensors, done = _newest(folder, blueprint, trust)
    planned, note = table["rounds"], ""
    if folder.summary() is None:
        note = f"{path} is not complete: this is its model after round {done} of {planned}"
    return Package(
        blueprint, preparation, tensors, _about(folder, table, done), str(path), folder.home(), note
    )


def _kept(folder: RunFolder, table: Table) -> tuple[Blueprint, Preparation | None] | None:
    """Read what the run has kept of its model; None if something is missing."""
    blueprint, told = read_blueprint(folder), folder.read_json(PREPARATION)
    data = table.get("data")
    tabular = isinstance(data, Mapping) and data.get("use") == "table"
    if blueprint is None or (told is None and tabular):
        return None
    return blueprint, None if told is None else Preparation.from_json(told)


def _from_data(
    folder: RunFolder, table: Table, trust: bool
) -> tuple[Blueprint, Preparation | None]:
    """Ask the data, where files were lost or a version did not write them."""
    experiment = Experiment.from_table(table, trust=trust, home=folder.home())
    world = build(experiment, folder.rows)
    world.trainer.load(folder.checkpoint)  # refuses other data than it was trained on
    examples, parts, task = world.dealt.examples, world.dealt.parts, world.trainer.task
    blueprint = blueprint_of(experiment, examples, task, len(parts), sum(map(len, parts)))
    return blueprint, examples.info.preparation


def _newest(
    folder: RunFolder, blueprint: Blueprint, trust: bool
) -> tuple[Mapping[str, Tensor], int]:
    """Read the weights of a complete run, or those of the newest checkpoint."""
    summary, path = folder.summary(), folder.path / WEIGHTS
    if summary is not None and path.is_file():
        return _weights(path), int(summary.get("rounds", 0))
    found = CheckpointFolder(folder.checkpoint).load()
    if found is None:
        raise ConfigError(f"{folder.path} has no checkpoint yet: `undrift run` it first")
    module = blueprint.module(trust=trust, home=folder.home())
    task = Task(module, dtype=found.tensors["server.w"].dtype)
    buffers = Buffers(*(found.tensors[f"server.buffers.{n}"] for n in ("floats", "counters")))
    if len(found.tensors["server.w"]) != task.size:
        raise DataError(
            f"{folder.path}: its checkpoint has {len(found.tensors['server.w'])} weights, its "
            f"network {task.size}: restore the folder"
        )
    return task.module_with(found.tensors["server.w"], buffers).state_dict(), found.round


def _weights(path: Path) -> Mapping[str, Tensor]:
    try:
        return read_tensors(path)[1]
    except Unreadable as error:
        raise DataError(f"{path}: {error}. Restore it, or run the experiment again") from error


# --------------------------------------------------------------------------------------- origin
def _about(folder: RunFolder, table: Table, done: int) -> dict[str, Any]:
    """Tell where a model comes from and how good it is; nothing of a single site but its name."""
    starts = [one for one in folder.starts() if isinstance(one, dict)] or [{}]
    algorithm = table.get("algorithm", {})
    return {
        "name": table.get("name"),
        "label": table.get("label"),
        "rounds": done,
        "planned": table.get("rounds"),
        "complete": folder.summary() is not None,
        "seed": table.get("seed"),
        "algorithm": write_table({"algorithm": algorithm}),
        "experiment": write_table(_shareable(table)),
        "started": starts[0].get("at"),
        "continued": starts[-1].get("at"),
        **{name: starts[-1].get(name) for name in ("undrift", "torch", "python", "device")},
        "summary": folder.summary(),
        "evaluation": _evaluation(folder),
    }


def _shareable(table: Table) -> Table:
    """Cut paths to the names of files, and leave out addresses and keys."""
    data, engine = table.get("data"), table.get("engine")
    made = dict(table)
    if isinstance(data, Mapping):
        paths = {n: _file_names(v) for n, v in data.items() if n in ("path", "test_path")}
        made["data"] = {**data, **paths}
    if isinstance(engine, Mapping):
        made["engine"] = {n: v for n, v in engine.items() if n not in UNSAID}
    return made


def _file_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_file_names(one) for one in value]
    return Path(value).name if isinstance(value, str) else value


def _evaluation(folder: RunFolder) -> dict[str, Any] | None:
    """Keep what is said of all sites together, and the worst one's metrics.

    A curve's thresholds are scores of single rows, and a small site's row is about few people.
    """
    found = folder.read_json("evaluation.json")
    if found is None or not isinstance(found.get("metrics"), Mapping):
        return None
    kept = {name: found[name] for name in OVERALL if name in found}
    rows = found.get("sites")
    if isinstance(rows, list) and rows and isinstance(rows[0], Mapping):
        told = ("site", *found["metrics"])
        kept["worst_site"] = {n: rows[0][n] for n in told if n in rows[0]}  # the worst comes first
        kept["judged_sites"] = len(rows)
    return kept
