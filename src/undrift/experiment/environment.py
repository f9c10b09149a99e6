"""Where a run was computed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from undrift.version import __version__

COMMIT = "UNDRIFT_COMMIT"  # names the commit where the source has no git folder


def environment(device: torch.device, round: int, home: Path | None = None) -> dict[str, Any]:
    """Describe versions, machine and command at the start of a run, or where it goes on.

    `home` is the folder of the experiment file, where own parts are looked for.
    """
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
        "home": None if home is None else str(home),
    }


def commit() -> str | None:
    """Name the commit that the source is at; "+" marks changes since."""
    if os.environ.get(COMMIT):
        return os.environ[COMMIT]
    here = Path(__file__).parent
    try:
        told = [
            subprocess.run(["git", "-C", str(here), *what], capture_output=True, text=True,
                           timeout=10, check=True).stdout.strip()
            for what in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", str(here.parent)])
        ]  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return told[0] + ("+" if told[1] else "")


def _program(path: str) -> str:
    """The name of what was called: `python -m undrift` is undrift."""
    program = Path(path)
    return program.parent.name if program.name == "__main__.py" else program.name
