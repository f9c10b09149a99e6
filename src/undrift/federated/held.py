"""The reports of a round, held until it is known which of them count."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

from numpy.typing import ArrayLike

from undrift.core.tree import EMPTY, Tree
from undrift.errors import FederationError
from undrift.federated.checks import CHANGE, Accepted
from undrift.federated.wire import Form, pack, unpack
from undrift.norms import bounds, middle
from undrift.state import disk


class Held:
    """Reports by client: in memory, or in a temporary file where memory is for a few at a time."""

    def __init__(self, form: Form, *, in_file: bool) -> None:
        self._form, self._trees = form, dict[int, Tree]()
        self._file = tempfile.TemporaryFile(buffering=0) if in_file else None  # noqa: SIM115
        self._places: dict[int, tuple[int, int]] = {}
        self.accepted: dict[int, Accepted] = {}

    def add(self, found: Mapping[int, Accepted]) -> None:
        """Take in answers that passed."""
        for client, one in found.items():
            self.accepted[client] = one._replace(tree=EMPTY)
            if self._file is None:
                self._trees[client] = one.tree
            else:
                self._places[client] = self._written(pack(one.tree, {}))

    def tree(self, client: int) -> Tree:
        """Give what a client has sent."""
        if self._file is None:
            return self._trees[client]
        start, length = self._places[client]
        data, file = b"", self._file.fileno()
        while more := os.pread(file, length - len(data), start + len(data)):
            data += more  # a system call gives 2 GB at most
        return unpack(data, self._form)[1]

    def drop(self, client: int) -> None:
        """Let go of a report that does not count."""
        del self.accepted[client]
        self._trees.pop(client, None)

    def close(self) -> None:
        """Let go of everything."""
        self._trees.clear()
        if self._file is not None:
            self._file.close()

    def _written(self, data: bytes) -> tuple[int, int]:
        assert self._file is not None, "in_file"
        try:
            start = self._file.seek(0, os.SEEK_END)
            disk.write_all(self._file.fileno(), data)
        except OSError as error:
            raise FederationError(
                f"a report of {len(data)} bytes cannot be held in {tempfile.gettempdir()} "
                f"({error.strerror}): set TMPDIR to a disk with room for a cohort's reports, or "
                "leave out patience.at_once, and memory holds them"
            ) from error
        return start, len(data)


def too_long(
    norms: Mapping[int, Mapping[str, float]],
    work: ArrayLike,
    factor: float,
    before: float,
    beside: float = 0.0,
) -> dict[int, str]:
    """Find the clients of whom something is far longer than the cohort's median, and say what.

    `work` tells how much each of them does, and `before` the median of the changes that were
    counted last: the only measure where one report has come.  What is sent beside the change may
    be `factor` squared times as long: some rows are squares of changes.  `beside` is the median of
    the longest of it that silos have sent so far: a control variate is long in a silo's first
    report and short in all others.
    """
    found: dict[int, str] = {}
    for name in {name: None for sent in norms.values() for name in sent}:
        lengths = [sent[name] for sent in norms.values()]
        typical = middle(lengths) if sum(length > 0 for length in lengths) > 1 else 0.0
        typical = max(typical, before if name == CHANGE else beside)
        if not typical:
            continue  # nobody knows what is usual
        allowed = bounds(typical, work, factor if name == CHANGE else factor**2).tolist()
        for client, length, most in zip(norms, lengths, allowed, strict=True):
            if not length <= most * (1 + 1e-6):
                told = (
                    f"the norm of its {name} is {length:.4g}, the cohort's median {typical:.4g}; "
                    f"at most {most:.4g} (limits.relative = {factor:g} in federation.toml; inf "
                    "lifts the limit)"
                )
                found.setdefault(client, told)
    return found
