"""undrift and other simulators on the same work, in one run: CPU and wall seconds per round.

    python benchmarks/peers.py                          all peers, both works
    python benchmarks/peers.py --peers undrift pfl      some of them
    python benchmarks/peers.py --tiny                   undrift and the hand loop on little work

Each peer gets an environment of its own under `--envs`, made once with pip.  Peers are checked
first: five clients, all taking part, one round on batches in stored order from the same first
model must give the model that the hand-written loop gives, and the loss must fall.  Then they take
turns (A B C A B C ...), each turn a process of its own; its first rounds warm up.  CPU seconds are
those of all threads and processes that a peer uses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import uuid
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from torch_model import build, clients  # noqa: E402
from works import FAMILY, WORKS, Job, Weights, make_job, small, write_data  # noqa: E402

from undrift.experiment.environment import commit  # noqa: E402

TORCH = "torch==2.13.0"
SCRIPTS = {
    "undrift": "with_undrift.py",
    "hand_loop": "hand_loop.py",
    "pfl": "with_pfl.py",
    "fedlab": "with_fedlab.py",
    "fedjax": "with_fedjax.py",
    "flower": "with_flower.py",
}
# One list per call of pip.  Flower 1.42.0 asks for releases of uv and certifi that indexes may not
# have yet; neither is used by a simulation, so it is put over the environment of 1.41.0.
INSTALL: dict[str, list[list[str]]] = {
    "pfl": [["pfl[pytorch]==0.6.0", TORCH]],
    "fedlab": [["fedlab==1.3.0", TORCH]],
    "fedjax": [["fedjax==0.0.17", "jax==0.10.2", "jaxlib==0.10.2"]],
    "flower": [["flwr[simulation]==1.41.0", TORCH], ["--no-deps", "flwr==1.42.0"]],
}
TOLERANCE = 1e-5  # of a weight after one round in float32
CHECKED_BY = (
    "one round of five clients, all taking part, on batches in stored order from the same first "
    "model (two local steps each where the model convolves, else all): every weight within "
    f"{TOLERANCE} of the hand-written loop's, so the same number of local steps; the loss over the "
    "first clients' examples falls"
)


def interpreter(peer: str, envs: Path) -> str:
    """Give the Python that runs a peer, and make its environment if it is not there."""
    if peer not in INSTALL:
        return sys.executable
    folder, wanted = envs / peer, json.dumps(INSTALL[peer])
    python, done = folder / "bin" / "python", folder / "installed.json"
    if not done.exists() or done.read_text() != wanted:
        print(f"making the environment of {peer} in {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        for packages in INSTALL[peer]:
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        done.write_text(wanted)
    return str(python)


def start(peer: str, python: str, job: Job, scratch: Path) -> tuple[dict[str, Any], Weights]:
    """Run one job of one peer in a process of its own."""
    out = scratch / f"{peer}-{uuid.uuid4().hex}"
    command = [python, str(HERE / "peers" / SCRIPTS[peer]), "--work", job.name]
    command += ["--folder", str(job.folder), "--threads", str(job.threads)]
    command += ["--rounds", str(job.rounds), "--out", str(out)]
    command += ["--check"] * job.check + ["--tiny"] * job.tiny
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(job.threads))
    paths = [str(HERE / "peers"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **threads,
        FAMILY: uuid.uuid4().hex,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
    }
    done = subprocess.run(
        command, env=environment, cwd=scratch, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{peer} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(out.with_suffix(".json").read_text()), dict(np.load(f"{out}.npz"))


@torch.no_grad()
def loss(job: Job, weights: Weights | None) -> float:
    """Mean loss over the first clients' examples; None is the first model."""
    net = build(job)
    if weights is not None:
        net.load_state_dict({n: torch.from_numpy(v) for n, v in weights.items()})
    some = job._replace(work=job.work._replace(clients=2))
    found = [torch.nn.functional.cross_entropy(net(x), y).item() for x, y in clients(some)]
    return statistics.fmean(found)


def check(job: Job, found: Weights, expected: Weights) -> dict[str, Any]:
    """Compare one round's model with the hand-written loop's."""
    if found.keys() != expected.keys():
        raise RuntimeError(f"other weights: {sorted(found)} and {sorted(expected)}")
    furthest = max(float(np.abs(found[n] - expected[n]).max()) for n in expected)
    before, after = loss(job, None), loss(job, found)
    if not (furthest < TOLERANCE and after < before):
        raise RuntimeError(f"differs by {furthest}, loss from {before} to {after}")
    return {"furthest_weight": furthest, "loss_before": before, "loss_after": after}


def summary(turns: list[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Take medians over the turns' means; the range is over turns."""
    found: dict[str, Any] = {}
    for kind in ("cpu_seconds", "wall_seconds"):
        by_turn = [turn[kind][warmup:] for turn in turns]
        means = [statistics.fmean(some) for some in by_turn]
        # rounds of a peer with several processes may borrow from one another: means of turns
        found[kind] = statistics.median(means)
        found[f"{kind}_range"] = [min(means), max(means)]
        found[f"{kind}_by_turn"] = by_turn
    found["loss_after"] = [turn["loss_after"] for turn in turns]
    return found


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [x.split(":")[1].strip() for x in lines if x.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
    }


class Bench:
    """Everything measured so far on one work."""

    def __init__(self, name: str, asked: argparse.Namespace, scratch: Path) -> None:
        self.asked, self.scratch = asked, scratch
        folder = scratch / name
        work = small(WORKS[name]) if asked.tiny else WORKS[name]
        write_data(work, folder)
        rounds = asked.warmup + asked.rounds
        self.jobs = {t: make_job(name, folder, t, rounds, False, asked.tiny) for t in asked.threads}
        self.job = make_job(name, folder, 1, 1, True, asked.tiny)
        self.work = work._replace(layers=())._asdict()
        self.pythons = {peer: interpreter(peer, asked.envs) for peer in asked.peers}
        self.checked: dict[str, Any] = {}
        self.turns: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def check(self) -> None:
        hand = start("hand_loop", sys.executable, self.job, self.scratch)
        for peer in self.asked.peers:
            result, weights = hand
            if peer != "hand_loop":
                result, weights = start(peer, self.pythons[peer], self.job, self.scratch)
            agreed = check(self.job, weights, hand[1])
            about = {"versions": result["versions"], "note": result["note"]}
            self.checked[peer] = {**about, "check": agreed}
            print(f"{self.job.name}: {peer} {agreed}", flush=True)

    def measure(self, threads: int, save: Callable[[], None]) -> None:
        """Let the peers take turns; what is known is saved after each of them."""
        turns = self.turns.setdefault(str(threads), {peer: [] for peer in self.asked.peers})
        job = self.jobs[threads]
        for turn in range(self.asked.repeats):
            for peer in self.asked.peers:
                result, weights = start(peer, self.pythons[peer], job, self.scratch)
                turns[peer].append({**result, "loss_after": loss(job, weights)})
                cpu = statistics.fmean(result["cpu_seconds"][self.asked.warmup :])
                print(f"{job.name}, {threads} threads, turn {turn}: {peer} {cpu:.3f}", flush=True)
            save()

    def report(self) -> dict[str, Any]:
        by_threads = {
            threads: {peer: summary(some, self.asked.warmup) for peer, some in turns.items()}
            for threads, turns in self.turns.items()
        }
        return {
            "work": self.work,
            "loss_before": loss(self.job, None),
            "peers": self.checked,
            "threads": by_threads,
            "against_undrift": against(by_threads, self.asked.peers),
        }


def against(by_threads: dict[str, Any], peers: list[str]) -> dict[str, Any]:
    """How many times undrift's seconds a peer takes; "best": each with its better thread count."""
    if "undrift" not in peers:
        return {}
    found = {}
    for kind in ("cpu_seconds", "wall_seconds"):
        rows = {t: {p: one[p][kind] for p in peers} for t, one in by_threads.items()}
        rows["best"] = {p: min(row[p] for row in rows.values()) for p in peers}
        found[kind] = {t: {p: row[p] / row["undrift"] for p in peers} for t, row in rows.items()}
    return found


def parse() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--peers", nargs="*", choices=list(SCRIPTS))
    arguments.add_argument("--work", nargs="*", choices=list(WORKS), default=list(WORKS))
    arguments.add_argument("--envs", type=Path, default=cache / "undrift-peers")
    arguments.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=3, help="timed rounds of a turn")
    arguments.add_argument("--warmup", type=int, default=1, help="rounds before them")
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--out", type=Path, default=HERE / "results" / "peers_cpu.json")
    asked = arguments.parse_args()
    asked.envs = asked.envs.resolve()
    if asked.tiny:
        asked.threads, asked.repeats, asked.rounds = [1], 1, 1
    asked.peers = asked.peers or list(SCRIPTS)[: 2 if asked.tiny else None]
    return asked


def main() -> None:
    asked = parse()
    results: dict[str, Any] = {"machine": machine(), "commit": commit()}
    for name in ("repeats", "rounds", "warmup"):
        results[name] = getattr(asked, name)
    results["checked_by"] = CHECKED_BY
    results["works"] = {}
    for name in asked.work:
        with tempfile.TemporaryDirectory() as scratch:
            bench = Bench(name, asked, Path(scratch))

            def save(name: str = name, bench: Bench = bench) -> None:
                results["works"][name] = bench.report()
                asked.out.parent.mkdir(parents=True, exist_ok=True)
                asked.out.write_text(json.dumps(results, indent=1) + "\n")

            bench.check()
            for threads in asked.threads:
                bench.measure(threads, save)
        print(name, json.dumps(results["works"][name]["against_undrift"], indent=1), flush=True)


if __name__ == "__main__":
    main()
