"""What a deployed round costs: real messages are made, measured and multiplied.

python scripts/round_costs.py            prints the tables
python scripts/round_costs.py --write    writes docs/round-costs.md and its JSON
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

import undrift as fl
from undrift.core.rule import ClientInfo, Sizes
from undrift.core.tree import tree_map
from undrift.data import Federation, Population
from undrift.engines.sums import OrderedSum
from undrift.federated.alone import Example, Rehearsal
from undrift.federated.checks import Expected, Gate, Limits
from undrift.federated.grid import Answer
from undrift.federated.letters import Down, DownOwn, Up, words
from undrift.federated.wire import pack
from undrift.models import build

ROOT = Path(__file__).parent.parent
RUN = "0" * 32
MODELS = {
    "mlp, 28 x 28": ("mlp", {"inputs": 784, "classes": 10, "hidden": 200}, (1, 28, 28)),
    "feddyn_cnn, 32 x 32": ("feddyn_cnn", {"classes": 10}, (3, 32, 32)),
}
ALGORITHMS = ("fedavg", "scaffold", "adabest", "mime", "rfedavg_plus")
LINK = 100e6 / 8  # bytes a second between a client and the server: 100 Mbit/s
SERVER_LINK = 10e9 / 8  # of the server: 10 Gbit/s
FEATURES = {"rfedavg_plus": "head:input"}


def measured(model: str, algorithm: str) -> dict[str, Any]:
    """Make every message of one round of one client."""
    name, settings, shape = MODELS[model]
    feature = FEATURES.get(algorithm) if name == "mlp" else None
    if algorithm == "rfedavg_plus" and feature is None:
        return {}
    task = fl.Task(build(name, seed=0, **settings), feature=feature)
    example = Example(shape, torch.float32, (), torch.int64)
    algo = fl.catalogue()[algorithm].build()
    blank = example.blank()
    x, y = blank.client(0)
    sizes = Sizes(1000, 2, task.check(x, y))
    heard = Rehearsal(algo, task, example, sizes)
    phases = ["train"] + (["probe"] if _shares(algo) else [])
    phases += ["look"] if algo.uses("after_round") else []
    down = up = 0
    for phase in phases:
        common = heard.broadcast if phase == "train" else heard.broadcast._replace(
            cohort=tuple(() for _ in algo.parts))  # fmt: skip
        down += len(pack(common, words(Down(phase, RUN, 1, "0" * 64, 1000, sizes.features))))
        down += len(pack(heard.own, words(DownOwn(phase, RUN, 1, 0, RUN))))
        up += len(pack(heard.up(phase).zeros(), words(Up(phase, RUN, 1, 0))))
    return {
        "model": model,
        "algorithm": algorithm,
        "parameters": task.size,
        "exchanges": len(phases),
        "bytes_down": down,
        "bytes_up": up,
        **_times(heard),
    }


def _shares(algo: fl.Algorithm) -> bool:
    return algo.uses("probe") and any(p.shares_probe for p in algo.parts)


def _times(heard: Rehearsal, turns: int = 20) -> dict[str, float]:
    """Time what the server does with one report: read, check, add."""
    _, report, row = heard.engine.trained(heard.algo, heard.broadcast, heard.client, heard.work)
    row = row._replace(accepted=torch.ones_like(row.accepted))
    finite = tree_map(lambda v: torch.nan_to_num(v) if v.is_floating_point() else v, (report, row))
    data, form = pack(finite, words(Up("train", RUN, 1, 0))), heard.up("train")
    info = ClientInfo(*(v[0] for v in heard.client.info))
    known = heard.known(info, heard.own.steps, heard.broadcast.round)
    wanted = {0: Expected(0, int(heard.own.steps), known, None)}
    free = tuple(True for _ in known.lifted)
    total, seconds = OrderedSum(), []
    for turn in range(turns):
        started = time.process_time()
        gate = Gate("train", RUN, 1, form, wanted, Limits(), free)
        found = gate.admit(Answer(0, data)).tree
        total.add([turn], tree_map(lambda v: v[None], found[0]))
        seconds.append(time.process_time() - started)
    return {"ms_per_report": 1e3 * sorted(seconds)[turns // 2]}


def record_costs(clients: int, cohort: int) -> dict[str, float]:
    """Measure the server's record of so many clients, and the choice of a cohort."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = torch.full((clients,), 100, dtype=torch.int64)
    nothing = torch.zeros(0)
    offsets = torch.zeros(1, dtype=torch.int64)
    record = Federation(nothing, nothing, offsets[:0], offsets, sizes)
    started = time.process_time()
    drawn = fl.Uniform(count=cohort).sample(0, 0, Population.of(record.sizes.numpy()))
    seconds = time.process_time() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(drawn.ids) == cohort
    return {"clients": clients, "cohort": cohort, "seconds": seconds, "megabytes": grown / 1024}


def collected() -> dict[str, Any]:
    rows = [measured(model, algorithm) for model in MODELS for algorithm in ALGORITHMS]
    records = [record_costs(1_000, 1_000), record_costs(10_000_000, 1_000)]
    machine = {"python": platform.python_version(), "torch": torch.__version__}
    machine |= {"machine": platform.machine(), "threads": torch.get_num_threads()}
    return {"messages": [r for r in rows if r], "records": records, "versions": machine}


# ----------------------------------------------------------------------------------------- page
def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def page(found: dict[str, Any]) -> str:
    lines = [HEAD.strip(), ""]
    lines += [
        "| model | algorithm | exchanges | down | up | server, per report |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["messages"]:
        lines.append(
            f"| {row['model']} ({row['parameters']:,}) | {row['algorithm']} | {row['exchanges']} | "
            f"{size(row['bytes_down'])} | {size(row['bytes_up'])} | {row['ms_per_report']:.2f} ms |"
        )
    lines += ["", MIDDLE.strip(), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for clients, cohort in ((1_000, 1_000), (10_000_000, 1_000)):
        for row in found["messages"]:
            if row["algorithm"] in ("fedavg", "scaffold"):
                down, up = row["bytes_down"], row["bytes_up"]
                lines.append(
                    f"| {clients:,} | {cohort:,} | {row['model']} | {row['algorithm']} | "
                    f"{size(down * cohort)} | {size(100 * up)} | {(down + up) / LINK:.2g} s | "
                    f"{max(down, up) * cohort / SERVER_LINK:.2g} s | "
                    f"{row['ms_per_report'] * cohort / 1e3:.2g} s |"
                )
    lines += ["", TAIL.strip(), ""]
    for one in found["records"]:
        lines.append(
            f"- {one['clients']:,} clients: a cohort of {one['cohort']:,} is chosen in "
            f"{one['seconds']:.3g} s; the record takes {one['megabytes']:.0f} MB."
        )
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    return "\n".join(lines) + f"\n\nMeasured with {versions}.\n"


HEAD = """
# What a deployed round costs

Written by `python scripts/round_costs.py --write`. Messages are the real ones of a round of one
client, byte by byte: model, notes and reports as safetensors, float32. The last column is what the
server spends on one report, in CPU time: reading, checking every number, adding in float64.
"""

MIDDLE = """
## A thousand silos, ten million devices

From the sizes above. Everybody is asked in the first, a thousand of ten million in the second. A
client's link has 100 Mbit/s, the server's 10 Gbit/s, in each direction; local training comes on
top. `patience.at_once` bounds how many reports the server holds at a time. What Flower itself costs
is not in here: [from simulation to silos](from-simulation-to-silos.md) has that.
"""

COLUMNS = ("clients", "cohort", "model", "algorithm", "sent by the server",
           "memory for 100 reports", "client's link", "server's link", "summing")  # fmt: skip

TAIL = """
## The record

Of a client that never took part the server keeps its size (8 bytes); of one that did, which report
was counted last (24 bytes). Client states stay with the clients.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = collected()
    text = page(found)
    if chosen.write:
        (ROOT / "docs" / "round-costs.md").write_text(text)
        results = ROOT / "docs" / "records" / "round-costs.json"
        results.write_text(json.dumps(found, indent=1) + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
