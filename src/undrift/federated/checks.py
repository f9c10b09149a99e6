"""Every answer is checked before any number of it is used."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.algorithm import Report, Row
from undrift.core.tree import Tree, named_leaves
from undrift.errors import ConfigError, ReportRefused
from undrift.federated.alone import Known, singles
from undrift.federated.grid import Answer
from undrift.federated.letters import ANYBODY, Up, read_words
from undrift.federated.shelf import mark_of
from undrift.federated.wire import Form, Malformed, unpack, words_of
from undrift.norms import FACTOR

CHANGE = "change of the model"
LARGEST = sys.float_info.max


class Limits(NamedTuple):
    """What one client may claim at most."""

    relative: float = FACTOR  # norms of what it sends, times the cohort's median; inf: any
    weight: float | None = None  # that its data decide, as q-FFL's; by default any finite one
    norm: float | None = None  # of a client's own change of the model; by default any finite one
    upload: float | None = None  # of each other tensor that it sends; by default any finite one
    size: int = 10**9  # examples

    def checked(self) -> Limits:
        """Refuse limits that nobody could keep."""
        for name, value in self._asdict().items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            good = number and value > 0 and (value < math.inf or name == "relative")
            if not good and (value is not None or name == "relative"):
                raise ConfigError(f"limits.{name} = {value!r} must be a finite number above 0")
        if self.relative < 1:
            raise ConfigError(
                f"limits.relative = {self.relative!r} must be at least 1, the cohort's median; inf "
                "lifts the limit"
            )
        return self


class Expected(NamedTuple):
    """What the server asked of one client, and may therefore expect."""

    client: int
    steps: int = 0
    known: Known = Known(1.0, 0.0, ())
    counters: Tensor | None = None  # BatchNorm's counters, as they were sent down
    change: Callable[[Tree], float] | None = None  # how long a change a report stands for


class Accepted(NamedTuple):
    """An answer that passed."""

    client: int
    words: Up
    tree: Tree
    mark: str  # names the report
    norms: dict[str, float]  # of what it sends, tensor by tensor, and of its change


class Gate:
    """Lets through what was asked for: of these nodes, in this phase and round, once each."""

    def __init__(
        self,
        phase: str,
        run: str,
        round: int,
        form: Form,
        asked: Mapping[int, Expected],
        limits: Limits,
        free: Sequence[bool] = (),
    ) -> None:
        self.phase, self.run, self.round, self.free = phase, run, round, free
        self.form, self.asked, self.limits = form, dict(asked), limits
        self.seen: set[int] = set()  # nodes whose answer was taken
        self.judged: set[int] = set()  # nodes that sent anything
        self.lost: dict[int, str] = {}  # nodes of which the transport says why nothing came

    def admit(self, answer: Answer) -> Accepted:
        """Check an answer; raises `ReportRefused`, which names the client and the cause."""
        wanted = self.asked.get(answer.node)
        if wanted is None:
            raise self.refused(None, f"node {answer.node} was not asked")
        self.judged.add(answer.node)
        if answer.node in self.seen:
            raise self.refused(wanted.client, "a second answer")
        if answer.failed:
            raise self.refused(wanted.client, f"the node failed ({answer.failed})")
        try:
            accepted = self._read(answer, wanted)
        except Malformed as error:
            raise self.refused(wanted.client, str(error)) from error
        self.seen.add(answer.node)
        return accepted

    def refused(self, client: int | None, cause: str) -> ReportRefused:
        """Make the error that names the client and the cause."""
        return ReportRefused(client, self.round, self.phase, cause)

    def _read(self, answer: Answer, wanted: Expected) -> Accepted:
        if len(answer.data) > self.form.most_bytes:
            told = f"{len(answer.data)} bytes where at most {self.form.most_bytes} are expected"
            raise Malformed(told)
        words: Up = read_words(Up, words_of(answer.data, self.form.most_words))
        self._check_words(words, wanted)
        tree = unpack(answer.data, self.form)[1]
        check_finite(tree)
        beside, norms = tree, dict[str, float]()
        if self.phase == "train":
            report, row = tree
            check_report(report, row, wanted, self.limits, self.free)
            if wanted.change is not None:
                norms[CHANGE] = check_change(wanted.change(report.total), self.limits)
            floats, weight = report.buffers
            beside = {"uploads": report.uploads, "buffers": floats / weight, "notes": row.notes}
        norms |= norms_of(beside)
        check_uploads(norms, self.limits)
        return Accepted(words.client, words, tree, mark_of(answer.data), norms)

    def _check_words(self, words: Up, wanted: Expected) -> None:
        if words.failed:
            told = "".join(c if c.isprintable() else "?" for c in words.failed[:300])
            raise Malformed(f"the node failed ({told})")
        known = words.client if wanted.client == ANYBODY else wanted.client
        mine = Up(self.phase, self.run, self.round, known)
        for name in ("phase", "run", "round", "client"):
            found, right = getattr(words, name), getattr(mine, name)
            if found != right:
                raise Malformed(f"{name} is {str(found)[:40]}, expected {right}")
        if self.phase == "hello" and not 1 <= words.size <= self.limits.size:
            most = f"{self.limits.size} (limits.size)"
            raise Malformed(f"{words.size} examples, expected 1 to {most}")


def check_finite(tree: Tree) -> None:
    """Refuse a number that is none, and those whose squares are not finite, as clients do."""
    for name, leaf in named_leaves(tree).items():
        if not leaf.is_floating_point():
            continue
        if not bool(torch.isfinite(leaf).all()):
            raise Malformed(f"{name!r} is not finite")
        if not bool(torch.isfinite(leaf.square().sum())):
            raise Malformed(f"{name!r} has squares that are not finite")


def norms_of(tree: Tree) -> dict[str, float]:
    """Measure the tensors of a tree; a single number has no norm."""
    return {
        name: float(torch.linalg.vector_norm(leaf.double()))
        for name, leaf in named_leaves(tree).items()
        if leaf.dim() and leaf.is_floating_point()
    }


def check_uploads(norms: Mapping[str, float], limits: Limits) -> None:
    """Refuse a tensor that is too long; a change has a limit of its own."""
    most = LARGEST if limits.upload is None else limits.upload
    for name, length in norms.items():
        if name != CHANGE and not length <= most:
            raise Malformed(f"{name!r} has the norm {length:.6g}, at most {most:.6g}")


def check_change(length: float, limits: Limits) -> float:
    """Refuse a change of the model that is too long; gives its norm."""
    most = LARGEST if limits.norm is None else limits.norm * (1 + 1e-6)
    if not length <= most:
        raise Malformed(f"a change of norm {length:.6g}, at most {most:.6g}")
    return length


def check_report(
    report: Report, row: Row, wanted: Expected, limits: Limits, free: Sequence[bool]
) -> None:
    """Refuse what no honest client can send, whatever the algorithm.

    `free` tells which of the single numbers that are lifted its data decide.
    """
    if not bool(row.accepted):
        raise Malformed("the client says itself that its update is not finite")
    known = wanted.known
    _equal("count", report.count, 1)
    _equal("steps", row.steps, wanted.steps)
    _equal("weight", report.buffers[1], known.weight)
    _equal("path", report.path, known.path)
    most = math.inf if limits.weight is None else limits.weight
    pairs = zip(free, singles(report.total), known.lifted, strict=True)
    for number, (open_one, value, right) in enumerate(pairs):
        name = f"weight {number} of the total"
        if open_one and not 0 < value <= most:
            raise Malformed(f"{name} = {value:.6g} is outside (0, {most:.6g}]")
        if not open_one:
            _equal(name, value, right)
    _check_rest(row, wanted)


def _check_rest(row: Row, wanted: Expected) -> None:
    if float(row.length) < 0:
        raise Malformed(f"length = {float(row.length):.6g} is below 0")
    if wanted.counters is not None and row.counters.numel():
        ahead = row.counters - wanted.counters
        if bool((ahead < 0).any()) or bool((ahead > wanted.steps).any()):
            raise Malformed("its counters of batches do not follow from those it was sent")


def _equal(name: str, value: Any, right: float) -> None:
    if not math.isclose(float(value), right, rel_tol=1e-6):
        raise Malformed(f"{name} = {float(value):.6g}, expected {right:.6g}")
