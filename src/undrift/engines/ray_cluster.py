"""A Ray cluster of this machine, closed to others, or one that is up; and what it has to give."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from undrift.errors import ConfigError, FederationError, MissingExtra

log = logging.getLogger("undrift")

OLDEST = (2, 54)  # earlier ones let anybody delete jobs (CVE-2026-27482)
MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
NICENESS = "RAY_worker_niceness"  # Ray's own 15 is for work in the background: ours is the work
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray's daemons listen on 127.0.0.1 alone


def load_ray() -> Any:
    """Import Ray; refuse a version with known holes."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra(
            "engine = 'ray' needs Ray, which is not installed: pip install 'undrift[ray]'"
        ) from error
    check_version(ray.__version__)
    return ray


def check_version(version: str) -> None:
    """Refuse a Ray that is too old to be safe."""
    found = tuple(int(n) for n in version.split(".")[:2] if n.isdigit())
    if found < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"Ray {version} is too old: others may delete its jobs without being asked who they "
            f"are. Install {wanted} or later: pip install 'undrift[ray]'"
        )


def connect(address: str | None = None, *, dashboard: bool = False) -> str:
    """Join the cluster at an address, or start one on this machine; gives its address.

    A cluster that this process is in already is used as it is.
    """
    if address is not None and not isinstance(address, str):
        raise ConfigError(f"address must be a text such as 'auto' or '10.0.0.1:6379': {address!r}")
    if _is_in_cluster():
        ray = load_ray()
    else:
        with _closed(address):
            ray = load_ray()
            _start(ray, address, dashboard)
    joined: str = ray.get_runtime_context().gcs_address
    return joined


def _is_in_cluster() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


@contextlib.contextmanager
def _closed(address: str | None) -> Iterator[None]:
    """Set what keeps strangers out, before Ray reads it."""
    if address is not None:
        yield
        return
    mode = os.environ.get(MODE, "token").lower()
    if mode != "token":
        raise ConfigError(
            f"{MODE}={mode} lets anybody on this machine run code in the cluster: unset it, or "
            "start a cluster of your own and give its address"
        )
    os.environ[MODE] = mode
    os.environ.setdefault(NICENESS, "0")
    if not (os.environ.get(TOKEN) or os.environ.get(f"{TOKEN}_PATH")):
        os.environ[TOKEN] = secrets.token_hex(32)  # of this cluster alone; it is written nowhere
    before = os.environ.get(LOOPBACK)
    os.environ[LOOPBACK] = "0"
    if "ray" in sys.modules and before != "0":
        log.warning(
            "Ray was imported before undrift could set %s=0: the cluster asks for its token, but "
            "listens on all interfaces. Set it before `import ray`",
            LOOPBACK,
        )
    try:
        yield
    finally:
        if before is None:
            del os.environ[LOOPBACK]
        else:
            os.environ[LOOPBACK] = before


def _start(ray: Any, address: str | None, dashboard: bool) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    started = time.perf_counter()
    try:
        if address is not None:
            _knock(address)
            ray.init(address=address, **quiet)
        else:
            ray.init(
                address="local", include_dashboard=dashboard, dashboard_host="127.0.0.1", **quiet
            )
    except Exception as error:
        where = "on this machine" if address is None else f"at {address}"
        hint = "" if address is None else f" (is it up, and is its token in {TOKEN}?)"
        raise FederationError(f"no Ray cluster {where}{hint}: {first_line(error)}") from error
    if not asks_for_token():
        told = "the Ray cluster asks nobody for a token: whoever reaches it can run code in it"
        if address is None:
            ray.shutdown()
            raise FederationError(f"{told}. Set {MODE}=token before `import ray`")
        log.warning("%s (%s=token on all of its machines changes that)", told, MODE)
    log.info("joined a Ray cluster in %.1f s", time.perf_counter() - started)


def _knock(address: str) -> None:
    """Find out in seconds what Ray tells after minutes: nobody is there, or the token is wrong."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like: Ray looks it up itself
    socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    inside = importlib.import_module("ray._raylet")
    inside.GcsClient(address=address).get_all_node_info(timeout=20)


def asks_for_token() -> bool:
    """Whether this process and its cluster authenticate each other by a token."""
    inside = importlib.import_module("ray._raylet")
    return bool(inside.get_authentication_mode() == inside.AuthenticationMode.TOKEN)


class Resources(NamedTuple):
    """What a cluster has."""

    machines: int
    cpus: float
    gpus: float


class Each(NamedTuple):
    """What one actor gets."""

    cpus: float  # that nobody else in the cluster gets; 0: they are shared
    gpus: float
    threads: int


def resources() -> Resources:
    """Ask the cluster what it has."""
    ray = load_ray()
    found, alive = ray.cluster_resources(), [n for n in ray.nodes() if n["Alive"]]
    return Resources(len(alive), found.get("CPU", 0.0), found.get("GPU", 0.0))


def share_out(
    there: Resources, actors: int | None, gpus: float | None, alone: bool = True
) -> tuple[int, Each]:
    """Decide how many actors there are and what each gets; `alone`, the cluster is ours."""
    each = float(bool(there.gpus)) if gpus is None else float(gpus)
    count = actors
    if count is None:
        count = max(1, int(there.gpus / each) if each else there.machines)
    if each * count > there.gpus:
        raise ConfigError(
            f"{count} actors with {each:g} GPUs each do not fit: the cluster has {there.gpus:g}. "
            "Lower actors or gpus (a fraction shares a GPU, 0 trains on CPUs)"
        )
    cpus = float(there.cpus // count) or there.cpus / count
    # in a cluster of our own a second trainer need not wait until the first is gone
    return count, Each(0.0 if alone else cpus, each, max(1, int(cpus)))


def first_line(error: Exception) -> str:
    """Give the first line of what an error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
