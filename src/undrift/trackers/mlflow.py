"""Runs for MLflow, in the database FOLDER/mlflow/mlflow.db unless MLFLOW_TRACKING_URI is set."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from undrift.experiment.events import Record, RunInfo
from undrift.trackers.kept import Kept, keep, recall
from undrift.trackers.values import Key, key_of, need, scalars, settings, title

NAME = "mlflow"
EVERY = 2.0  # seconds between writes: one costs as much as a short round
METRICS, PARAMETERS = 1000, 100  # the most that MLflow takes at once
NAME_LENGTH, VALUE_LENGTH = 250, 500  # what every version of MLflow allows
LAST_ROUND = "round"  # a metric of ours: how far MLflow has got


class Mlflow:
    """A listener that keeps an MLflow run for each run."""

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        # It would tell its makers how it is used, from this process.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self.folder = folder.absolute() / NAME
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.database}"
        self.mlflow, self.entities = need("mlflow", NAME), need("mlflow.entities", NAME)
        if self.uri.startswith("sqlite"):
            need("sqlalchemy", NAME)
        self.client: Any = None
        self.runs: dict[Key, Logged] = {}

    @property
    def database(self) -> Path:
        """Name the file that holds everything by default."""
        return self.folder / "mlflow.db"

    def started(self, run: RunInfo, past: Sequence[Record]) -> None:
        with _quiet():
            client = self._client()
            logged = self._resume(client, run) if past else None
            logged = self.runs[key_of(run)] = logged or self._create(client, run)
        for record in past:
            logged.log(record)

    def round(self, run: RunInfo, record: Record) -> None:
        self.runs[key_of(run)].log(record)

    def finished(self, run: RunInfo, history: Sequence[Record]) -> None:
        self._end(key_of(run), "FINISHED")

    def failed(self, run: RunInfo, error: BaseException) -> None:
        self._end(key_of(run), "FAILED" if isinstance(error, Exception) else "KILLED")

    def close(self) -> None:
        for key in list(self.runs):
            self._end(key, "KILLED")

    def _client(self) -> Any:
        if self.client is None:
            if self.uri.startswith("sqlite"):
                self.folder.mkdir(parents=True, exist_ok=True)
            self.client = self.mlflow.MlflowClient(tracking_uri=self.uri)
        return self.client

    def _resume(self, client: Any, run: RunInfo) -> Logged | None:
        """Find the run that was kept; None if it is not in this store."""
        kept = recall(run, NAME)
        if kept is None:
            return None
        try:
            found = client.get_run(kept.id)
        except self.mlflow.exceptions.MlflowException:
            return None
        client.update_run(kept.id, status="RUNNING")
        return Logged(self.entities, client, kept.id, int(found.data.metrics.get(LAST_ROUND, 0)))

    def _create(self, client: Any, run: RunInfo) -> Logged:
        made = client.create_run(self._experiment(client, run.name), run_name=title(run))
        logged = Logged(self.entities, client, made.info.run_id)
        logged.describe(settings(run.experiment))
        keep(run, NAME, Kept(made.info.run_id))
        return logged

    def _experiment(self, client: Any, name: str) -> str:
        found = client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        own = self.uri == f"sqlite:///{self.database}"
        place = (self.folder / "artifacts").as_uri() if own else None
        return str(client.create_experiment(name, artifact_location=place))

    def _end(self, key: Key, status: str) -> None:
        logged = self.runs.pop(key, None)
        if logged is not None:
            logged.flush()
            logged.client.set_terminated(logged.id, status)


class Logged:
    """One run at MLflow: collects numbers and hands them over now and then."""

    def __init__(self, entities: Any, client: Any, id: str, last: int = 0) -> None:
        self.entities, self.client, self.id, self.last = entities, client, id, last
        self.waiting: list[Any] = []
        self.flushed_at = time.monotonic()

    def log(self, record: Record) -> None:
        """Take one round; MLflow cannot replace one, and one that it has is the same there."""
        step, now = record["round"], int(1000 * time.time())
        if step <= self.last:
            return
        self.last = step
        numbers = {_allowed(n): v for n, v in scalars(record).items()} | {LAST_ROUND: float(step)}
        metric = self.entities.Metric
        self.waiting += [metric(name, value, now, step) for name, value in numbers.items()]
        if len(self.waiting) >= METRICS or time.monotonic() - self.flushed_at > EVERY:
            self.flush()

    def flush(self) -> None:
        """Hand over what is waiting."""
        for part in _parts(self.waiting, METRICS):
            self.client.log_batch(self.id, metrics=part)
        self.waiting, self.flushed_at = [], time.monotonic()

    def describe(self, values: Mapping[str, Any]) -> None:
        """Write the experiment's settings as parameters."""
        # shortened names may agree, of which a tracker would take one
        named = {_allowed(n): str(v)[:VALUE_LENGTH] for n, v in values.items()}
        params = [self.entities.Param(n, v) for n, v in named.items()]
        for part in _parts(params, PARAMETERS):
            self.client.log_batch(self.id, params=part)


def _allowed(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", name)[:NAME_LENGTH]


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep MLflow from telling how it sets up its database."""
    logger = logging.getLogger("mlflow")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
