"""From an agent's file to a policy's: train, judge, write both the policy and its record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from undrift.agent.judging import evaluate
from undrift.agent.settings import AgentSettings, load_agent
from undrift.agent.training import FREE, Told, Training
from undrift.experiment.environment import commit, environment
from undrift.experiment.folder import RunFolder
from undrift.experiment.spec import Experiment
from undrift.rules.policy import decode_policy, encode_policy
from undrift.state import disk

POLICY, RECORD = "policy.safetensors", "record.json"


def make_policy(
    source: str | Path,
    changes: Sequence[str],
    out: Path,
    *,
    told: Told,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Train the agent that a file describes, going on in `out`; None if it was stopped before."""
    experiment, settings = load_agent(source, changes)
    with RunFolder(out).locked():
        return _made(experiment, settings, out, told, stop)


def _made(
    experiment: Experiment, settings: AgentSettings, out: Path, told: Told, stop: Callable[[], bool]
) -> dict[str, Any] | None:
    training = Training(experiment, settings, out)
    where = environment(training.episodes.trainers[0].engine.device, len(training.history))
    if not training.run(told, stop):
        return None
    started = time.perf_counter()
    scores = evaluate(experiment, settings, training.layers())
    judging = time.perf_counter() - started
    about = {
        "name": experiment.name,
        "agent": {n: v for n, v in settings.table().items() if n not in FREE},
        "rounds": len(training.history) * settings.rounds * settings.episodes,
    }
    data = encode_policy(training.layers(), settings.steering(), about)
    record = {
        "digest": decode_policy(data, "policy").digest,
        "command": where["command"],
        "commit": commit(),
        "environment": where,
        "agent": settings.table(),
        "experiment": experiment.to_table(),
        "evaluation": {way: score.table() for way, score in scores.items()},
        "judging_seconds": judging,
        "rollouts": training.history,
    }
    disk.write_atomically(out / POLICY, [data])
    disk.write_atomically(out / RECORD, [written(record).encode()])
    return record


def written(record: dict[str, Any]) -> str:
    """Write a record as JSON, each part of it on lines of its own."""
    lines = []
    for name, value in record.items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(v, allow_nan=False)}" for v in value) + "]"
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
