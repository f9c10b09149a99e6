"""Calls in a child process that may take little memory and little time, and how they ended."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from undrift.errors import UndriftError

SECONDS = 20
MEGABYTES = 400  # beyond what the process has taken before the call


class Ended(NamedTuple):
    """How a call ended: "good", "refused" by an error of ours, or what else happened."""

    how: str
    said: str = ""


def bounded(call: Callable[[], Any], megabytes: int = MEGABYTES) -> Ended:
    """Call something in a child of this process, under limits that the kernel holds."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_child, args=(call, theirs, megabytes)
    )
    child.start()
    theirs.close()
    child.join(3 * SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
        return Ended("endless")
    try:
        return ours.recv() if ours.poll() else Ended(f"died with exit code {child.exitcode}")
    except EOFError:
        return Ended(f"died with exit code {child.exitcode}")
    finally:
        ours.close()


def _child(call: Callable[[], Any], pipe: Connection, megabytes: int) -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = taken + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(2 * SECONDS)  # also where it only waits
    pipe.send(outcome(call))


def outcome(call: Callable[[], Any]) -> Ended:
    """Tell how a call ends: only errors of ours and good results are allowed."""
    begun = time.process_time()
    try:
        call()
    except UndriftError as error:
        return Ended("refused", f"{type(error).__name__}: {error}"[:3000])
    except BaseException as error:
        return Ended("raw", f"{type(error).__name__}: {str(error)[:300]}")
    return Ended("good", f"{time.process_time() - begun:.1f} s")
