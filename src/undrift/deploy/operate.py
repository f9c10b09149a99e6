"""Run an experiment over a federation that is up, and tell truly how it ended.

`flwr run --stream` shows the log of the server's app and ends well whatever became of it.  So the
app writes down how it ended, into a file that only this call knows.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from undrift.deploy.local import flower_environment
from undrift.errors import FederationError, MissingExtra
from undrift.guarded.text import read_json

FLOWER, ENDED = "FLWR_HOME", "ended.json"
_STARTED = re.compile(r"run(?:_id)? `?(\d{5,})")


def operate(place: Path, out: Path) -> None:
    """Run to the end; an error says why it did not get there.  Stopped, it stops the run too."""
    home = Path(os.environ.get(FLOWER) or place / "operator" / "flower")
    environment = {**os.environ, **flower_environment(home)}
    # a SuperLink that is a service writes nowhere else
    with tempfile.TemporaryDirectory(prefix="run-", dir=place / "operator") as folder:
        ended = Path(folder) / ENDED
        settings = f"folder={json.dumps(str(out))} ended={json.dumps(str(ended))}"
        command = ["flwr", "run", str(place / "app"), "federation", "--stream"]
        code = _streamed([*command, "--run-config", settings], environment)
        told = _read(ended)
    if told is None:
        raise FederationError(
            f"the server's app did not say how it ended (flwr run: exit code {code}); what is done "
            "is kept, the same command goes on"
        )
    if told:
        raise FederationError(told)


def _streamed(command: list[str], environment: dict[str, str]) -> int:
    """Show what a run says until it ends; if we are stopped, stop it."""
    run = ""
    try:
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                for line in process.stdout or ():
                    print(line, end="", file=sys.stderr, flush=True)
                    found = _STARTED.search(line)
                    run = run or (found[1] if found else "")
                return process.wait()
            except BaseException:
                process.kill()
                if run:
                    stop = ["flwr", "stop", run, "federation"]
                    subprocess.run(
                        stop, env=environment, stdin=subprocess.DEVNULL, timeout=60,
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
                    )  # fmt: skip
                raise
    except FileNotFoundError as error:
        raise MissingExtra("Flower is not installed: pip install 'undrift[flower]'") from error


def _read(path: Path) -> str | None:
    """Give the app's last words: an error, or nothing; None if there are none."""
    try:
        told: Any = read_json(path)
        return str(told["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
