"""Experiments that take milliseconds."""

from __future__ import annotations

from typing import Any

from undrift.experiment.spec import Experiment, load

TABLE: dict[str, Any] = {
    "name": "tiny",
    "rounds": 4,
    "data": {"use": "synthetic", "clients": 6, "sizes": 20, "features": 5, "classes": 3},
    "model": {"use": "mlp", "hidden": 4},
    "algorithm": {"use": "fedavg", "lr": 0.1},
    "work": {"steps": 2, "batch": 5},
    "sampler": {"use": "uniform", "count": 3},
    "engine": {"device": "cpu"},
}


def tiny(*changes: str) -> Experiment:
    """One experiment, with overrides."""
    (made,) = load(TABLE, changes)
    return made
