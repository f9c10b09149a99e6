"""Install every extra in an environment of its own, and use there what it is for.

python scripts/extras.py [NAME ...]      all of pyproject.toml by default; takes some minutes

One environment holds torch and what undrift itself needs. Each extra has an environment on top of
it, so that nothing that another extra brings can hide what this one lacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USES = ROOT / "scripts" / "extras_uses.py"
SECONDS = 900.0  # for each command
OLDEST = {"flower": "flwr==1.40.*"}  # the other end of a range; pip takes the newest by itself


class Failed(Exception):
    """An extra cannot be installed or used; the message says why."""


def extras() -> list[str]:
    """Name the extras of this project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"])


def ran(command: Sequence[str | Path], folder: Path, problem: str) -> None:
    """Run a command to its end; what it says is shown only if it fails."""
    settings = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=settings, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise Failed(f"{problem}: no end after {SECONDS:g} s") from late
    if done.returncode:
        raise Failed(f"{problem}:\n{why(done.stdout)}")


def why(said: str, most: int = 15) -> str:
    """Give the lines that tell why: pip's own errors, or else the end."""
    lines = [line.rstrip()[:300] for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return "\n".join(f"    {line}" for line in (errors or lines)[-most:])


def install(python: Path, wanted: Sequence[str], problem: str) -> None:
    """Install with the versions of constraints.txt."""
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    ran([*pip, "-c", ROOT / "constraints.txt", *wanted], ROOT, problem)


def environment(folder: Path, below: Path | None = None) -> Path:
    """Make an environment, on top of another one if told so; give its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    if below is not None:
        (packages(folder) / "below.pth").write_text(f"{packages(below)}\n")
        for script in (below / "bin").glob("undrift*"):  # with this environment's Python
            own = folder / "bin" / script.name
            own.write_text(script.read_text().replace(str(below), str(folder), 1))
            own.chmod(0o755)
    return folder / "bin" / "python"


def packages(folder: Path) -> Path:
    """Tell where an environment keeps its packages."""
    return next((folder / "lib").glob("python*")) / "site-packages"


def check(name: str, folder: Path, *more: str) -> None:
    """Install one extra, perhaps with one version, and use it."""
    place = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
    python = environment(place / "environment", folder / "base")
    missing = f"extra {name!r} of pyproject.toml does not install: the registry cannot be reached"
    missing += ", or lacks a version that it asks for"
    install(python, [f"undrift[{name}]", *more], missing)
    (place / "work").mkdir()
    ran([python, USES, name], place / "work", f"extra {name!r} installs, and cannot be used")


def planned(names: Sequence[str]) -> list[list[str]]:
    """List what to check: each extra, and with the oldest version of its range where one counts."""
    found = []
    for name in names:
        found += [[name], *([[name, OLDEST[name]]] if name in OLDEST else [])]
    return found


def main(names: Sequence[str]) -> int:
    known, failures = extras(), 0
    strange = [name for name in names if name not in known]
    if strange:
        print(f"no extra named {strange[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="undrift-extras-") as place:
        folder = Path(place)
        install(environment(folder / "base"), [str(ROOT)], "undrift itself does not install")
        for name, *more in planned(names or known):
            started, told = time.monotonic(), " ".join([name, *more])
            try:
                check(name, folder, *more)
            except Failed as failure:
                failures += 1
                print(f"BAD  {told}: {failure}", flush=True)
            else:
                print(f"ok   {told} ({time.monotonic() - started:.0f} s)", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failed as failure:
        sys.exit(f"BAD  {failure}")
