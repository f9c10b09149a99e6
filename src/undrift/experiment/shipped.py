"""Experiment files that come with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from undrift.errors import ConfigError, unknown_name


def shipped_experiments() -> dict[str, Path]:
    """List the experiments in the package by name."""
    folder = Path(str(files("undrift") / "experiments"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_experiment(name: str | Path) -> Path:
    """Find an experiment file: a path, or the name of a shipped one."""
    path, known = Path(name), shipped_experiments()
    if path.suffix == ".toml" or path.is_file():
        if path.is_dir():
            raise ConfigError(f"{path} is a folder, not an experiment file")
        return path
    if str(name) in known:
        return known[str(name)]
    if path.is_dir() and (path / "experiment.toml").is_file():
        return path / "experiment.toml"
    raise unknown_name("experiment file or shipped experiment", str(name), list(known))
