"""A silo's SuperNode that ends when it has stopped working; `node.sh` then starts it again.

Flower's process outlives its work: the loop that receives messages returns after some errors of the
network, heartbeats end with their thread, the process that starts apps may be killed, and all the
while a server on the loopback interface keeps the process alive.  Nobody would notice.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from undrift.errors import MissingExtra

# Flower retries without an end unless told otherwise; a later option takes precedence
WAITS = ["--max-wait-time", "120"]
LOOK = 5.0  # seconds between two looks at the process that starts apps
GRACE = 4.0  # seconds to say goodbye to the server, which otherwise waits a minute for the node
LOST = ("Failed to send message", "Failed to receive message")  # and it is not tried again


class Watch(logging.Handler):
    """Ends this process with exit code 1, once, and says why."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.why = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Hear what Flower gives up: the server has to notice, or it waits for nothing."""
        told = record.getMessage()
        if told.startswith(LOST):
            self.end(told)

    def thread_died(self, about: threading.ExceptHookArgs) -> None:
        """Hear of a thread's error: the others would go on without its work."""
        if about.exc_type is not SystemExit:
            name = about.thread.name if about.thread else "a thread"
            self.end(f"{name} has failed: {about.exc_type.__name__}: {about.exc_value}")

    def look(self) -> None:
        """Notice that the process that starts apps has ended; nobody else waits for it."""
        before = None
        while not self.why:
            time.sleep(LOOK)
            ended = ended_child()
            if ended is not None and ended == before:  # another one would have been waited for
                self.end("the process that starts apps has ended")
            before = ended

    def end(self, why: str) -> None:
        """Let Flower say goodbye to the server; what does not end by itself is ended."""
        if not self.why:
            self._tell(why)
            threading.Thread(target=self._force, daemon=True).start()
            os.kill(os.getpid(), signal.SIGTERM)

    def leave(self, why: str) -> None:
        """End the process, whatever threads are left."""
        if not self.why:
            self._tell(why)
        os._exit(1)

    def _tell(self, why: str) -> None:
        self.why = " ".join(why.split())[:300]
        print(f"undrift: the node ends: {self.why}", file=sys.stderr, flush=True)

    def _force(self) -> None:
        time.sleep(GRACE)
        os._exit(1)


def ended_child() -> int | None:
    """Name a child of this process that has ended and that nobody has waited for."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none yet
        return None
    return None if found is None else found.si_pid


def watched(work: Any) -> None:
    """Do what never ends by itself; if it does, or a part of it, end the process."""
    watch = Watch()
    logging.getLogger("flwr").addHandler(watch)
    threading.excepthook = watch.thread_died
    threading.Thread(target=watch.look, daemon=True).start()
    why = "its connection has ended"
    try:
        work()
    except SystemExit as stopped:
        if not watch.why:  # somebody stopped it, or it could not start: Flower has said so
            sys.stderr.flush()
            os._exit(stopped.code if isinstance(stopped.code, int) else 1)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
    watch.leave(why)


def main() -> None:
    """Run `flower-supernode` with its own arguments."""
    try:
        from flwr.supernode.cli.flower_supernode import flower_supernode
    except ImportError as error:
        told = MissingExtra("Flower is not installed: pip install 'undrift[flower]'")
        print(f"undrift: {told} ({error})", file=sys.stderr)
        sys.exit(2)
    sys.argv[1:1] = WAITS
    watched(flower_supernode)


if __name__ == "__main__":
    main()
