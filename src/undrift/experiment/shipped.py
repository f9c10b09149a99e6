"""Experiment files that come with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from undrift.errors import ConfigError, unknown_name
from undrift.experiment.family import paper_settings


def shipped_experiments() -> dict[str, Path]:
    """List the experiments in the package by name."""
    folder = Path(str(files("undrift") / "experiments"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_experiment(name: str | Path) -> Path:
    """Find an experiment file: a path, or the name of a shipped one."""
    if not isinstance(name, str | Path) or "\0" in str(name) or len(str(name)) > 4000:
        raise ConfigError(f"{str(name)[:60]!r} is no experiment file: give its path or a name")
    path, known = Path(name), shipped_experiments()
    try:
        return _found(path, str(name), known)
    except OSError as error:
        raise ConfigError(
            f"{str(name)[:60]!r}... is no experiment file: {error.strerror}"
        ) from error


def _found(path: Path, name: str, known: dict[str, Path]) -> Path:
    if path.suffix == ".toml" or path.is_file():
        if path.is_dir():
            raise ConfigError(f"{path} is a folder, not an experiment file")
        return path
    if name in known:
        return known[name]
    if path.is_dir() and (path / "experiment.toml").is_file():
        return path / "experiment.toml"
    beside = path.with_name(path.name + ".toml") if path.name else path
    if beside.is_file():
        return beside
    every = [*known, *paper_settings()]
    raise unknown_name("experiment file or shipped experiment", name, every)
