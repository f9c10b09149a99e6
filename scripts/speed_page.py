# ruff: noqa: E501  (the text of the page)
"""Write docs/speed.md and its chart from benchmarks/results/*.json.

python scripts/speed_page.py
"""

from __future__ import annotations

import itertools
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
COLOURS = {"undrift": "#1b6ca8", "others": "#b8b8b8"}
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
    operands = ",".join(dict.fromkeys(one["options"]["precision"] for one in found["results"]))
    return f"""## Rounds on a GPU

    python benchmarks/rounds.py --precisions {operands} --profile --json rounds.json      # {found["device"]}, torch {found["torch"]}

{table(head, rows)}
![TFLOP/s of whole rounds](pictures/speed.png)

Whole rounds: batches drawn and gathered, all local steps, states, sums, the server's step; 200 rounds
queued without waiting, median of 3. Master weights and sums are float32. TFLOP/s count forward,
weight gradients and input gradients but the first layer's. `host ms` is what the host needs to
queue a round.

{works}
{older(found)}
{profiles(found["results"])}"""


def older(found: dict[str, Any]) -> str:
    """Name the rows that another commit than the others' measured."""
    rows = [r for r in found["results"] if r.get("commit", found["commit"]) != found["commit"]]
    if not rows:
        return f"\n{measured_at(found)[1:]}\n"
    named = [f"{r['work']} with {NAMES[r['algorithm']]} ({r['commit'][:7]})" for r in rows]
    return f"\nMeasured at commit {found['commit'][:7]}, but earlier: {'; '.join(named)}.\n"


# Which part of a round a kernel belongs to, by its name; what is not listed is the rest.
LAYERS = (
    *("convolve", "thin_convolve", "weight_gradient", "thin_weight_gradient", "linear", "drop"),
    *("linear_backward", "unfinish", "pack_weights", "pack_images", "sum_parts", "sum_splits"),
    *("add_rows", "max_pool", "sum_pairs", "pack_pairs", "linear_step", "take"),
    *("threshold_kernel", "clamp_scalar"),  # ReLU
)


def part_of(name: str) -> str:
    bare = name.removeprefix("void ").split("<")[0].split("::")[-1]
    if any(bare == layer or (layer in name and len(layer) > 6) for layer in LAYERS) or any(
        library in name for library in ("nvjet", "cutlass", "cudnn")
    ):
        return "layers"
    ends = bare in ("close_clients", "add_pieces", "rebuild")
    return "algebra" if ends or name.startswith("triton_") else "rest"


def sums_by_part(profile: list[Any]) -> dict[str, float]:
    """Add up the milliseconds of a round's kernels."""
    sums = {"layers": 0.0, "algebra": 0.0, "rest": 0.0}
    for name, _, micro in profile:
        sums[part_of(name)] += micro / 1e3
    return sums


def profiles(results: list[dict[str, Any]]) -> str:
    """Show where the time of some rounds goes, against the least there could be."""
    shown = [one for one in results if one["profile"]]
    timed = any("passes_ms" in one for one in shown)  # which records of before have not
    rows, parts = [], []
    for one in shown:
        sums = sums_by_part(one["profile"])
        idle = max(0.0, one["ms"] - sum(sums.values()))
        floor = one.get("floor_ms") or {}
        rows.append([
            one["work"], NAMES[one["algorithm"]], one["options"]["precision"], f"{one['ms']:.2f}",
            *(f"{v:.2f}" for v in (*sums.values(), idle)),
            f"{100 * (1 - sums['layers'] / one['ms']):.0f} %",
            *(alone(one) if timed else ()),
            *(f"{floor[k]:.2f}" if k in floor else "" for k in ("operations", "bytes")),
        ])  # fmt: skip
        kernels = [[f"`{n[:60]}`", str(c), f"{t:.0f}"] for n, c, t in one["profile"][:8]]
        title = f"{one['work']}, {NAMES[one['algorithm']]}, {one['options']['precision']}"
        parts.append(f"{title}\n\n{table(['kernel', 'calls', 'us'], kernels)}")
    head = ["work", "algorithm", "operands", "ms a round", "layers", "algebra", "rest", "gaps"]
    head += ["but layers", *(["passes alone", "gradients at the end", "but both"] if timed else [])]
    head += ["floor by operations", "floor by bytes"]
    text = f"""### Where the time goes

Milliseconds of one round: the kernels of forward and backward (layers), of the rules, the optimizer, the loss and the sums (algebra, as compiled),
everything else, and gaps between kernels. Where some kernels run beside others (drawing of batches, the beginning of a round, numbers of steps), they take longer than alone, and times add up to more than the round's. The floors are the operations over the rate of a large
matrix product, and the bytes of weights and states, each read and written as often as the chain of
rules asks for where all weights move in every step and gradients are stored, over the rate of a large copy. Layers that take their step
where they make their gradient need less, and so do wide layers that remember their steps (those of pfl_cifar and feddyn_100).
Kernels that do both at once (`linear_step`, `sum_parts`, `sum_pairs`, `take`) count as layers and as passes, with all that the step reads and writes.

{table(head, rows)}
`but layers` is the share of a round that is not kernels of layers{PASSES if timed else ""}. It is small where a step is much
work for one kernel (feddyn_100). In small work it is the start of kernels, the drawing of batches and
the way of the cohort's weights in and out; with SCAFFOLD on pfl_cifar it is client states, which are read, renewed and
put back once a round: `close_clients` (they are 2 x 50 x 6.5 MB: 0.15 ms at the rate of a large copy).

The longest kernels:

"""
    return text + "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


PASSES = (
    "; `passes alone` are forward and backward with the loss, recorded by themselves and replayed\n"
    "as often as a round has steps, gaps included. Wide layers that remember their steps make their weight "
    "gradients when the round ends, in the\nkernel that ends it (`close_clients`): `gradients at the "
    "end` is that kernel where it gives nothing but their sum over clients. `but both` is\n"
    "what a round takes beyond the two"
)


def alone(one: dict[str, Any]) -> tuple[str, str, str]:
    """Show forward and backward by themselves, and the rest of the round."""
    passes, late = one.get("passes_ms"), one.get("gradients_ms")
    if passes is None:
        return "", "", ""
    rest = 100 * max(0.0, 1 - (passes + (late or 0.0)) / one["ms"])
    return f"{passes:.2f}", "" if late is None else f"{late:.2f}", f"{rest:.1f} %"


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

    python benchmarks/scale.py --threads {found["machine"]["threads"]}      # {found["machine"]["cpu"]}, {found["rounds"]} rounds each, in turns

{table(["algorithm", "CPU s a round", "against the first", "peak GB"], rows)}
A cohort of 100, 5 steps of batch 20, an MLP of 1.0M parameters; SCAFFOLD's states in the sparse file.{other_runs(found)}
"""


def other_runs(found: dict[str, Any]) -> str:
    """Tell what further runs of SCAFFOLD gave: files make them differ."""
    told = []
    for run in found.get("other_runs_of_scaffold", ()):
        first, *_, last = run["cpu_seconds"].values()
        told.append(f"{last / first:.2f}x at {run['commit'][:7]}, {run['beside']}")
    return f"\nOther runs of SCAFFOLD: {'; '.join(told)}." if told else ""


def peers() -> str:
    """Compare with other simulators on CPUs, where that was measured."""
    runs = [found for name in ("peers_cpu_amd", "peers_cpu") if (found := read(f"{name}.json"))]
    if not runs:
        return ""
    chart_peers(runs[0])
    return f"""## Other simulators on a CPU

![CPU seconds of a round, in undrift and in other simulators](pictures/peers.png)

{"".join(map(peers_run, runs))}CPU seconds of all threads and processes together, with one torch thread, medians of the turns of
one run, each in an environment of its own. Checked: {runs[0]["checked_by"]}.
"""


def chart_peers(found: dict[str, Any]) -> None:
    figure, panels = plt.subplots(1, len(found["works"]), figsize=(7, 2.2), layout="constrained")
    for axes, (work, one) in zip(panels, found["works"].items(), strict=True):
        used = {name: told["cpu_seconds"] for name, told in one["threads"]["1"].items()}
        names = sorted(used, key=used.__getitem__, reverse=True)
        paint = [COLOURS["undrift" if name == "undrift" else "others"] for name in names]
        bars = axes.barh(names, [used[name] for name in names], color=paint)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
        axes.set_title(work, fontsize=9)
        axes.set_xlabel(f"CPU s a round, {found['machine']['cpu']}", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(CHART.with_name("peers.png"), dpi=150)
    plt.close(figure)


def peers_run(found: dict[str, Any]) -> str:
    rows = []
    for work, one in found["works"].items():
        ratios = one["against_undrift"]["cpu_seconds"]["best"]
        for name, ratio in ratios.items():
            versions = one["peers"][name]["versions"]
            told = ", ".join(f"{n} {v}" for n, v in versions.items() if n != "numpy")
            used = min(t[name]["cpu_seconds"] for t in one["threads"].values() if name in t)
            rows.append([work, name, told, f"{used:.2f}", f"{ratio:.2f}x"])
    counts = " ".join(next(iter(found["works"].values()))["threads"])
    options = "".join(
        f" --{name} {' '.join(chosen)}" for name, chosen in found.get("chosen", {}).items()
    )
    return f"""    python benchmarks/peers.py --threads {counts} --repeats {found["repeats"]}{options}      # {found["machine"]["cpu"]}, {found["machine"]["cores"]} cores

{table(["work", "simulator", "versions", "CPU s a round", "against undrift"], rows)}
{measured_at(found).strip() or "Measured at an older commit, before stacks of linear layers were loops in C."}

"""


def peers_gpu() -> str:
    """Compare with other simulators on a GPU, where that was measured."""
    names = ("pfl_gpu", "peers_gpu")
    runs = [found for name in names if (found := read(f"{name}_h200.json"))]
    if not runs:
        return ""
    return f"""## Other simulators on a GPU

The work of pfl-research's CIFAR-10 benchmark: 1000 users of 50 images, 50 a round, 5 local steps of
batch 10; every 10 rounds 10,000 test images, and each user of the round judged on its own images
before and after its training. Peers take turns in one process; medians over blocks of ten rounds
with their evaluation. pfl, which all are compared with, trains FedAvg, as one process, as its
benchmark does on one device. Its own time differs from machine to machine ({pfl_times(runs)} ms a
round below), so compare within a table.

{"".join(map(side_by_side, runs))}"""


def pfl_times(runs: list[dict[str, Any]]) -> str:
    taken = sorted(run["peers"]["pfl"]["seconds_per_round"] for run in runs)
    return ", ".join(f"{1e3 * t:.0f}" for t in taken)


def side_by_side(found: dict[str, Any]) -> str:
    """Tell one run of several simulators."""
    rows = []
    pfl = found["peers"]["pfl"]["seconds_per_round"]
    for name, one in found["peers"].items():
        if "error" in one:
            continue
        told = ", ".join(f"{n} {v}" for n, v in one["versions"].items() if n != "numpy")
        rows.append([
            name, one["note"], told, f"{one['seconds_per_round'] * 1e3:.2f}",
            str(one["rounds_timed"]), f"{pfl / one['seconds_per_round']:.1f}x",
        ])  # fmt: skip
    head = ["simulator", "what", "versions", "ms a round", "rounds", "against pfl"]
    images = "CIFAR-10" if "--data" in found["command"] else "Images of its size that are made"
    means = mean_of(found["peers"]["pfl"]) / mean_of(found["peers"]["undrift_bf16"])
    return f"""    # {found["machine"]["device"]}, torch {found["machine"]["torch"]}
    {found["command"]}

{table(head, rows)}
{images}. By means FedAvg is {means:.0f}x pfl, its first block, in which kernels and graphs are
made, among them.{measured_at(found)}{cut(found)}

"""


def cut(found: dict[str, Any]) -> str:
    """Say who was asked for and not measured."""
    return f" Not measured: {found['cut']}." if "cut" in found else ""


def measured_at(found: dict[str, Any]) -> str:
    """Name the commit, where a record has it."""
    return f" Measured at commit {found['commit'][:7]}." if "commit" in found else ""


def mean_of(peer: dict[str, Any]) -> float:
    blocks: list[float] = peer["seconds_per_round_by_block"]
    return sum(blocks) / len(blocks)


FEDDYN_CNN = 797_962  # parameters
# Read and written by a step: model and momentum; FedProx's anchor is read, SCAFFOLD's two states.
PASSES_OF_THE_GRID = (4 + 5 + 6 + 4) / 4


def fleets() -> str:
    """Several experiments as one batch."""
    found, rounds = read("fleet_h200.json"), read("rounds_h200.json")
    if found is None:
        return ""
    sums = sums_by_part(found["profile"])
    steps = sum(n for name, n, _ in found["profile"] if name == "thin_convolve")
    width = sum(found["lanes"]) / len(found["lanes"])  # of one crew, whose steps these are
    moved = 4 * FEDDYN_CNN * PASSES_OF_THE_GRID * width * steps
    least = moved / rounds["ceilings"]["bytes"] * 1e3
    turns = [
        found["experiments"] * alone / together
        for together, alone in zip(
            *(found["by_turn"][n] for n in ("together", "alone")), strict=True
        )
    ]
    rate = next(
        r["tflops"] for r in rounds["results"]
        if (r["work"], r["algorithm"]) == ("feddyn_100", "scaffold_momentum")
    )  # fmt: skip
    return f"""## Experiments as one batch

    python benchmarks/fleet.py --precision {found["precision"]} --turns {len(turns)} --json fleet.json      # {found["device"]}, torch {found["torch"]}

The 16 cells of ComFed's grid x 3 seeds on CIFAR-10's set-up (feddyn_cnn, 10 of 100 clients a round,
one epoch of batch 32, client momentum 0.9, Dirichlet(0.1) over classes): {found["experiments"]} experiments as one batch take
{found["ms_together"]:.0f} ms a round, one alone {found["ms_alone_each"]:.1f} ms: **{found["times_faster"]:.2f}x** faster than one after the other
(medians; {min(turns):.2f} to {max(turns):.2f} by turn, as cohorts differ in size; {found["tflops"]:.0f} TFLOP/s, {100 * found["tflops"] / rate:.0f} % of what SCAFFOLD with momentum has at 100 x 50; alone are timed {", ".join(found["apart"])}). Building took {found["built_s"]:.0f} s. In one profiled round, of other cohorts than the mean, kernels of layers take
{sums["layers"]:.0f} ms, the algebra {sums["algebra"]:.0f} and everything else {sums["rest"]:.0f}: **{100 * (1 - sums["layers"] / sum(sums.values())):.0f} %** of the kernels' time is not layers,
which take their steps as they go back (these move {PASSES_OF_THE_GRID} numbers for every weight and step: {least:.0f} ms at the rate of a large copy);
experiments whose clients do different things run side by side, so these times overlap. Labels are random here, and
some of the runs diverge on them: {found["left_out"]["all"]} updates of {(1 + len(turns)) * 10 * 10 * found["experiments"]:,} were left out as not finite.
{measured_at(found)[1:]}
"""


def precisions() -> str:
    """What the type of operands does to a result."""
    found = read("precision_h200.json")
    if found is None:
        return ""
    rows = [
        [one["precision"], f"{one['mean']:.2f}", f"{one['sd']:.2f}"] for one in found["results"]
    ]
    return f"""## Precision

    python benchmarks/precision.py --json precision.json      # {found["device"]}, torch {found["torch"]}

{table(["operands", "accuracy %", "sd"], rows)}
CIFAR-10, feddyn_cnn, FedAvg, 100 clients of Dirichlet(0.3), 10 a round, 2 epochs of batch 50,
{found["rounds"]} rounds, 3 seeds as one batch. The means are at most {widest(found["results"]):.1f} pooled standard deviations apart.

After one step, output and gradients of a layer are held to 3e-3 of float32's (tf32, fp16) and 2e-2
(bf16), ten times that behind ReLU and pooling, where rounding turns signs: `tests/kernels/test_cuda.py`.
In tf32 the backward pass rounds to fp16, which has the same mantissa; powers of two keep its range.
"""


def widest(results: list[dict[str, Any]]) -> float:
    """Tell how far means are apart at most, in pooled standard deviations."""
    return max(
        abs(a["mean"] - b["mean"]) / ((a["sd"] ** 2 + b["sd"] ** 2) / 2) ** 0.5
        for a, b in itertools.combinations(results, 2)
    )


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
side by side, each on one thread. Stacks of linear layers are loops in C, built on the machine; elsewhere linear layers of a plain sequence take
their SGD step in the backward pass; convolutions train one client at a time with channels last.
"""


def spread(found: dict[str, float], unit: float, digits: int) -> str:
    least, median, most = (f"{unit * found[n]:.{digits}f}" for n in ("least", "median", "most"))
    return f"{median} ({least} to {most})"


def own_loops() -> str:
    found = read("bench_cpu.json")
    rows = [
        [one["load"], one["algorithm"], spread(one["loop"], 1e3, 0), spread(one["undrift"], 1e3, 0),
         spread(one["faster"], 1, 2), f"{one['wall_faster']['median']:.2f}"]
        for one in found["results"]
    ]  # fmt: skip
    head = ["work", "algorithm", "plain loop", "undrift", "times faster", "by wall time"]
    return f"""## An algorithm against itself as a plain loop

    undrift bench --device cpu --rounds {found["rounds"]} --json bench_cpu.json      # {found["machine"]}, torch {found["torch"]}

{table(head, rows)}
CPU milliseconds of a round, median (least to most) of {found["rounds"]} turns, both sides on {found["threads"]} thread. The loop is the
same algorithm, written by hand (`src/undrift/hand_loops.py`): one client after the other, `torch.optim.SGD`. Tests hold
both to the same model, to 1e-12 in float64. SCAFFOLD has client momentum 0.9. Below 1 the plain loop is the faster one.
"""


HEAD = """# Speed

Measured by the commands below, from which `python scripts/speed_page.py` makes this page. How it is
done: [architecture](architecture.md), engines.
"""


def main() -> None:
    made = (
        peers_gpu(),
        rounds(),
        fleets(),
        precisions(),
        kernels(),
        cpu(),
        own_loops(),
        peers(),
        scale(),
    )
    text = "\n".join(part.rstrip("\n") + "\n" for part in (HEAD, *made) if part)
    (ROOT / "docs" / "speed.md").write_text(text)


if __name__ == "__main__":
    main()
