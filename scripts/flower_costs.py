"""What Flower costs per message on this machine: a federation on the loopback interface, measured.

python scripts/flower_costs.py           needs undrift[flower]; takes some minutes
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from undrift.deploy.folder import Wanted, init
from undrift.deploy.local import Local
from undrift.experiment.folder import RunFolder
from undrift.experiment.spec import load

ROUNDS, CLIENTS = 5, 4
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(group: int) -> float:
    """Sum the CPU time of a process group, children that have ended included."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += sum(int(v) for v in fields[11:15])  # own, and of those it waited for
    return total / TICKS


def main() -> int:
    settings = [f"rounds={ROUNDS}", f"partition.clients={CLIENTS}", f"sampler.count={CLIENTS}"]
    [experiment] = load("digits", [*settings, "work.epochs=1", "algorithm.use=scaffold"])
    with tempfile.TemporaryDirectory() as folder:
        place = init(Path(folder) / "silos", experiment, Wanted())
        with Local(place) as local:
            local.up()
            time.sleep(20)  # until all are connected and quiet
            groups = {n: p.pid for n, p in local.running.items()}
            before = {n: cpu_seconds(g) for n, g in groups.items()}
            started = time.perf_counter()
            out = local.run(1200)
            wall = time.perf_counter() - started
            spent = {n: cpu_seconds(g) - before[n] for n, g in groups.items()}
        rounds = list(RunFolder(out).history())
    messages = CLIENTS * (ROUNDS + 1)  # and the greeting
    nodes = sum(v for n, v in spent.items() if n.startswith("node"))
    seconds = sorted(r["seconds"] for r in rounds)
    found = {
        "flwr": version("flwr"),
        "torch": version("torch"),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[2],
        "messages": messages,
        "cpu_seconds_per_message_on_a_node": nodes / messages,
        "cpu_seconds_per_message_on_the_server": spent["superlink"] / messages,
        "seconds_per_round_median": seconds[len(seconds) // 2],
        "seconds_in_all": wall,
        "bytes_down_per_message": rounds[0]["bytes_down"] / CLIENTS,
        "bytes_up_per_message": rounds[0]["bytes_up"] / CLIENTS,
    }
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
