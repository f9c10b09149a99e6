"""Judge a model on held-out examples: as a whole, class by class, client by client.

Letters: n test examples, C classes, N clients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.ops import Pass
from undrift.core.task import Batch, Buffers, Task, Vec, per_example
from undrift.errors import DataError


class Paper(NamedTuple):
    """What is asked: examples, and whose they are."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n, ...]
    owner: Tensor | None = None  # [n] the client of each example, -1 for nobody's
    clients: int = 0  # N
    classes: int = 0  # C; 0 leaves classes out


class Exam:
    """Judges models of one task on one set of examples."""

    def __init__(self, task: Task, paper: Paper, device: torch.device, batch: int = 1024) -> None:
        if len(paper.x) != len(paper.y) or not len(paper.x):
            raise DataError(
                f"a test needs at least one input and as many targets: {len(paper.x)} and "
                f"{len(paper.y)}"
            )
        self.task, self.batch, self.device = task, batch, device
        owner = None if paper.owner is None else paper.owner.to(device)
        self.paper = paper._replace(x=self._moved(paper.x), y=self._moved(paper.y), owner=owner)
        _check_values(self.paper)
        _check_classes(task, self.paper)
        self._try_one()

    def _try_one(self) -> None:
        """Refuse inputs or targets that the model or its loss cannot take, before any training."""
        w, buffers = self.task.initial()
        first = self.paper._replace(x=self.paper.x[:1], y=self.paper.y[:1])
        try:
            with torch.no_grad():
                self._some(first, w, buffers, 0)
        except Exception as error:
            raise DataError(
                "the model or its loss fails on the test set, inputs "
                f"{list(first.x.shape[1:])} and targets {list(first.y.shape[1:])}: {error}"
            ) from error

    def _moved(self, values: Tensor) -> Tensor:
        dtype = self.task.dtype if values.is_floating_point() else None
        return values.to(self.device, dtype)

    @torch.no_grad()
    def judge(self, w: Vec, buffers: Buffers) -> dict[str, Any]:
        """Give loss and metrics, and what was asked for beyond."""
        starts = range(0, len(self.paper.x), self.batch)
        pieces = [self._some(self.paper, w, buffers, i) for i in starts]
        values = {n: torch.cat([p[n] for p in pieces]).double() for n in pieces[0]}
        found: dict[str, Any] = {n: float(v.mean()) for n, v in values.items()}
        main = "accuracy" if "accuracy" in values else "loss"
        if self.paper.classes and main == "accuracy":
            found["per_class"] = self._by_class(values[main])
        if self.paper.owner is not None:
            found |= self._by_client(main, values[main])
        return found

    def _some(self, paper: Paper, w: Vec, buffers: Buffers, start: int) -> dict[str, Tensor]:
        part = slice(start, start + self.batch)
        x, y = paper.x[part], paper.y[part]
        mask = torch.ones(len(x), dtype=torch.bool, device=self.device)
        out = self.task.forward(w, buffers, x, Pass(mask, None, False))
        seen = Batch(x, y, mask, mask.long())
        metrics = {n: per_example(m(out.value, seen.y)) for n, m in self.task.metrics.items()}
        return {"loss": self.task.losses(out.value, y), **metrics}

    def _by_class(self, hits: Tensor) -> list[float | None]:
        total = torch.bincount(self.paper.y, minlength=self.paper.classes)
        right = torch.bincount(self.paper.y, hits, minlength=self.paper.classes)
        pairs = zip(right.tolist(), total.tolist(), strict=True)
        return [r / t if t else None for r, t in pairs]

    def _by_client(self, name: str, values: Tensor) -> dict[str, float]:
        """Tell how unequal clients fare; those without a test example do not count."""
        assert self.paper.owner is not None
        kept = self.paper.owner >= 0
        owner = self.paper.owner[kept]
        total = torch.bincount(owner, minlength=self.paper.clients)
        each = torch.bincount(owner, values[kept], minlength=self.paper.clients)[total > 0]
        each = each / total[total > 0]
        worst_first = each.sort(descending=name == "loss").values
        tenth = worst_first[: max(1, round(0.1 * len(each)))]
        return {
            f"client_{name}_mean": float(each.mean()),
            f"client_{name}_std": float(each.std(correction=0)),
            f"client_{name}_worst": float(worst_first[0]),
            f"client_{name}_worst10": float(tenth.mean()),
        }


def _check_values(paper: Paper) -> None:
    for name, values in (("input", paper.x), ("target", paper.y)):
        good = torch.isfinite(values).reshape(len(values), -1).all(1)
        if not bool(good.all()):
            bad = int((~good).nonzero()[0])
            raise DataError(f"{name} {bad} of the test set holds NaN or infinity: clean or drop it")


def _check_classes(task: Task, paper: Paper) -> None:
    if task.loss_name != "cross_entropy" or paper.y.is_floating_point():
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
