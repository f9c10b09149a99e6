"""`undrift deploy check`: is a federation that is running all right, and if not, what is wrong."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from undrift.deploy.folder import PORT, silo
from undrift.deploy.local import flower_environment, last_lines
from undrift.errors import UndriftError
from undrift.federated.letters import named
from undrift.federated.project import Project, read_project
from undrift.federated.running import CHECKED
from undrift.guarded.text import read_json

SOON = datetime.timedelta(days=7)
SECONDS = 180.0  # for greeting everybody


class Finding(NamedTuple):
    """One thing that was looked at."""

    good: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok ' if self.good else 'BAD'}  {self.text}"


def check(
    place: Path, port: int = PORT, home: Path | None = None, *, trust: bool = False
) -> Iterator[Finding]:
    """Look at files, at the door, and at every node; the first thing that is missing ends it."""
    try:
        project = read_project(place / "app" / "silos", trust=trust)
    except UndriftError as error:
        yield Finding(False, str(error))
        return
    yield Finding(True, f"{project.clients} clients, experiment {project.experiment.name!r}")
    yield from _files(place, project)
    reached = _reached(place, port, bool(project.keys))
    yield reached
    if not reached.good:
        return
    if project.keys:
        yield _plain_refused(port)
    yield from _greeted(place, project, home or place / "operator" / "flower")


def _files(place: Path, project: Project) -> Iterator[Finding]:
    if not project.keys:
        yield Finding(False, "insecure: no TLS and no keys; anybody may say that he is any client")
        return
    from undrift.deploy.certificates import expiry

    for name in ("ca.crt", "server.crt"):
        path = place / "operator" / "certificates" / name
        left = expiry(path) - datetime.datetime.now(datetime.UTC)
        text = f"{path.name} is valid for {left.days} more days"
        yield Finding(left > SOON, text if left > SOON else f"{text}: make new ones")
    secret = [place / "operator" / "certificates" / n for n in ("ca.key", "server.key")]
    secret += [silo(place, client) / "key" for client in range(project.clients)]
    loose = [p for p in secret if p.is_file() and stat.S_IMODE(p.stat().st_mode) & 0o077]
    told = ", ".join(str(p) for p in loose[:3])
    yield Finding(not loose, f"others can read {told}: chmod 600" if loose else "keys are private")


def _reached(place: Path, port: int, secure: bool) -> Finding:
    """Knock as a node does: with our authority, or in the clear."""
    where = f"the SuperLink at 127.0.0.1:{port}"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
            if secure:
                trusted = place / "operator" / "certificates" / "ca.crt"
                context = ssl.create_default_context(cafile=str(trusted))
                with context.wrap_socket(plain, server_hostname="localhost") as wrapped:
                    return Finding(True, f"{where} answers, {wrapped.version()}")
    except ssl.SSLError as error:
        return Finding(False, f"{where} does not speak TLS as {place} expects: {error.reason}")
    except OSError as error:
        told = error.strerror or str(error)
        return Finding(False, f"{where} cannot be reached ({told}): sh operator/superlink.sh")
    return Finding(True, f"{where} answers, in the clear")


def _plain_refused(port: int) -> Finding:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
            plain.sendall(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = plain.recv(64)
    except OSError:
        answer = b""
    bad = answer.startswith(b"HTTP")
    return Finding(not bad, "speaks in the clear too" if bad else "refuses to speak in the clear")


def _greeted(place: Path, project: Project, home: Path) -> Iterator[Finding]:
    """Let the server greet every node, through Flower and back."""
    # a SuperLink that is a service writes nowhere else
    with tempfile.TemporaryDirectory(prefix="check-", dir=place / "operator") as folder:
        said = _run_greeting(place, home, Path(folder))
        found = Path(folder) / CHECKED
        if not found.is_file():
            yield Finding(False, f"the app did not run: {last_lines(said)}")
            return
        told: dict[str, Any] = read_json(found)
    sizes = {int(client): int(size) for client, size in told["sizes"].items()}
    causes = {client: cause for client, cause in told["refused"] if client is not None}
    for client in range(project.clients):
        who = named(project.names, client)
        if client in sizes:
            yield Finding(True, f"{who} answers, {sizes[client]} examples")
        else:
            missing = "is not connected: sh node.sh in its folder, sh operator/register.sh here"
            yield Finding(False, f"{who} {causes.get(client, missing)}")
    for stranger in told["strangers"]:
        yield Finding(False, f"node {stranger} is connected; its key is not in federation.toml")


def _run_greeting(place: Path, home: Path, folder: Path) -> str:
    settings = f'folder="{folder}" check=true'
    command = ["flwr", "run", str(place / "app"), "federation", "--stream"]
    try:
        done = subprocess.run(
            [*command, "--run-config", settings], capture_output=True, timeout=SECONDS,
            stdin=subprocess.DEVNULL, check=False,
            env={**os.environ, **flower_environment(home)},
        )  # fmt: skip
    except FileNotFoundError:
        return "flwr is not installed: pip install 'undrift[flower]'"
    except subprocess.TimeoutExpired as late:
        return f"no end after {SECONDS:g} s\n" + (late.stdout or b"").decode(errors="replace")
    return (done.stdout + done.stderr).decode(errors="replace")
