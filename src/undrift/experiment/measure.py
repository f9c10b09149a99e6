"""What is written down after a round.

Names: `test_...` judges the first of the models asked for, `avg_test_...` and `all_test_...` the
others; `train_...` is the mean over participants; `norm_...` are Euclidean norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm, Server
from undrift.core.task import Vec
from undrift.core.transfer import send
from undrift.core.tree import leaves, named_leaves, replace
from undrift.experiment.exam import Exam
from undrift.experiment.sections import Evaluation
from undrift.metrics import (
    Meaning,
    Metric,
    Sites,
    all_metrics,
    evaluation,
    metrics_for,
    site_table,
)
from undrift.replay import weighs_by_size
from undrift.rounds import RoundResult, fetched
from undrift.rules.observe import LastModel, Seen, Watch
from undrift.trainer import Trainer

Later = Callable[[], dict[str, Any]]  # what it gives waits for a device
CLIENTS_AT_A_TIME = 64  # last models that are read together


def watched(algorithm: Algorithm, evaluation: Evaluation) -> Algorithm:
    """Add the rules that look at clients' models, first, where measurements need them."""
    added: list[Any] = []
    if evaluation.drift or "avg" in evaluation.models:
        added.append(Watch(by_size=weighs_by_size(algorithm)))
    if "all" in evaluation.models:
        added.append(LastModel())
    return replace(algorithm, rules=(*added, *algorithm.rules)) if added else algorithm


class Measure:
    """Turns a round into a record."""

    def __init__(
        self,
        trainer: Trainer,
        evaluation: Evaluation,
        exams: dict[str, Exam],
        meaning: Meaning | None = None,
        sites: Mapping[str, Sites] | None = None,
    ) -> None:
        self.trainer, self.evaluation, self.exams = trainer, evaluation, exams
        self.meaning, self.sites = meaning, dict(sites or {})
        self.before = trainer.server  # as the last round found it

    def record(self, result: RoundResult, last: bool) -> dict[str, Any]:
        """Write down a round that was just trained; the last one is always judged."""
        return self.told(result, self.measuring(result.round, last)())

    def measuring(self, round: int, last: bool) -> Later:
        """Measure the model as it is after a round, without waiting for a device."""
        found = [nothing]
        if last or round % self.evaluation.every == 0:
            found = [self.judging(), self.norming()]
        self.before = self.trainer.server
        return lambda: {name: value for some in found for name, value in some().items()}

    def told(self, result: RoundResult, judged: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write down what a round tells of itself, and what else was found."""
        bytes_each = self.trainer.task.dtype.itemsize
        return {
            "round": result.round,
            **(judged or {}),
            "train_loss": result.loss,
            **_prefixed("train", result.scores),
            "seconds": result.seconds,
            "client_steps": result.steps,
            "bytes_down": result.floats_down * bytes_each,
            "bytes_up": result.floats_up * bytes_each,
            "clients": sorted(result.ids),
            "skipped": result.skipped,
        }

    # -- models to judge -----------------------------------------------------------------------
    def judged(self) -> dict[str, Any]:
        """Judge every model that was asked for on every set of examples."""
        return self.judging()()

    def judging(self) -> Later:
        """Judge without waiting for a device."""
        server, marks = self.trainer.server, {}
        for number, name in enumerate(self.evaluation.models):
            w = self.model(name)
            for exam_name, exam in self.exams.items():
                prefix = exam_name if number == 0 else f"{name}_{exam_name}"
                marks[prefix] = exam.judging(w, server.buffers)

        def read() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for prefix, some in marks.items():
                found |= renamed(prefix, some.result())
            return found

        return read

    def model(self, name: str) -> Vec:
        """Give the server's model, the mean of the cohort's, or of everybody's last ones."""
        if name == "cloud":
            return self.trainer.server.w
        if name == "avg":
            return _seen(self.trainer.server).average
        return self._mean_of_all()

    def _mean_of_all(self) -> Vec:
        trainer = self.trainer
        place = [isinstance(r, LastModel) for r in trainer.algorithm.rules].index(True)
        ids = trainer.enrolled
        sizes = trainer.federation.available(trainer.rounds_done - 1)[ids].double()
        by_size = weighs_by_size(trainer.algorithm)
        weights = send(sizes if by_size else (sizes > 0).double(), trainer.engine.device)
        total = torch.zeros_like(trainer.server.w, dtype=torch.float64)
        for start in range(0, len(ids), CLIENTS_AT_A_TIME):
            part = slice(start, start + CLIENTS_AT_A_TIME)
            models: Tensor = trainer.store.gather(ids[part])[place]
            total += weights[part] @ models.double()
        return (total / weights.sum()).to(trainer.server.w.dtype)

    def whole(self) -> dict[str, Any] | None:
        """Judge the server's model by every metric, with curves and every site.

        None where nothing is tested, or outputs are no scores of the targets.
        """
        names = [n for n in ("test", "own", "validation") if n in self.exams]
        if self.meaning is None or not names or not self.exams[names[0]].reads(self.meaning):
            return None
        server, meaning = self.trainer.server, self.meaning
        metrics = every_metric(self.evaluation, meaning)
        outputs = {n: self.exams[n].outputs(server.w, server.buffers) for n in names[:2]}
        first = names[0]
        found = {"model": "cloud", "round": self.trainer.rounds_done, "examples_of": first}
        found |= evaluation(meaning, metrics, outputs[first], self.exams[first].labels)
        named = [n for n in ("own", "test") if n in self.sites and n in outputs]
        if named:
            each = named[0]
            labels, sites = self.exams[each].labels, self.sites[each]
            found["sites_of"] = each
            found["sites"] = site_table(meaning, metrics, outputs[each], labels, sites)
        return found

    # -- norms and drift -----------------------------------------------------------------------
    def norms(self) -> dict[str, float]:
        """Measure model, update and the server's states; with `drift` also the cohort's spread."""
        return self.norming()()

    def norming(self) -> Later:
        """Measure norms without waiting for a device."""
        server = self.trainer.server
        states = _vectors(self.trainer.algorithm, server)
        found = {"norm_model": server.w, "norm_update": server.w - self.before.w}
        found |= {f"norm_{n}": v for n, v in states.items()}
        numbers = {n: torch.linalg.vector_norm(v) for n, v in found.items()}
        if self.evaluation.drift:
            seen = _seen(server)
            numbers["norm_average"] = torch.linalg.vector_norm(seen.average)
            numbers["norm_offset"] = torch.linalg.vector_norm(seen.average - server.w)
            numbers["drift"] = seen.spread / seen.length
            step = self.before.w - seen.average
            offset = _seen(self.before).average - self.before.w  # h of FedDyn and AdaBest
            numbers["cos_offset"] = _cosine(offset, step)
            numbers |= {f"cos_{n}": _cosine(v, step) for n, v in states.items()}
        fetch = fetched([v.double() for v in numbers.values()])
        return lambda: dict(zip(numbers, fetch.read().tolist(), strict=True))


def every_metric(evaluation: Evaluation, meaning: Meaning) -> list[Metric]:
    """Give all metrics that the targets have, those asked for first."""
    kind, quantile = meaning.kind, meaning.quantile
    asked = metrics_for(evaluation.metrics, kind, "evaluate.metrics", quantile)
    known = {m.name for m in asked}
    return [*asked, *(m for m in all_metrics(kind, quantile) if m.name not in known)]


def nothing() -> dict[str, Any]:
    """Stand for a round that is not judged."""
    return {}


def _seen(server: Server) -> Seen:
    """Give what the watching rule saw of the last cohort."""
    return next(s for s in server.states if isinstance(s, Seen))


def _vectors(algorithm: Algorithm, server: Server) -> dict[str, Tensor]:
    """Name the states of the size of the model, e.g. {"Scaffold": c}."""
    found: dict[str, Tensor] = {}
    for rule, state in zip(algorithm.chain, server.states, strict=True):
        if rule.observes or not leaves(state):
            continue
        for name, leaf in named_leaves(state).items():
            if leaf.shape == server.w.shape:
                found[type(rule).__name__ + (f".{name}" if name else "")] = leaf
    return found


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    lengths = torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)
    return torch.where(lengths > 0, (a @ b) / lengths, torch.zeros_like(lengths))


def _prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}_{n}": v for n, v in values.items()}


def renamed(prefix: str, found: dict[str, Any]) -> dict[str, Any]:
    """`test_accuracy`, but `per_class` and `client_...` of the first model speak for themselves."""
    plain = ("per_class", "client_") if prefix in ("test", "own") else ()
    return {n if n.startswith(plain) else f"{prefix}_{n}": v for n, v in found.items()}
