"""Trackers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from undrift.errors import ConfigError, unknown_name
from undrift.experiment.events import Listener
from undrift.models.settings import check_settings
from undrift.trackers.guarded import Guarded
from undrift.trackers.mlflow import Mlflow
from undrift.trackers.tensorboard import TensorBoard
from undrift.trackers.wandb import Wandb

TRACKERS: Mapping[str, Callable[..., Listener]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
}


def open_trackers(
    names: Sequence[str], folder: Path | str, **settings: Mapping[str, Any]
) -> list[Listener]:
    """Make the trackers of these names, which write below `folder` once a run starts.

    `settings` holds a table per tracker: `open_trackers(["wandb"], out, wandb={"project": "a"})`.
    """
    for name in (*names, *settings):
        if name not in TRACKERS:
            raise unknown_name("tracker", name, list(TRACKERS), "track")
    return [_open(name, Path(folder), settings.get(name, {})) for name in dict.fromkeys(names)]


def _open(name: str, folder: Path, settings: Mapping[str, Any]) -> Listener:
    if "folder" in settings:
        raise ConfigError(f"track.{name}: the folder is the same for all trackers, set it once")
    check_settings(TRACKERS[name], {"folder": folder, **settings}, f"track.{name}")
    return Guarded(TRACKERS[name](folder=folder, **settings), name)
