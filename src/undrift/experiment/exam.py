"""Judge a model on held-out examples: as a whole, class by class, client by client.

Letters: n test examples, C classes, N clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.losses import OF_CLASSES, shares
from undrift.core.task import Buffers, Task, Vec, buffers_to
from undrift.errors import DataError
from undrift.judging import Recorded, forward_seldom
from undrift.metrics import Meaning, Metric, by_site, unequal
from undrift.rounds import Fetch, fetched

OUTPUTS = ""  # stands for a model's outputs among the marks: no metric has this name


class Paper(NamedTuple):
    """What is asked: examples, and whose they are."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n, ...]
    owner: Tensor | None = None  # [n] the client of each example, -1 for nobody's
    clients: int = 0  # N
    classes: int = 0  # C; 0 leaves classes out


class Asked(NamedTuple):
    """Metrics that are computed on the host from all outputs, and how these are read."""

    metrics: tuple[Metric, ...]
    meaning: Meaning


class Exam:
    """Judges models of one task on one set of examples."""

    def __init__(
        self,
        task: Task,
        paper: Paper,
        device: torch.device,
        batch: int = 1024,
        asked: Asked | None = None,
    ) -> None:
        if len(paper.x) != len(paper.y) or not len(paper.x):
            raise DataError(
                f"a test needs at least one input and as many targets: {len(paper.x)} and "
                f"{len(paper.y)}"
            )
        self.task, self.batch, self.device = task, batch, device
        self.asked = asked if asked is not None and asked.metrics else None
        self.paper = paper._replace(x=self._moved(paper.x), y=self._moved(paper.y))
        self.labels = paper.y.cpu()
        self.owner = None if paper.owner is None else paper.owner.cpu()
        _check_values(self.paper)
        _check_classes(task, self.paper)
        self._try_one()
        self._recorded = Recorded(self._marks, device)

    def _try_one(self) -> None:
        """Refuse inputs or targets that the model or its loss cannot take, before any training."""
        w, buffers = self.task.initial()
        first = self.paper._replace(x=self.paper.x[:1], y=self.paper.y[:1])
        try:
            with torch.no_grad():
                outputs = self._some(first, w, buffers, 0)[OUTPUTS]
        except Exception as error:
            raise DataError(
                "the model or its loss fails on the test set, inputs "
                f"{list(first.x.shape[1:])} and targets {list(first.y.shape[1:])}: {error}"
            ) from error
        if self.asked is not None:
            self.asked.meaning.check(outputs, first.y, "evaluate.metrics")

    def _moved(self, values: Tensor) -> Tensor:
        dtype = self.task.dtype if values.is_floating_point() else None
        return values.to(self.device, dtype)

    def judge(self, w: Vec, buffers: Buffers) -> dict[str, Any]:
        """Give loss and metrics, and what was asked for beyond."""
        return self.judging(w, buffers).result()

    @torch.no_grad()
    def judging(self, w: Vec, buffers: Buffers) -> Marks:
        """Judge without waiting for a device."""
        recorded = self.device.type == "cuda"
        return Marks(self, self._recorded(w, buffers) if recorded else self._marks(w, buffers))

    def mean(self, name: str, w: Vec, buffers: Buffers) -> Tensor:
        """Give the mean of the loss or of a metric, where the examples are."""
        return mean(self._marks(w, buffers)[name])

    def _marks(self, w: Vec, buffers: Buffers) -> dict[str, Tensor]:
        """Give every example's loss and metrics, and their weights: [2, n] each.

        Where metrics are asked for that need them, outputs [n, ...] are among them.
        """
        kept = self.asked is not None
        pieces = [self._kept(self._some(self.paper, w, buffers, i), kept) for i in self._starts]
        return {n: torch.cat([p[n] for p in pieces], int(n != OUTPUTS)) for n in pieces[0]}

    @torch.no_grad()
    def outputs(self, w: Vec, buffers: Buffers) -> Tensor:
        """Give the model's outputs for all examples, on the host."""
        pieces = (self._some(self.paper, w, buffers, i)[OUTPUTS].cpu() for i in self._starts)
        return torch.cat(list(pieces))

    def reads(self, meaning: Meaning) -> bool:
        """Whether the model's outputs can be read so, by those of the first example."""
        w, buffers = self.task.initial()
        first = self.paper._replace(x=self.paper.x[:1], y=self.paper.y[:1])
        with torch.no_grad():
            found = self._some(first, w.to(self.device), buffers_to(buffers, self.device), 0)
        return meaning.fits(found[OUTPUTS], first.y)

    @property
    def _starts(self) -> range:
        return range(0, len(self.paper.x), self.batch)

    def _kept(self, found: dict[str, Tensor], outputs: bool) -> dict[str, Tensor]:
        return found if outputs else {n: v for n, v in found.items() if n != OUTPUTS}

    def _some(self, paper: Paper, w: Vec, buffers: Buffers, start: int) -> dict[str, Tensor]:
        part = slice(start, start + self.batch)
        x, y = paper.x[part], paper.y[part]
        mask = torch.ones(len(x), dtype=torch.bool, device=self.device)
        out = forward_seldom(self.task, w, buffers, x, mask)
        return {**marks_of(self.task, out.value, y), OUTPUTS: out.value}


def marks_of(task: Task, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Give the loss and metrics of outputs, example by example, and their weights: [2, n] each."""
    told = {"loss": task.losses(outputs, y), **task.measured(outputs, y)}
    return {n: torch.stack([s.double() for s in shares(v)]) for n, v in told.items()}


def mean(marks: Tensor) -> Tensor:
    """Give the mean of marks [2, n]: values, and what they weigh."""
    values, weights = marks
    return values.sum() / weights.sum()


class Jury:
    """Judges several models at once, each by its own exam, and tells one number of each.

    On a device all of it is one graph: exams launched one by one would wait for the host.
    """

    def __init__(self, exams: Sequence[Exam], name: str) -> None:
        self.exams, self.name, device = list(exams), name, exams[0].device
        self._told = Recorded(self._means, device) if device.type == "cuda" else self._means

    def judge(self, models: list[tuple[Vec, Buffers]]) -> list[float]:
        """Give the mean of the loss or metric of every model; waits for the device."""
        found: list[float] = self._told(models).tolist()
        return found

    @torch.no_grad()
    def _means(self, models: list[tuple[Vec, Buffers]]) -> Tensor:
        pairs = zip(self.exams, models, strict=True)
        return torch.stack([exam.mean(self.name, *model) for exam, model in pairs])


class Marks:
    """What an exam found, or still on its way from a device."""

    def __init__(self, exam: Exam, values: dict[str, Tensor]) -> None:
        outputs = values.get(OUTPUTS)
        values = {n: v for n, v in values.items() if n != OUTPUTS}
        self.exam, self.names = exam, list(values)
        self.main = "accuracy" if "accuracy" in values else "loss"
        self._means = fetched([mean(v) for v in values.values()])
        self._by_class = bool(exam.paper.classes) and self.main == "accuracy"
        self._by_client = exam.owner is not None
        # classes and clients are counted on the host, in the order of the examples
        counted = self._by_class or self._by_client
        self._each = Fetch(values[self.main]) if counted else None
        self._outputs = None if outputs is None else Fetch(outputs)

    def result(self) -> dict[str, Any]:
        """Read them; waits for the device."""
        found: dict[str, Any] = dict(zip(self.names, self._means.read().tolist(), strict=True))
        if self._each is not None:
            values = self._each.read()
            if self._by_class:
                found["per_class"] = by_class(values[0], self.exam.labels, self.exam.paper.classes)
            if self._by_client:
                assert self.exam.owner is not None
                found |= by_client(self.main, values, self.exam.owner, self.exam.paper.clients)
        if self._outputs is not None:  # what is told already is the same number
            found |= {n: v for n, v in self._asked().items() if n not in found}
        return found

    def _asked(self) -> dict[str, Any]:
        """Compute the metrics that need all outputs."""
        asked, owner = self.exam.asked, self.exam.owner
        assert asked is not None and self._outputs is not None
        outputs, (metrics, meaning) = self._outputs.read(), asked
        scores, truths = meaning.scores(outputs), meaning.truths(self.exam.labels)
        found: dict[str, Any] = {m.name: m(scores, truths) for m in metrics}
        if owner is not None:
            rows = by_site(metrics, scores, truths, meaning.owners(owner, outputs))
            for metric in metrics:
                found |= unequal(metric.name, [row.values[metric.name] for row in rows])
        return found


def by_class(hits: Tensor, labels: Tensor, classes: int) -> list[float | None]:
    """Tell which share of every class was right; None for one without examples."""
    total = torch.bincount(labels, minlength=classes)
    right = torch.bincount(labels, hits, minlength=classes)
    pairs = zip(right.tolist(), total.tolist(), strict=True)
    return [r / t if t else None for r, t in pairs]


def by_client(name: str, marks: Tensor, owners: Tensor, clients: int) -> dict[str, Any]:
    """Tell how unequal clients fare, by marks [2, n]; those without a test example do not count."""
    kept = owners >= 0
    owner, (values, weights) = owners[kept], marks[:, kept]
    total = torch.bincount(owner, weights, minlength=clients)
    each = torch.bincount(owner, values, minlength=clients)[total > 0]
    return unequal(name, (each / total[total > 0]).tolist())


def _check_values(paper: Paper) -> None:
    for name, values in (("input", paper.x), ("target", paper.y)):
        good = torch.isfinite(values).reshape(len(values), -1).all(1)
        if not bool(good.all()):
            bad = int((~good).nonzero()[0])
            raise DataError(f"{name} {bad} of the test set holds NaN or infinity: clean or drop it")


def _check_classes(task: Task, paper: Paper) -> None:
    if task.loss_name not in OF_CLASSES or paper.y.is_floating_point():
        return
    try:
        outputs = task.outputs(paper.x[:1])
    except Exception:
        return  # trying one example says more
    wrong = paper.y[(paper.y < 0) | (paper.y >= outputs)].flatten()
    if len(wrong):
        raise DataError(
            f"the test set has the label {int(wrong[0])}, but the module has {outputs} outputs: "
            f"labels run from 0 to {outputs - 1}"
        )
