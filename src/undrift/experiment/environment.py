"""Where a run was computed."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from undrift.version import __version__


def environment(device: torch.device, round: int) -> dict[str, Any]:
    """Describe versions, machine and command at the start of a run, or where it goes on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "after_round": round,
        "command": [_program(sys.argv[0]), *sys.argv[1:]],
        "undrift": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": gpu,
    }


def _program(path: str) -> str:
    """The name of what was called: `python -m undrift` is undrift."""
    program = Path(path)
    return program.parent.name if program.name == "__main__.py" else program.name
