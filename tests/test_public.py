"""The public names: a change here is a change for users."""

from __future__ import annotations

import importlib.metadata
import importlib.resources

import undrift


def test_public_names_exist_once() -> None:
    assert len(set(undrift.__all__)) == len(undrift.__all__)
    assert all(hasattr(undrift, name) for name in undrift.__all__)


def test_one_version_everywhere() -> None:
    assert importlib.metadata.version("undrift") == undrift.__version__


def test_the_package_is_typed() -> None:
    assert (importlib.resources.files("undrift") / "py.typed").is_file()
