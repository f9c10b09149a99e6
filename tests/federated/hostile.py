"""Answers that no honest client sends: functions of a good one and of a number that varies them."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch

from undrift.federated.wire import MARK, Form, _encoded, unpack

Bad = Callable[[bytes, Form, random.Random], bytes]
KINDS: dict[str, Bad] = {}


def kind(name: str) -> Callable[[Bad], Bad]:
    def keep(function: Bad) -> Bad:
        KINDS[name] = function
        return function

    return keep


class Opened:
    """A good answer, taken apart."""

    def __init__(self, data: bytes, form: Form) -> None:
        self.about, tree = unpack(data, form)
        self.form = form
        from undrift.core.tree import named_leaves

        self.parts = {n: v.clone() for n, v in named_leaves(tree).items()}

    def write(self) -> bytes:
        return _encoded(self.parts, self.about)

    def floats(self) -> list[str]:
        return [n for n, v in self.parts.items() if v.is_floating_point() and v.numel()]

    def vectors(self) -> list[str]:
        return [n for n, v in self.parts.items() if v.dim() and v.numel() > 1]


def number(name: str, value: float) -> None:
    """Register: one number of one tensor becomes this."""

    @kind(name)
    def made(data: bytes, form: Form, draw: random.Random) -> bytes:
        opened = Opened(data, form)
        leaf = opened.parts[draw.choice(opened.floats())].view(-1)
        leaf[draw.randrange(len(leaf))] = value
        return opened.write()


number("nan", float("nan"))
number("infinity", float("inf"))
number("minus infinity", -float("inf"))


def scalar(name: str, field: str, value: Callable[[torch.Tensor], Any]) -> None:
    """Register: a single number of the report becomes something else."""

    @kind(name)
    def made(data: bytes, form: Form, draw: random.Random) -> bytes:
        opened = Opened(data, form)
        old = opened.parts[field]
        opened.parts[field] = torch.as_tensor(value(old), dtype=old.dtype)
        return opened.write()


scalar("weight negative", "0.total.1", lambda w: -w)
scalar("weight zero", "0.total.1", lambda w: 0)
scalar("weight huge", "0.total.1", lambda w: 1e18)
scalar("weight twice", "0.total.1", lambda w: 2 * w)
scalar("batchnorm weight huge", "0.buffers.1", lambda w: 1e18)
scalar("counted twice", "0.count", lambda c: 2)
scalar("other steps", "1.steps", lambda s: s + 1)
scalar("other path", "0.path", lambda s: s * 3)
scalar("says it is not finite", "1.accepted", lambda a: False)
scalar("negative length", "1.length", lambda a: -1.0)


@kind("broadcastable shape")
def one_number(data: bytes, form: Form, draw: random.Random) -> bytes:
    opened = Opened(data, form)
    name = draw.choice(opened.vectors())
    opened.parts[name] = opened.parts[name].reshape(-1)[:1]
    return opened.write()


@kind("other shape")
def other_shape(data: bytes, form: Form, draw: random.Random) -> bytes:
    opened = Opened(data, form)
    name = draw.choice(opened.vectors())
    opened.parts[name] = opened.parts[name].reshape(-1)[
        : draw.randrange(opened.parts[name].numel())
    ]
    return opened.write()


@kind("one more axis")
def more_axes(data: bytes, form: Form, draw: random.Random) -> bytes:
    opened = Opened(data, form)
    name = draw.choice(list(opened.parts))
    opened.parts[name] = opened.parts[name][None]
    return opened.write()


@kind("other type")
def other_type(data: bytes, form: Form, draw: random.Random) -> bytes:
    opened = Opened(data, form)
    name = draw.choice(opened.floats())
    opened.parts[name] = opened.parts[name].to(
        draw.choice([torch.float32, torch.int64, torch.float16])
    )
    return opened.write()


@kind("missing tensor")
def missing(data: bytes, form: Form, draw: random.Random) -> bytes:
    opened = Opened(data, form)
    del opened.parts[draw.choice(list(opened.parts))]
    return opened.write()


@kind("one tensor more")
def extra(data: bytes, form: Form, draw: random.Random) -> bytes:
    opened = Opened(data, form)
    opened.parts[f"more.{draw.random()}"] = torch.zeros(1)
    return opened.write()


@kind("renamed tensor")
def renamed(data: bytes, form: Form, draw: random.Random) -> bytes:
    opened = Opened(data, form)
    name = draw.choice(list(opened.parts))
    opened.parts[name + "x"] = opened.parts.pop(name)
    return opened.write()


def word(name: str, field: str, value: Callable[[Any, random.Random], Any]) -> None:
    """Register: one of the words in front becomes something else."""

    @kind(name)
    def made(data: bytes, form: Form, draw: random.Random) -> bytes:
        opened = Opened(data, form)
        opened.about[field] = value(opened.about[field], draw)
        return opened.write()


word("an earlier round", "round", lambda r, d: r - d.randrange(1, 9))
word("a later round", "round", lambda r, d: r + d.randrange(1, 9))
word("another client", "client", lambda c, d: c + d.randrange(1, 9))
word("another run", "run", lambda r, d: "0" * 32)
word("another phase", "phase", lambda p, d: d.choice(["look", "probe", "hello", "dance"]))
word("a round that is no number", "round", lambda r, d: d.choice([None, True, "1", [1], 1.0]))
word("one word more", "failed", lambda f, d: {"more": 1})


@kind("words missing")
def wordless(data: bytes, form: Form, draw: random.Random) -> bytes:
    opened = Opened(data, form)
    del opened.about[draw.choice(list(opened.about))]
    return opened.write()


@kind("cut off")
def cut_off(data: bytes, form: Form, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


@kind("hanging over")
def hanging_over(data: bytes, form: Form, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.randrange(1, 64))


@kind("pickled")
def pickled(data: bytes, form: Form, draw: random.Random) -> bytes:
    return pickle.dumps({"w": [draw.random()]})


@kind("noise")
def noise(data: bytes, form: Form, draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(2000))


@kind("a table that lies about its length")
def lying(data: bytes, form: Form, draw: random.Random) -> bytes:
    return draw.choice([0, 1, 2**40, 2**63, len(data)]).to_bytes(8, "little") + data[8:]


def table_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_table(text: bytes, body: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + body


@kind("a bloated table")
def bloated(data: bytes, form: Form, draw: random.Random) -> bytes:
    table, body = table_of(data)
    table["__metadata__"]["more"] = "x" * draw.randrange(5_000, 100_000)
    return with_table(json.dumps(table).encode(), body)


@kind("a deep table")
def deep(data: bytes, form: Form, draw: random.Random) -> bytes:
    return with_table(b'{"__metadata__": ' + b"[" * draw.randrange(100, 600), b"")


@kind("a name that stands twice")
def twice(data: bytes, form: Form, draw: random.Random) -> bytes:
    table, body = table_of(data)
    name = draw.choice([n for n in table if n != "__metadata__"])
    text = json.dumps(table)[:-1] + f', "{name}": {json.dumps(table[name])}}}'
    return with_table(text.encode(), body)


@kind("tensors on top of each other")
def overlapping(data: bytes, form: Form, draw: random.Random) -> bytes:
    table, body = table_of(data)
    full = [n for n, leaf in form.leaves.items() if leaf.num_bytes]
    one, other = draw.sample(full, 2)
    table[one]["data_offsets"] = table[other]["data_offsets"]
    return with_table(json.dumps(table).encode(), body)


@kind("offsets beyond the end")
def beyond(data: bytes, form: Form, draw: random.Random) -> bytes:
    table, body = table_of(data)
    name = draw.choice([n for n in table if n != "__metadata__"])
    table[name]["data_offsets"] = [
        v + draw.randrange(1, 10**6) for v in table[name]["data_offsets"]
    ]
    return with_table(json.dumps(table).encode(), body)


@kind("words that are no table")
def no_words(data: bytes, form: Form, draw: random.Random) -> bytes:
    table, body = table_of(data)
    table["__metadata__"] = {MARK: draw.choice(["", "[]", "1", "NaN", '{"a": NaN}', "{" * 50])}
    return with_table(json.dumps(table).encode(), body)


@kind("a truth value of 2")
def two(data: bytes, form: Form, draw: random.Random) -> bytes:
    table, body = table_of(data)
    at = table["1.accepted"]["data_offsets"][0]
    return with_table(json.dumps(table).encode(), body[:at] + b"\2" + body[at + 1 :])


@kind("far too long")
def too_long(data: bytes, form: Form, draw: random.Random) -> bytes:
    return data + bytes(draw.randrange(form.most_bytes, 4 * form.most_bytes))


@kind("nothing")
def nothing(data: bytes, form: Form, draw: random.Random) -> bytes:
    return b"\0" * draw.randrange(8)
