# ruff: noqa: E501  (the text of the page)
"""Write docs/speed.md and its chart from benchmarks/results/*.json.

python scripts/speed_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHART = ROOT / "docs" / "pictures" / "speed.png"
WORKS = {
    "pfl_cifar": "simple_cnn (1.6M parameters), 50 of 1000 clients, 5 steps of batch 10",
    "feddyn_100": "feddyn_cnn (0.8M), 100 clients, 10 steps of batch 50",
    "feddyn_10": "feddyn_cnn, 10 of 100 clients, 10 steps of batch 50",
}
NAMES = {"fedavg": "FedAvg", "scaffold_momentum": "SCAFFOLD, client momentum 0.9"}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def read(name: str) -> Any:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def rounds() -> str:
    found = read("rounds_h200.json")
    rows = [
        [one["work"], NAMES[one["algorithm"]], one["options"]["precision"], f"{one['ms']:.2f}",
         f"{one['tflops']:.0f}", f"{one['host_ms']:.1f}", f"{one['memory_gb']:.1f}"]
        for one in found["results"]
    ]  # fmt: skip
    chart(found["results"])
    works = "\n".join(f"* {name}: {text}." for name, text in WORKS.items())
    head = ["work", "algorithm", "operands", "ms a round", "TFLOP/s", "host ms", "GB"]
    return f"""## Rounds on a GPU

    python benchmarks/rounds.py --profile --json rounds.json      # {found["device"]}, torch {found["torch"]}

{table(head, rows)}
![TFLOP/s of whole rounds](pictures/speed.png)

Whole rounds: batches drawn and gathered, all local steps, states, sums, the server's step; 20 rounds
queued without waiting, median of 3. Master weights and sums are float32. TFLOP/s count forward,
weight gradients and input gradients but the first layer's. `host ms` is what the host needs to
queue a round.

{works}

{profiles(found["results"])}"""


def profiles(results: list[dict[str, Any]]) -> str:
    """Show where the time of some rounds goes."""
    parts = [
        "### Where the time goes\n\nThe longest kernels of one round, microseconds in all (bf16)."
    ]
    for one in results:
        if one["options"]["precision"] != "bf16" or not one["profile"]:
            continue
        rows = [[f"`{n[:60]}`", str(c), f"{t:.0f}"] for n, c, t in one["profile"][:8]]
        title = f"{one['work']}, {NAMES[one['algorithm']]}, {one['ms']:.2f} ms"
        parts.append(f"{title}\n\n{table(['kernel', 'calls', 'us'], rows)}")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def chart(results: list[dict[str, Any]]) -> None:
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    colours = {"bf16": "#1b6ca8", "tf32": "#9dc3e0"}
    labels = [f"{r['work']}\n{r['algorithm'].replace('_', ' + ')}, {r['options']['precision']}"
              for r in results]  # fmt: skip
    paint = [colours[r["options"]["precision"]] for r in results]
    axes.barh(labels[::-1], [r["tflops"] for r in results][::-1], color=paint[::-1])
    axes.set_xlabel("TFLOP/s of whole rounds, one H200")
    axes.tick_params(axis="y", labelsize=6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(CHART, dpi=150)
    plt.close(figure)


def kernels() -> str:
    found = read("kernels_h200.json")
    rows = []
    for one in found["ops"]:
        if "triton" not in one:
            continue
        best = min(one["grouped"]["both"], one["channels_last"]["both"])
        rows.append([
            f"{one['layer']}, {one['clients']} x {one['batch']}", one["precision"],
            f"{one['triton']['both']:.2f}", f"{one['triton']['teraflops']:.0f}", f"{best:.2f}",
            f"{best / one['triton']['both']:.1f}x", f"{max(one['errors'].values()):.1e}",
        ])  # fmt: skip
    head = ["layer", "operands", "ms", "TFLOP/s", "cuDNN ms", "faster", "error"]
    return f"""## Convolutions of a cohort

    python benchmarks/kernels.py --precisions tf32,bf16 --out kernels.json      # {found["device"]}, Triton {found["triton"]}

{table(head, rows)}
Forward and gradients of one layer with bias, ReLU and 2x2 max-pooling (as `vmap(grad)` calls it),
against the better of grouped convolutions in either order of memory. The error is the largest of
output and gradients against float64 on the operands as they are rounded.
"""


def scale() -> str:
    found, rows = read("scale.json"), []
    for name, one in found["algorithms"].items():
        people = one["populations"]
        first = next(iter(people.values()))
        for count, seen in people.items():
            rows.append([
                f"{name}, {int(count):,} clients", f"{seen['cpu_seconds']:.2f}",
                f"{seen['cpu_seconds'] / first['cpu_seconds']:.2f}x",
                f"{seen['peak_resident_bytes'] / 1e9:.2f}",
            ])  # fmt: skip
    return f"""## Populations

    python benchmarks/scale.py      # {found["machine"]["cpu"]}, {found["rounds"]} rounds each, in turns

{table(["algorithm", "CPU s a round", "against the first", "peak GB"], rows)}
A cohort of 100, 5 steps of batch 20, an MLP of 1.0M parameters; SCAFFOLD's states in the sparse file.
"""


def peers() -> str:
    """Compare with other simulators, where that was measured."""
    found = read("peers_cpu.json")
    if found is None:
        return ""
    rows = []
    for work, one in found["works"].items():
        ratios = one["against_undrift"]["cpu_seconds"]["best"]
        for name, ratio in ratios.items():
            versions = one["peers"][name]["versions"]
            told = ", ".join(f"{n} {v}" for n, v in versions.items() if n != "numpy")
            used = min(t[name]["cpu_seconds"] for t in one["threads"].values() if name in t)
            rows.append([work, name, told, f"{used:.2f}", f"{ratio:.2f}x"])
    return f"""## Other simulators on a CPU

    python benchmarks/peers.py      # {found["machine"]["cpu"]}, {found["machine"]["cores"]} cores

{table(["work", "simulator", "versions", "CPU s a round", "against undrift"], rows)}
CPU seconds of all threads and processes together, the better of one and two threads, medians of
{found["repeats"]} turns in one run, each in an environment of its own. Checked: {found["checked_by"]}.
"""


def cpu() -> str:
    rows = []
    for one in read("cohort.json"):
        used, speed = one["cpu_seconds_per_round"], one["speed_against_hand_loop"]
        rows.append([
            one["work"]["name"], str(one["threads"]), f"{used['hand loop']:.2f}",
            f"{used['vectorised']:.2f}", f"**{speed['vectorised']:.2f}x**",
        ])  # fmt: skip
    one = read("cohort.json")[0]
    return f"""## Rounds on a CPU

    python benchmarks/cohort.py --repeats 4      # {one["cpu"]}, 2 cores, torch {one["torch"]}

{table(["work", "torch threads", "hand loop", "vectorised", "faster"], rows)}
CPU seconds per round of FedAvg against a straightforward PyTorch loop (`load_state_dict`,
`torch.optim.SGD`, weighted average), in one run, taking turns; CPU time counts what all threads used,
so that idle cores are not rewarded. emnist_mlp: 784-100-100-26, 100 of 1000 clients, 10 steps of
batch 45. feddyn_cnn: 10 of 100 clients, 10 steps of batch 50. With two torch threads two chunks train
side by side, each on one thread. Linear layers of a plain sequence take their SGD step in the backward
pass; convolutions train one client at a time with channels last.
"""


HEAD = """# Speed

Measured by the commands below, from which `python scripts/speed_page.py` makes this page. How it is
done: [architecture](architecture.md), engines.
"""


def main() -> None:
    parts = [part for part in (HEAD, rounds(), kernels(), cpu(), peers(), scale()) if part]
    text = "\n".join(part.rstrip("\n") + "\n" for part in parts)
    (ROOT / "docs" / "speed.md").write_text(text)


if __name__ == "__main__":
    main()
