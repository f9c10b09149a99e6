"""Processes of a federation on this machine: started, watched and ended by us alone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from undrift.deploy.folder import flower_config, silo, write_text
from undrift.errors import FederationError, MissingExtra
from undrift.experiment.tables import read_table
from undrift.federated.project import FEDERATION
from undrift.state import disk

SECONDS_TO_START = 90.0
SECONDS_TO_END = 15.0
PAUSE = 0.5  # seconds between two looks into a log
Tell = Callable[[str], None]
ERROR = "undrift: "  # what the last line begins with where a command of ours fails


def free_port() -> int:
    """Find a port of the loopback interface that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


def flower_environment(home: Path) -> dict[str, str]:
    """Tell Flower where its files are, to tell nobody about us, and where our programs are."""
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return {"PATH": here, "FLWR_HOME": str(home), **quiet}


class Local:
    """A SuperLink and its nodes on the loopback interface."""

    def __init__(self, place: Path) -> None:
        self.place, self.work = place.resolve(), place.resolve() / "try"
        table = read_table(self.place / "app" / "silos" / FEDERATION)
        self.clients, self.insecure = int(table["clients"]), bool(table.get("insecure"))
        self.port = free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        config = flower_config(self.place, self.port, self.insecure)
        disk.make_directory(self.work, disk.SECRET_FOLDER)  # logs, and what Flower keeps
        write_text(self.work / "flower" / "config.toml", config)

    def environment(self, **more: str) -> dict[str, str]:
        """Give what every process of ours is told."""
        return {**os.environ, **flower_environment(self.work / "flower"), **more}

    # -- processes ---------------------------------------------------------------------------
    def start(self, name: str, command: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
        """Start a process in a group of its own; what it says goes to try/NAME.log."""
        with (self.work / f"{name}.log").open("ab") as log:
            made = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=self.environment(**more), start_new_session=True,
            )  # fmt: skip
        self.running[name] = made
        return made

    def stop(self, name: str, how: int = signal.SIGTERM) -> None:
        """End a process that we started, with its children."""
        process = self.running.pop(name)
        _signal(process.pid, how)
        _signal(process.pid, signal.SIGCONT)  # who is stopped hears nothing else
        end = time.monotonic() + SECONDS_TO_END
        while _alive(process) and time.monotonic() < end:
            time.sleep(0.1)
        _signal(process.pid, signal.SIGKILL)
        process.wait()

    def superlink(self) -> None:
        """Start the server, and wait until it listens."""
        if shutil.which("flower-superlink", path=self.environment()["PATH"]) is None:
            raise MissingExtra("Flower is not installed: pip install 'undrift[flower]'")
        script = str(self.place / "operator" / "superlink.sh")
        records = str(self.work / "superlink.db")  # a try-out leaves the operator's alone
        self.start("superlink", ["/bin/sh", script], PORT=str(self.port), DATABASE=records)
        self.wait_for("superlink", self.port)

    def node(self, client: int, **more: str) -> str:
        """Start the node of one silo; tell the name of its process."""
        name, port = f"node-{client}", str(free_port())
        script = str(silo(self.place, client) / "node.sh")
        home = str(self.work / f"flower-{client}")
        address = f"127.0.0.1:{self.port}"
        told = {"SUPERLINK": address, "PORT": port, "FLWR_HOME": home, **more}
        self.start(name, ["/bin/sh", script], **told)
        return name

    def register(self) -> None:
        """Let the keys in that lie in the silos' folders."""
        if not self.insecure:
            self.command("register", ["/bin/sh", str(self.place / "operator" / "register.sh")])

    def command(
        self,
        name: str,
        command: Sequence[str],
        seconds: float = 120.0,
        tell: Tell | None = None,
        **more: str,
    ) -> str:
        """Run a command to its end and give what it says; lines of ours are told as they come."""
        path = self.work / f"{name}.log"
        before = path.stat().st_size if path.is_file() else 0
        process = self.start(name, command, **more)
        try:
            left = seconds if tell is None else _follow(process, path, before, seconds, tell)
            code = process.wait(left)
        except subprocess.TimeoutExpired as late:
            so_far = last_lines(_since(path, before))
            raise FederationError(f"{name} did not end within {seconds:g} s: {so_far}") from late
        finally:
            self.stop(name)
        said = _since(path, before)
        if code:
            raise FederationError(ours(said) or f"{name} failed: {last_lines(said)}")
        return said

    def wait_for(self, name: str, port: int) -> None:
        """Wait until a process listens on a port."""
        end = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < end:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if self.running[name].poll() is not None:
                break
            time.sleep(0.2)
        said = (self.work / f"{name}.log").read_text(errors="replace")
        raise FederationError(f"{name} did not start: {last_lines(said)}")

    # -- the whole ---------------------------------------------------------------------------
    def __enter__(self) -> Local:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in list(self.running):
            self.stop(name)

    def up(self) -> None:
        """Start the server, let the keys in, start every node."""
        self.superlink()
        self.register()
        for client in range(self.clients):
            self.node(client)

    def run(self, seconds: float, folder: Path | None = None, tell: Tell | None = None) -> Path:
        """Run the experiment to its end; give the folder of the run."""
        out = self.work / "run" if folder is None else folder
        script = str(self.place / "operator" / "run.sh")
        self.command("run", ["/bin/sh", script], seconds, tell, FOLDER=str(out))
        return out


def _follow(
    process: subprocess.Popen[bytes], path: Path, start: int, seconds: float, tell: Tell
) -> float:
    """Tell the lines of ours in a log until its process ends or time is up; give what is left.

    The last lines are told only when it has not failed: its error is told by whoever waits for it.
    """
    end, rest, fresh = time.monotonic() + seconds, b"", list[str]()
    while process.poll() is None and time.monotonic() < end:
        for line in fresh:
            tell(line)
        time.sleep(min(PAUSE, max(0.0, end - time.monotonic())))
        fresh, start, rest = _new_lines(path, start, rest)
    if process.poll() == 0:
        for line in [*fresh, *_new_lines(path, start, rest)[0]]:
            tell(line)
    return max(0.0, end - time.monotonic())


def _new_lines(path: Path, start: int, rest: bytes) -> tuple[list[str], int, bytes]:
    """Read the lines of ours that were written since; the last one may be half of one."""
    with path.open("rb") as log:
        log.seek(start)
        data = log.read()
    *lines, half = (rest + data).split(b"\n")
    told = [line.decode(errors="replace").strip() for line in lines]
    mine = [line.removeprefix(ERROR) for line in told if line.startswith(ERROR)]
    return mine, start + len(data), half


def ours(said: str) -> str:
    """Give the error that a command of ours ended with; nothing if it was somebody else's."""
    last = last_lines(said, 1)
    return last.removeprefix(ERROR) if last.startswith(ERROR) else ""


def _since(path: Path, start: int) -> str:
    return path.read_bytes()[start:].decode(errors="replace")


def last_lines(said: str, count: int = 6) -> str:
    """Give the end of what a process said."""
    return "\n".join([line for line in said.splitlines() if line.strip()][-count:])


def _signal(group: int, how: int) -> None:
    try:
        os.killpg(group, how)
    except ProcessLookupError:
        return


def _alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
