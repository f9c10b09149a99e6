"""What it costs to read, split and prepare a table, beside pandas' reading of the same file.

    python benchmarks/tables.py                writes benchmarks/results/tables_cpu.json
    python benchmarks/tables.py --tiny         the same code on little work

1,000,000 rows of 30 columns (20 floats, 5 whole numbers, 5 categories of 10 levels; 4 % of the
cells are missing), a client and a target.  Each reading is a process of its own on one thread;
they take turns, so that a busy machine disturbs all alike.  Time is that of reading alone, without
imports; peak memory is that of the whole process, beside what it had before it began to read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FLOATS, WHOLES, CATEGORIES, LEVELS, MISSING = 20, 5, 5, 10, 0.04
BLOCK = 20_000
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_NUM_THREADS")


def write(path: Path, rows: int) -> None:
    """Write the table, some rows at a time."""
    import numpy as np

    draw = np.random.default_rng(0)
    names = [f"f{k}" for k in range(FLOATS)] + [f"i{k}" for k in range(WHOLES)]
    names += [f"c{k}" for k in range(CATEGORIES)]
    with path.open("w") as file:
        file.write(",".join([*names, "site", "outcome"]) + "\n")
        for start in range(0, rows, BLOCK):
            n = min(BLOCK, rows - start)
            columns: list[list[str]] = [
                [f"{v:.6g}" for v in draw.normal(k, 1 + k, n)] for k in range(FLOATS)
            ]
            columns += [draw.integers(0, 10 ** (k + 1), n).astype(str).tolist()
                        for k in range(WHOLES)]  # fmt: skip
            columns += [[f"level {v}" for v in draw.integers(0, LEVELS, n)]
                        for _ in range(CATEGORIES)]  # fmt: skip
            for column in columns:
                for row in np.flatnonzero(draw.random(n) < MISSING).tolist():
                    column[row] = ""
            columns.append([f"site {v}" for v in draw.integers(0, 12, n)])
            columns.append([("no", "yes")[v] for v in draw.integers(0, 2, n)])
            file.write("".join(",".join(row) + "\n" for row in zip(*columns, strict=True)))


def peak() -> float:
    """Give the largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


# ------------------------------------------------------------------------------- one process each
def timed(read: Callable[[], list[int]]) -> dict[str, Any]:
    before, began, cpu = peak(), time.perf_counter(), time.process_time()
    shape = read()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "before": before, "peak": peak(),
            "shape": shape}  # fmt: skip


def read_by_pandas(path: Path) -> dict[str, Any]:
    import pandas

    return timed(lambda: list(pandas.read_csv(path).shape))


def prepare(path: Path, columns: dict[str, Any] | None) -> dict[str, Any]:
    import torch

    from undrift import sources
    from undrift.tabular import arrow

    torch.set_num_threads(1)
    arrow.arrow()  # pandas has imported pyarrow, too

    def read() -> list[int]:
        data = sources.load("table", path=path, client="site", target="outcome", columns=columns)
        return [len(data.train_x) + len(data.test_x), data.train_x.shape[1]]

    return timed(read)


def columns() -> dict[str, Any]:
    """What `undrift init` proposes for the table."""
    number = {"kind": "number", "fill": "median", "indicator": True}
    levels = [f"level {k}" for k in range(LEVELS)]
    made: dict[str, Any] = {f"f{k}": number for k in range(FLOATS)}
    made |= {f"i{k}": number for k in range(WHOLES)}
    made |= {f"c{k}": {"kind": "category", "levels": levels} for k in range(CATEGORIES)}
    return {**made, "outcome": {"kind": "classes", "levels": ["no", "yes"]}}


def careful(path: Path) -> dict[str, Any]:
    """Read without pyarrow, as where it is not installed."""
    from undrift.tabular import arrow

    arrow.arrow = lambda needed=None: None
    return prepare(path, columns())


WAYS = {
    "pandas": read_by_pandas,
    "columns": lambda path: prepare(path, columns()),
    "inferred": lambda path: prepare(path, None),
    "careful": careful,
}


# ------------------------------------------------------------------------------------------ all
def child(way: str, path: Path) -> dict[str, Any]:
    surroundings = {**os.environ, **dict.fromkeys(THREADS, "1")}
    command = [sys.executable, __file__, "--way", way, "--file", str(path)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr[-2000:]}")
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def measure(rows: int, turns: int, slow_rows: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path, short = Path(folder) / "table.csv", Path(folder) / "short.csv"
        write(path, rows)
        write(short, slow_rows)
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(turns):
            for way in ("pandas", "columns", "inferred"):
                found[way].append(child(way, path))
        found["careful"].append(child("careful", short))
        size = path.stat().st_size
    return {"rows": rows, "bytes": size, "slow_rows": slow_rows, "ways": told(found)}


def told(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Give the median of each way, and how it stands to pandas."""
    made: dict[str, Any] = {}
    for way, runs in found.items():
        made[way] = {
            "seconds": statistics.median(r["seconds"] for r in runs),
            "cpu_seconds": statistics.median(r["cpu_seconds"] for r in runs),
            "all_seconds": [round(r["seconds"], 3) for r in runs],
            "peak_mb": statistics.median(r["peak"] for r in runs),
            "before_mb": statistics.median(r["before"] for r in runs),
            "shape": runs[0]["shape"],
        }
    for way in ("columns", "inferred"):
        for what in ("seconds", "cpu_seconds", "peak_mb"):
            made[way][f"{what}_over_pandas"] = made[way][what] / made["pandas"][what]
    return made


def versions() -> dict[str, str]:
    import numpy
    import pandas
    import pyarrow
    import torch

    import undrift

    modules = (undrift, torch, numpy, pandas, pyarrow)
    return {m.__name__: m.__version__ for m in modules} | {"python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "tables_cpu.json")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way:
        print(json.dumps(WAYS[chosen.way](chosen.file)))
        return
    rows, turns, slow = (20_000, 1, 200) if chosen.tiny else (1_000_000, chosen.turns, 100_000)
    made = measure(rows, turns, slow)
    made |= {"tiny": chosen.tiny, "versions": versions(), "machine": platform.machine()}
    chosen.out.write_text(json.dumps(made, indent=1) + "\n")
    for way, one in made["ways"].items():
        cost = f"{one['seconds']:7.2f} s {one['cpu_seconds']:7.2f} s of CPU"
        print(f"{way:9s} {cost} {one['peak_mb']:7.0f} MB  {one['shape']}")


if __name__ == "__main__":
    main()
