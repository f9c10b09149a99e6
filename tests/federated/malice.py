"""What a malicious silo does: functions of what an honest one would answer.

No test is in here, and nothing of pytest: a silo's own process on the loopback interface imports
it, too.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.federated.wire import MARK, _encoded, words_of
from undrift.state.codes import DTYPES

Answering = Callable[[bytes, bytes], bytes]  # common, own -> answer
GIGABYTE = 2**30


class Letter:
    """An honest answer, taken apart."""

    def __init__(self, data: bytes) -> None:
        length = int.from_bytes(data[:8], "little")
        self.table, self.body = json.loads(data[8 : 8 + length]), data[8 + length :]
        self.words = json.loads(self.table.pop("__metadata__")[MARK])
        self.parts = {name: self._tensor(entry) for name, entry in self.table.items()}

    def _tensor(self, entry: dict[str, Any]) -> Tensor:
        start, end = entry["data_offsets"]
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        if start == end:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.body[start:end]), dtype=dtype).reshape(shape)

    def change(self, name: str, how: Callable[[Tensor], Any]) -> Letter:
        """Put something else in the place of the tensors whose names begin so."""
        for part in [one for one in self.parts if one.startswith(name)]:
            old = self.parts[part]
            self.parts[part] = torch.as_tensor(how(old), dtype=old.dtype)
        return self

    def first(self, name: str, value: float) -> Letter:
        """Change one number of each of these tensors."""

        def changed(old: Tensor) -> Tensor:
            new = old.clone()
            new.view(-1)[:1] = value
            return new

        return self.change(name, changed)

    def write(self) -> bytes:
        return _encoded(self.parts, self.words)


class Scene(NamedTuple):
    """What a malicious silo knows when it answers."""

    good: bytes  # the honest answer
    round: int
    past: list[bytes]  # its honest answers in this phase, this one the last

    @property
    def letter(self) -> Letter:
        return Letter(self.good)


class Kind(NamedTuple):
    """One way to be malicious, and what the log says of it."""

    act: Callable[[Scene], bytes]
    cause: str  # in refused.jsonl, as a regular expression
    phase: str = "train"
    algorithm: str = "scaffold"
    honest: int = 0  # rounds in which its report is a sound one and counts


class Silo:
    """Answers as its node would, and in one phase as its kind does."""

    def __init__(
        self, answer: Answering, kind_of: Callable[[int], Kind | None], folder: Path
    ) -> None:
        self.answer, self.kind_of, self.folder = answer, kind_of, folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, common: bytes, own: bytes) -> bytes:
        asked = words_of(own)
        good, kind = self.answer(common, own), self.kind_of(asked["round"])
        # in files: Flower starts a process for every message
        (self.folder / f"{asked['phase']}-{asked['round']:03d}").write_bytes(good)
        if kind is None or kind.phase != asked["phase"]:
            return good
        past = [path.read_bytes() for path in sorted(self.folder.glob(f"{asked['phase']}-*"))]
        return kind.act(Scene(good, asked["round"], past))


def raising(scene: Scene) -> bytes:
    raise ValueError("patient 4711")


def dying(scene: Scene) -> bytes:
    raise SystemExit(3)


def hanging(scene: Scene) -> bytes:
    time.sleep(3600)
    return b""


def without(scene: Scene, name: str) -> bytes:
    letter = scene.letter
    del letter.parts[name]
    return letter.write()


def renamed(scene: Scene) -> bytes:
    letter = scene.letter
    letter.parts["0.total.9"] = letter.parts.pop("0.total.0")
    return letter.write()


def more(scene: Scene) -> bytes:
    letter = scene.letter
    letter.parts["0.bonus"] = torch.ones(3)
    return letter.write()


def reshaped(scene: Scene, how: Callable[[Tensor], Tensor]) -> bytes:
    letter = scene.letter
    letter.parts["0.total.0"] = how(letter.parts["0.total.0"])
    return letter.write()


def word(scene: Scene, name: str, value: Any) -> bytes:
    letter = scene.letter
    letter.words[name] = value
    return letter.write()


def raw_word(scene: Scene, name: str, text: str) -> bytes:
    """Write a word as JSON of which no library would make any."""
    letter = scene.letter
    letter.words[name] = "@"
    return letter.write().replace(b'\\"@\\"', text.encode().ljust(5))


def table(scene: Scene, text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + scene.letter.body


def all_of(name: str, value: float) -> Callable[[Scene], bytes]:
    return lambda s: s.letter.change(name, lambda old: torch.full_like(old, value)).write()


def times(name: str, factor: float) -> Callable[[Scene], bytes]:
    return lambda s: s.letter.change(name, lambda old: old * factor).write()


def one_of(name: str, value: float) -> Callable[[Scene], bytes]:
    return lambda s: s.letter.first(name, value).write()


NAN, INF = float("nan"), float("inf")
NONE = "no answer within|the node failed"
NO_TABLE = "no message|makes no sense|a table of|cut off|bytes where at most"

REPORTS = {
    "NaN": Kind(one_of("0.total.0", NAN), "not finite"),
    "infinity": Kind(one_of("0.total.0", INF), "not finite"),
    "minus infinity": Kind(all_of("0.total.0", -INF), "not finite"),
    "NaN in its control variate": Kind(one_of("0.uploads", NAN), "not finite"),
    "a loss that is no number": Kind(all_of("1.loss", NAN), "not finite"),
    "finite, its square is not": Kind(all_of("0.total.0", 1e200), "squares that are not finite"),
    "finite and huge": Kind(all_of("0.total.0", 1e30), "median.*limits.relative"),
    "a thousand times too long": Kind(times("0.total.0", 1e3), "median.*limits.relative"),
    "a huge control variate": Kind(times("0.uploads", 1e9), "median.*limits.relative"),
    "fewer numbers": Kind(lambda s: reshaped(s, lambda v: v[:-1]), "expected F"),
    "one number that would broadcast": Kind(lambda s: reshaped(s, lambda v: v[:1]), "expected F"),
    "one more axis": Kind(lambda s: reshaped(s, lambda v: v[None]), "expected F"),
    "another type": Kind(lambda s: reshaped(s, Tensor.half), "expected F"),
    "whole numbers": Kind(lambda s: reshaped(s, Tensor.long), "expected F"),
    "a missing tensor": Kind(lambda s: without(s, "0.total.0"), "missing"),
    "one tensor more": Kind(more, "nobody asked for"),
    "a renamed tensor": Kind(renamed, "missing"),
    "n_i of 0": Kind(all_of("0.total.1", 0.0), "weight 0 of the total = 0|expected"),
    "n_i below 0": Kind(all_of("0.total.1", -50.0), "expected"),
    "n_i huge": Kind(all_of("0.total.1", 1e18), "expected"),
    "n_i no number": Kind(all_of("0.total.1", NAN), "not finite"),
    "n_i a fraction": Kind(all_of("0.total.1", 0.5), "expected"),
    "another weight of its buffers": Kind(all_of("0.buffers.1", 1e18), "weight = 1e\\+18"),
    "counted twice": Kind(all_of("0.count", 2.0), "count = 2, expected 1"),
    "too many steps": Kind(all_of("1.steps", 1e6), "steps = 1e\\+06"),
    "a huge path": Kind(all_of("0.path", 1e30), "path = 1e\\+30", algorithm="fednova"),
    "a length below 0": Kind(all_of("1.length", -1.0), "below 0"),
    "says that it is not finite": Kind(all_of("1.accepted", 0), "says itself"),
    "a replayed report": Kind(lambda s: s.past[0], "round is 0, expected", honest=1),
    "another client's id": Kind(lambda s: word(s, "client", 0), "client is 0, expected 2"),
    "an earlier round": Kind(lambda s: word(s, "round", s.round - 1), "round is"),
    "a later round": Kind(lambda s: word(s, "round", s.round + 1), "round is"),
    "a round that is text": Kind(lambda s: word(s, "round", "1"), "expected a int"),
    "another run": Kind(lambda s: word(s, "run", "0" * 32), "run is 0000"),
    "another phase": Kind(lambda s: word(s, "phase", "look"), "phase is look"),
    "a phase of its own": Kind(lambda s: word(s, "phase", "dance"), "is none of"),
    "one word more": Kind(lambda s: word(s, "admin", True), "its words are"),
    "lines for the log": Kind(
        lambda s: word(s, "failed", "x\n12:00 round 9: all is well\x1b[2J" * 3), r"x\?12:00"
    ),
    "garbage": Kind(lambda s: bytes(range(256)) * 7, NO_TABLE),
    "an empty message": Kind(lambda s: b"", "no message|without a report"),
    "a message cut in its table": Kind(lambda s: s.good[:100], NO_TABLE),
    "a message cut in a tensor": Kind(lambda s: s.good[:-8], "bytes of tensors where"),
    "a message with a tail": Kind(lambda s: s.good + b"tail", "bytes of tensors where"),
    "a pickle": Kind(lambda s: pickle.dumps({"w": [1.0]}), NO_TABLE),
    "a table that is nested": Kind(lambda s: table(s, b'{"__metadata__": ' + b"[" * 500), NO_TABLE),
    "a table of megabytes": Kind(lambda s: table(s, b'{"a": "' + b"x" * 10**7 + b'"}'), NO_TABLE),
    "a length beyond all": Kind(lambda s: (2**63 - 1).to_bytes(8, "little") + s.good, NO_TABLE),
    "a gigabyte": Kind(lambda s: bytes(GIGABYTE), "1073741824 bytes where at most"),
    "an error": Kind(raising, "the node failed"),
    "a process that ends": Kind(dying, NONE),
    "huge rows of its own": Kind(times("1.notes", 1e9), "median.*limits", algorithm="rfedavg"),
    "rows that are no numbers": Kind(one_of("1.notes", NAN), "not finite", algorithm="rfedavg"),
    "a huge probe": Kind(times("", 1e9), "median.*limits.relative", "probe", "mime"),
    "a probe that is no number": Kind(one_of("", NAN), "not finite", "probe", "mime"),
}
SILENT = {"no answer, ever": Kind(hanging, "no answer within")}
GREETINGS = {
    "holds 0": Kind(lambda s: word(s, "size", 0), "0 examples, expected 1 to", "hello"),
    "holds less than 0": Kind(lambda s: word(s, "size", -5), "-5 examples", "hello"),
    "holds too many": Kind(lambda s: word(s, "size", 10**12), "limits.size", "hello"),
    "holds NaN": Kind(lambda s: raw_word(s, "size", "NaN"), NO_TABLE, "hello"),
    "holds infinity": Kind(lambda s: raw_word(s, "size", "1e999"), "expected a int", "hello"),
    "holds a fraction": Kind(lambda s: word(s, "size", 3.5), "expected a int", "hello"),
    "holds a truth": Kind(lambda s: word(s, "size", True), "expected a int", "hello"),
    "holds a text": Kind(lambda s: word(s, "size", "12"), "expected a int", "hello"),
    "is another client": Kind(lambda s: word(s, "client", 0), "client is 0, expected 2", "hello"),
    "is nobody": Kind(lambda s: word(s, "client", -1), "client is -1, expected 2", "hello"),
    "greets with garbage": Kind(lambda s: b"\xff" * 64, NO_TABLE, "hello"),
    "fails to greet": Kind(raising, "the node failed", "hello"),
}
