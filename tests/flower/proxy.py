"""The cable between a silo and the server: it can be pulled out, put back in, and slow."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Cable:
    """Forwards connections of the loopback interface to a port.

    Cut, it behaves as a network that drops packets: nothing is refused and nothing arrives, new
    connections get no answer.  What was on the way is delivered when it works again.
    """

    def __init__(self, port: int) -> None:
        self.to, self.delay = port, 0.0
        self.works = threading.Event()
        self.works.set()
        self.door = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.door.getsockname()[1]
        self.ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self.works.clear()

    def heal(self) -> None:
        self.works.set()

    def close(self) -> None:
        self.heal()
        for end in (self.door, *self.ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                near, _ = self.door.accept()
                far = socket.create_connection(("127.0.0.1", self.to))
                self.ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.works.wait()
                time.sleep(self.delay)
                sink.sendall(data)
        self.works.wait()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
