"""Flower carries the messages: the only place that knows Flower.

A ServerApp and a ClientApp around the same functions as everywhere; no Strategy, no algorithm.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from undrift.errors import ConfigError, MissingExtra, UndriftError
from undrift.experiment.events import Listener, Record, RunInfo
from undrift.federated.answering import Answering, cannot_start
from undrift.federated.grid import Answer, Ask
from undrift.federated.project import Project, node_of, read_project
from undrift.federated.running import check_deployed, run_deployed
from undrift.state import disk

try:
    from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise MissingExtra("Flower is not installed: pip install 'undrift[flower]'") from error

log = logging.getLogger("undrift")
KIND = "undrift.safetensors.1"  # how we call our bytes in Flower's records
POLL = 0.2  # seconds between two looks for answers
MONTH = 30 * 86400.0
AT_ONCE = 8  # nodes that are looked at so often; where there are more, each is less often
LOOK = 5.0  # seconds between two looks whether a node was started again


class FlowerGrid:
    """Carries messages over a SuperLink; a node is the client whose public key it proved to own."""

    def __init__(self, grid: Grid, keys: Sequence[str] = ()) -> None:
        self.grid = grid
        self.keys = {key.strip(): client for client, key in enumerate(keys)}

    def nodes(self) -> dict[int, int | None]:
        """List the SuperNodes that are connected, and whose keys they have."""
        found = {}
        for node in self.grid.get_nodes():
            key = bytes(node.public_key).decode("ascii", "replace").strip()
            found[int(node.node_id)] = self.keys.get(key)
        return found

    def exchange(self, asks: Sequence[Ask], timeout: float) -> Iterator[Answer]:
        """Push messages, and pull answers until all are there or time is up."""
        end = time.monotonic() + timeout
        started = self._started()
        pushed = list(self.grid.push_messages([_message(ask, timeout) for ask in asks]))
        for ask, name in zip(asks, pushed, strict=False):
            if not name:
                yield Answer(ask.node, b"", "Flower could not deliver the message")
        waiting = {name: ask.node for ask, name in zip(asks, pushed, strict=False) if name}
        inbox = Inbox(waiting, end, queue.Queue())
        # a thread each: Flower waits for minutes for a reply whose second half never comes, and
        # nobody else's may wait behind it
        for name, node in list(waiting.items()):
            threading.Thread(target=self._pull, args=(name, node, inbox), daemon=True).start()
        threading.Thread(target=self._find_restarted, args=(started, inbox), daemon=True).start()
        try:
            while waiting:
                name, answer = inbox.answers.get(timeout=max(0.0, end - time.monotonic()))
                if isinstance(answer, Exception):
                    raise answer
                if waiting.pop(name, None) is not None:
                    yield answer
        except queue.Empty:
            return
        finally:
            waiting.clear()  # the threads end

    def _started(self) -> dict[int, str]:
        """Tell since when nodes are connected."""
        return {int(n.node_id): str(n.last_activated_at) for n in self.grid.get_nodes()}

    def _pull(self, name: str, node: int, inbox: Inbox) -> None:
        """Look for the reply to one message until it is there, or nobody waits any more."""
        pause = POLL * max(1.0, len(inbox.waiting) / AT_ONCE)
        while inbox.waits_for(name):
            try:
                for reply in self.grid.pull_messages([name]):
                    if reply.metadata.reply_to_message_id == name:
                        inbox.answers.put((name, _answer(reply, node)))
                        return
            except Exception as error:
                inbox.answers.put((name, self._unreadable(node, error)))
                return
            time.sleep(pause)

    def _unreadable(self, node: int, error: Exception) -> Answer | Exception:
        """Blame who sent a reply that Flower cannot read; a SuperLink that is gone is an error."""
        try:
            self._started()
        except Exception as gone:
            return gone
        return Answer(node, b"", f"Flower cannot read its reply ({type(error).__name__})")

    def _find_restarted(self, started: Mapping[int, str], inbox: Inbox) -> None:
        """Give up messages of nodes that were started again: what they were asked is lost."""
        next_look = time.monotonic() + LOOK
        try:
            while inbox.waiting and time.monotonic() <= inbox.end:
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + LOOK
                    now = self._started()
                    for name, node in list(inbox.waiting.items()):
                        if node in now and now[node] != started.get(node, now[node]):
                            inbox.answers.put((name, Answer(node, b"", "it was started again")))
                time.sleep(POLL)
        except Exception as error:  # for who waits for answers
            inbox.answers.put(("", error))


class Inbox(NamedTuple):
    """The messages to which no reply has come, and the replies that nobody has taken."""

    waiting: dict[str, int]  # the message's name -> node
    end: float
    answers: queue.Queue[tuple[str, Answer | Exception]]

    def waits_for(self, name: str) -> bool:
        """Whether a reply to a message would still be taken."""
        return name in self.waiting and time.monotonic() <= self.end


def _message(ask: Ask, timeout: float) -> Message:
    content = RecordDict(
        {"ask": ArrayRecord({"common": _array(ask.common), "own": _array(ask.own)})}
    )
    return Message(content, ask.node, "train", ttl=timeout, group_id=ask.phase)


def _array(data: bytes) -> Array:
    return Array("uint8", (len(data),), KIND, data)


def _answer(reply: Message, asked: int | None) -> Answer:
    node = int(reply.metadata.src_node_id)
    if reply.has_error():  # the SuperLink's own: it has no node that sent it
        return Answer(node if asked is None else asked, b"", f"Flower error {reply.error.code}")
    if asked is not None and asked != node:
        return Answer(asked, b"", f"it answers in the name of node {node}")
    try:
        array = reply.content["answer"]["answer"]
        data = array.data if isinstance(array, Array) and array.stype == KIND else b""
    except Exception:  # Flower reads it only now, whatever it is
        data = b""
    return Answer(node, data, "" if data else "an answer without a report")


# ----------------------------------------------------------------------------------------- apps
def server_app(place: Path | str) -> ServerApp:
    """Make the ServerApp of a project: it runs the experiment, or goes on with it."""
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        _speak()
        with _telling(context.run_config.get("ended")):
            folder = context.run_config.get("folder")
            project = read_project(Path(place), trust=True)
            if not isinstance(folder, str) or not folder:
                raise ConfigError("the run config must name a folder: sh operator/run.sh does")
            carrier = FlowerGrid(grid, project.keys)
            if context.run_config.get("check"):
                check_deployed(project, carrier, folder)
                return
            run_deployed(project, carrier, folder, [RoundLines()])

    app.main()(main)
    return app


@contextmanager
def _telling(path: Any) -> Iterator[None]:
    """Write into a file how the app ended: Flower tells nobody outside."""
    told = "the server's app was stopped"
    try:
        yield
        told = ""
    except Exception as error:
        told = str(error) if isinstance(error, UndriftError) else f"{type(error).__name__}: {error}"
        raise
    finally:
        if isinstance(path, str) and path:
            with suppress(OSError):  # nobody waits for it any more
                disk.write_atomically(Path(path), [json.dumps({"error": told}).encode()])


def _speak() -> None:
    """Let our own messages be seen; Flower's are its own matter."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("undrift: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


class RoundLines(Listener):
    """One line per round in the server's log."""

    def started(self, run: RunInfo, past: Sequence[Record]) -> None:
        """Tell where it begins."""
        log.info("%s: %d rounds, %d of them done", run.name, run.rounds, len(past))

    def finished(self, run: RunInfo, history: Sequence[Record]) -> None:
        """Tell where it is."""
        log.info("%d rounds are done: %s", len(history), run.folder)

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Tell why it stopped."""
        log.error("%s: %s; what is done is kept", type(error).__name__, error)

    def close(self) -> None:
        """Have nothing to close."""
        return

    def round(self, run: RunInfo, record: Record) -> None:
        """Tell what became of a round."""
        names = ("test_accuracy", "test_loss", "train_loss")
        told = [f"{n} {record[n]:.4g}" for n in names if isinstance(record.get(n), float)]
        reports = len(record["clients"]) - len(record["skipped"])
        of = f"{reports} of {len(record['clients'])} reports, {record['seconds']:.1f} s"
        log.info("round %d: %s; %s", record["round"], ", ".join(told), of)


def client_app(place: Path | str) -> ClientApp:
    """Make the ClientApp of a project; the node's own configuration names data and folder."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        _speak()
        asked = message.content["ask"]
        common, own = asked["common"].data, asked["own"].data
        try:
            project = read_project(Path(place), trust=True)
            # who hangs, in a loader perhaps, keeps the node from all later messages
            seconds = min(project.patience.seconds, MONTH)
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
            node = _node(project, Path(place), context.node_config)
        except Exception as error:
            log.exception("this node cannot start")
            data = cannot_start(own, error)
        else:
            data = node.answer(common, own)
        finally:
            faulthandler.cancel_dump_traceback_later()
        record = RecordDict({"answer": ArrayRecord({"answer": _array(data)})})
        return Message(record, reply_to=message)

    app.train()(answer)
    return app


def _node(project: Project, place: Path, config: dict[str, Any]) -> Answering:
    for name, kind in (("client", int), ("folder", str), ("loader", str)):
        if not isinstance(config.get(name), kind):
            raise ConfigError(
                f"the node's configuration has no {name}: start it with --node-config "
                '\'client=0 folder="/..." loader="/.../loader.py:load"\''
            )
    return node_of(project, place, config["client"], Path(config["folder"]), config["loader"])
