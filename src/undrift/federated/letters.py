"""The words in front of a message: who asks whom what, in which round of which run.

A round is up to three exchanges: `probe` (where a rule reads the cohort's mean probe), `train`, and
`look` (where a rule asks for a second look at the new model).  `hello` comes before all of them.
Tables are agreed on before the first round: `sums` asks up to three questions, `prepare` hands out
what was made of the answers; `model` hands out the last model.
What goes down is one message to everybody and a small one to each client; what comes up is one
message from each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_origin, get_type_hints

from undrift.federated.wire import About, Malformed

PHASES = ("hello", "sums", "prepare", "probe", "train", "look", "model")
LONG = ("sums", "prepare")  # phases whose words may take `letter_bytes`
ANYBODY = -1  # the client of a node that is asked in `hello` who it is
NOTHING: dict[str, Any] = {}
FRESH = ""  # the base of a client none of whose reports has been counted


class Down(NamedTuple):
    """The words to everybody."""

    phase: str
    run: str
    round: int
    plan: str  # names the experiment: both sides must have the same
    clients: int  # ids in use
    features: int
    told: dict[str, Any] = NOTHING  # a question, a preparation, the length of a file


class DownOwn(NamedTuple):
    """The words to one client."""

    phase: str
    run: str
    round: int
    client: int
    base: str  # the report of this client that was counted last, or FRESH


class Up(NamedTuple):
    """The words of an answer."""

    phase: str
    run: str
    round: int
    client: int
    failed: str = ""  # why there is nothing else
    size: int = 0  # examples held; told in `hello` and `prepare` alone
    told: dict[str, Any] = NOTHING  # the answer to a question


def named(names: Sequence[str], client: int) -> str:
    """Name a client, by its number and, where it has one, by its name.

    >>> named(("north", "south"), 1), named((), 1)
    ('client 1 (south)', 'client 1')
    """
    name = names[client] if 0 <= client < len(names) else ""
    return f"client {client} ({name})" if name else f"client {client}"


def words(letter: Any) -> About:
    """Write words down as plain JSON."""
    return dict(letter._asdict())


def read_words(kind: type[Any], about: About) -> Any:
    """Read words of one kind: exactly its names, each of its type."""
    types = get_type_hints(kind)
    if about.keys() != types.keys():
        raise Malformed(f"its words are {sorted(about)[:8]}, expected {sorted(types)}")
    for name, wanted in types.items():
        kind_of = get_origin(wanted) or wanted
        if type(about[name]) is not kind_of:
            raise Malformed(f"{name} is {str(about[name])[:40]!r}, expected a {kind_of.__name__}")
    if about["phase"] not in PHASES:
        raise Malformed(f"phase {about['phase'][:40]!r} is none of {', '.join(PHASES)}")
    return kind(**about)
