"""Triton kernels for a cohort: C clients at once, each with its own weights.

Nothing here is imported until a seam asks for it: Triton takes a second to load, exists on Linux
only, and is needed on CUDA alone (`TRITON_INTERPRET=1` runs the kernels on a CPU, slowly).
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

import torch

from undrift.errors import MissingExtra

__all__ = ["available", "interpreted", "need", "tuned", "use"]


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def available(device: torch.device | str) -> bool:
    """Whether the kernels run on a device."""
    return _installed() and (torch.device(device).type == "cuda" or interpreted())


def need(device: torch.device | str) -> None:
    """Refuse a device on which the kernels do not run."""
    if not _installed():
        raise MissingExtra(
            "the Triton kernels need the package triton (Linux only), which is not installed: "
            "pip install triton, or choose another way to convolve, e.g. 'grouped'"
        )
    if not available(device):
        raise MissingExtra(
            f"the Triton kernels run on CUDA, not on {torch.device(device)}: choose another way to "
            "multiply, e.g. ways='grouped', or a CUDA device"
        )


def tuned() -> dict[str, dict[str, Any]]:
    """Give the configurations in use, as plain JSON: part of a run's plan."""
    from undrift.kernels import tuner

    return {key: dict(configuration) for key, configuration in tuner.chosen.items()}


def use(configurations: dict[str, dict[str, Any]]) -> None:
    """Use configurations of an earlier run, so that sums are taken in the same order."""
    from undrift.kernels import tuner

    tuner.chosen.update({key: dict(value) for key, value in configurations.items()})
