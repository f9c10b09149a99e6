"""Small runs and packages to predict with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from undrift.experiment.blueprint import Blueprint
from undrift.experiment.run import run
from undrift.experiment.spec import load
from undrift.models import build
from undrift.tabular import Frame, Preparation, Schema, agree
from undrift.using import Package

TABLE: dict[str, Any] = {
    "name": "tiny",
    "rounds": 2,
    "data": {"use": "synthetic", "clients": 4, "sizes": 12, "features": 5, "classes": 3},
    "model": {"use": "mlp", "hidden": 4},
    "algorithm": {"use": "scaffold", "lr": 0.1},
    "work": {"steps": 2, "batch": 5},
    "engine": {"device": "cpu"},
}

COLUMNS: dict[str, list[Any]] = {
    "age": [31, 45, None, 28, 67, 50, 39, 71],
    "blood": ["A", "B", "A", None, "0", "A", "B", "0"],
    "smoker": ["yes", "no", "no", "yes", None, "no", "no", "yes"],
    "visited": ["2024-01-05", "2024-02-11", "2024-03-02", None, "2024-04-20", "2024-05-01",
                "2024-06-30", "2024-07-04"],
    "outcome": ["well", "ill", "well", "well", "ill", "well", "ill", "ill"],
}  # fmt: skip
KINDS: dict[str, Any] = {
    "age": {"kind": "number", "fill": "median", "indicator": True},
    "blood": {"kind": "category"},
    "smoker": {"kind": "flag"},
    "visited": {"kind": "date", "parts": ["time", "month"]},
    "outcome": {"kind": "classes"},
}
TARGETS: dict[str, list[Any]] = {
    "number": [1000.0 + 25.0 * i for i in range(8)],
    "count": [0, 1, 0, 3, 2, 0, 1, 4],
}


def trained(folder: Path, *changes: str) -> Path:
    """Run the tiny experiment in a folder."""
    (made,) = load(TABLE, changes)
    run(made, folder)
    return folder


def prepared(target: str = "classes") -> tuple[Frame, Preparation]:
    """Prepare the columns, with classes, numbers or counts to predict."""
    columns, kinds = dict(COLUMNS), dict(KINDS)
    if target != "classes":
        columns["outcome"], kinds["outcome"] = TARGETS[target], {"kind": target}
    schema = Schema.of(kinds, target="outcome")
    frame = Frame.of(schema, columns)
    return frame, agree(schema, frame, least=1)


def packaged(target: str = "classes", **about: Any) -> Package:
    """Make a package for the columns; its network is untrained."""
    _, preparation = prepared(target)
    goal, inputs = preparation.target, preparation.inputs
    settings: Mapping[str, Any] = {
        "inputs": inputs, "classes": len(goal.class_names) or 1, "blocks": [2, 4, 1, 3],
        "hidden": [6, 5],
    }  # fmt: skip
    gives = {"classes": "probabilities", "number": "values", "count": "rates"}[target]
    scale = (goal.mean, goal.std)
    blueprint = Blueprint(
        "tabular_mlp", dict(settings), (inputs,), False, gives, goal.class_names, scale,
        3, 8, ("north", "south", "west"),
    )  # fmt: skip
    tensors = build("tabular_mlp", 4, **settings).state_dict()
    return Package(blueprint, preparation, tensors, {"name": "clinics", **about}, "here")


def spread(package: Package) -> Package:
    """Move the head's bias, so that the classes differ."""
    with torch.no_grad():
        package.tensors["head.bias"].copy_(torch.linspace(-1, 1, len(package.tensors["head.bias"])))
    return package
