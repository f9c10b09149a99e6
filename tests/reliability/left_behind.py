"""What a command leaves in its folder, by all that must be the same however it was stopped."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from undrift.state.checkpoint import read


def results(out: Path) -> dict[str, str]:
    """Digest every file by what must be the same however often a command was stopped."""
    files = [p for p in sorted(out.rglob("*")) if p.is_file()]
    return {str(p.relative_to(out)): digest(p) for p in files}


# starts and times; rows lie where there was room; one that is left of a fleet has a plan of its own
THERE = ("environment.json", "report.html", "about.json", "clients.rows", "plan.json")
TIMED = (
    *("seconds", "judging_seconds", "sessions", "commit", "commits", "environment", "at"),
    *("command", "plan"),
)


def untimed(value: object) -> object:
    """Leave out what tells of time and place, at every depth."""
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if k not in TIMED}
    return [untimed(v) for v in value] if isinstance(value, list) else value


def digest(path: Path) -> str:
    name = path.name
    if name in THERE:
        return "is there"
    if name == "rounds.jsonl":
        kept = [untimed(json.loads(line)) for line in path.read_bytes().splitlines()]
    elif name.endswith(".json"):
        kept = untimed(json.loads(path.read_text()))
    elif name.endswith(".undrift"):
        found = read(path)
        tensors = {n: t for n, t in found.tensors.items() if n != "clients.slots"}
        meta = untimed(json.loads(json.dumps(found.meta, default=str)))
        made = hashlib.sha256(repr((found.round, meta)).encode())
        for key in sorted(tensors):
            flat = tensors[key].contiguous().reshape(-1).view(torch.uint8)
            made.update(key.encode() + flat.numpy().tobytes())
        return made.hexdigest()
    else:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    names = sorted(found.keys() | expected.keys())
    return [n for n in names if found.get(n) != expected.get(n)]
