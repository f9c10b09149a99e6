"""What it takes to build a run's model again without its data.

A run writes it when it begins: `model.json`, and for a table `preparation.json` beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undrift import models, own
from undrift.core.task import Task
from undrift.errors import ChangedExperiment, ConfigError, DataError
from undrift.experiment.folder import RunFolder
from undrift.experiment.names import find, make
from undrift.experiment.spec import Experiment
from undrift.experiment.world import model_choice
from undrift.guarded.text import parse_json
from undrift.sources import Examples
from undrift.state.plain import Change, differences

MODEL, PREPARATION = "model.json", "preparation.json"
GIVES = ("probabilities", "values", "rates", "scores")


@dataclass(frozen=True)
class Blueprint:
    """A network by its name and settings, what goes in, and what its outputs mean.

    `gives`: softmax makes probabilities of outputs, exp makes rates, `scale` (mean, deviation)
    brings values back to their own units; scores stay as they are.
    """

    use: str  # a name of MODELS, or package.module:function
    settings: dict[str, Any]
    shape: tuple[int, ...]  # of one example
    whole: bool  # whether inputs are whole numbers, as the words of a text are
    gives: str
    class_names: tuple[str, ...] = ()
    scale: tuple[float, float] = (0.0, 1.0)
    clients: int = 0  # the training data: sites,
    examples: int = 0  # rows in all
    client_names: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        made: dict[str, Any] = parse_json(json.dumps(asdict(self), default=str))
        return made

    @classmethod
    def from_json(cls, told: Any, place: str) -> Blueprint:
        """Read what `to_json` gave; refuse everything else."""
        try:
            made = cls(**{n: _frozen(v) for n, v in told.items()})
        except (TypeError, AttributeError) as error:
            raise DataError(
                f"{place} does not describe a model ({error}): write it again"
            ) from None
        wrong = [one.name for one in fields(cls) if not _fits(one.name, getattr(made, one.name))]
        if wrong:
            value = getattr(made, wrong[0])
            raise DataError(f"{place}: {wrong[0]} = {value!r} makes no sense: restore it")
        return made

    @property
    def is_foreign(self) -> bool:
        """Whether the network is code that is not part of undrift."""
        return ":" in self.use

    def module(self, *, trust: bool = False, home: Path | None = None) -> nn.Module:
        """Build the network; its weights are to be loaded."""
        if self.is_foreign and not trust:
            raise ConfigError(own.not_trusted([self.use]))
        with own.scope(home, trust), torch.random.fork_rng(devices=[]):
            if not self.is_foreign:
                return models.build(self.use, 0, **self.settings)
            function = find({}, self.use, "model", "model.use")
            made: nn.Module = make(function, self.settings, f"model {self.use!r}")
        return made

    def meaning(self, outputs: Tensor) -> Tensor:
        """Turn outputs [n, ...] into probabilities, rates or values in their own units."""
        if self.gives == "probabilities":
            return outputs.softmax(1)
        if self.gives == "rates":
            return outputs.exp()
        mean, std = self.scale if self.gives == "values" else (0.0, 1.0)
        return outputs if (mean, std) == (0.0, 1.0) else outputs * std + mean


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _fits(name: str, value: Any) -> bool:
    """Whether a field of a file has a value that it may have."""
    if name in ("clients", "examples"):
        return _is_count(value)
    if name == "shape":
        return isinstance(value, tuple) and all(map(_is_count, value))
    if name in ("class_names", "client_names"):
        return isinstance(value, tuple) and all(isinstance(one, str) for one in value)
    if name == "scale":
        return isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))
    kinds = {"use": str, "settings": dict, "whole": bool, "gives": str}
    return isinstance(value, kinds[name]) and (name != "gives" or value in GIVES)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def blueprint_of(
    experiment: Experiment, examples: Examples, task: Task, clients: int, rows: int
) -> Blueprint:
    """Describe the model of an experiment on such examples, of which there are so many rows."""
    _, name, given = model_choice(experiment, examples)
    # word vectors are weights: they are kept with the others
    settings = {n: v for n, v in given.items() if n != "embedding"}
    info, x = examples.info, examples.train_x
    gives = _gives(experiment, examples, task)
    names = info.class_names or tuple(map(str, range(examples.classes)))
    return Blueprint(
        name,
        settings,
        tuple(x.shape[1:]),
        not x.is_floating_point(),
        gives,
        tuple(map(str, names)) if gives == "probabilities" else (),
        (float(info.target_scale[0]), float(info.target_scale[1])),
        clients,
        rows,
        tuple(map(str, info.client_names)),
    )


def _gives(experiment: Experiment, examples: Examples, task: Task) -> str:
    if experiment.task.target == "input":
        return "scores"
    if examples.classes:
        return "probabilities"
    return "rates" if task.loss_name == "poisson" else "values"


# ------------------------------------------------------------------------------- in the folder
def files_of(
    experiment: Experiment, examples: Examples, task: Task, clients: int, rows: int
) -> dict[str, dict[str, Any]]:
    """Give what a run keeps beside its experiment, by the names of its files."""
    found = {MODEL: blueprint_of(experiment, examples, task, clients, rows).to_json()}
    if examples.info.preparation is not None:
        found[PREPARATION] = examples.info.preparation.to_json()
    return found


def check_preparation(folder: RunFolder, kept: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to go on where rows become numbers in another way than when the run began."""
    given = kept.get(PREPARATION)
    before = None if given is None or folder.table() is None else folder.read_json(PREPARATION)
    if before is None:
        return
    changes = differences(before, parse_json(json.dumps(given)))
    if changes:
        key, was, now = _named(before, changes[0])
        more = f" (and {len(changes) - 1} more differences)" if len(changes) > 1 else ""
        raise ChangedExperiment(
            f"{folder.path} was begun with other data or [columns] than there are now, so it "
            f"cannot go on: {key} was {was[:80]}, is {now[:80]} now{more}. Restore them, or choose "
            "another folder with --out"
        )


def _named(before: Mapping[str, Any], change: Change) -> Change:
    """Name the column instead of its number."""
    found = re.match(r"parts\.(\d+)\.(.+)", change.key)
    try:
        column = before["parts"][int(found[1])]["name"] if found else ""
    except (LookupError, TypeError):
        column = ""
    return change._replace(key=f"column {column!r}, {found[2]},") if found and column else change


def read_blueprint(folder: RunFolder) -> Blueprint | None:
    """Read what a run has kept; None for a run of a version that kept nothing."""
    told = folder.read_json(MODEL)
    return None if told is None else Blueprint.from_json(told, str(folder.path / MODEL))
