"""How fast a round is on one device: work by work, algorithm by algorithm, precision by precision.

    python benchmarks/rounds.py --json rounds.json          on a CUDA device
    python benchmarks/rounds.py --tiny                      the same code on little work, on any

What a file of the same device and versions has is not measured again.

Rounds are queued without waiting in between, as in `Trainer.run`, and timed by the wall clock; the
profile is of one further round.  A sample's operations are those of its forward pass, its weight
gradients and its input gradients but the first layer's (2 per multiplication and addition).
Forward and backward alone are the same calls on one batch, recorded by themselves and replayed as
often as a round has steps; where layers take their step while going back, they do so here.  Layers
that remember their steps make their weight gradients when the round ends: these are timed apart, by
the kernel that ends a round where it makes nothing else of them than their sum.
The floor of a round is the larger of its operations over the rate of a large matrix product, and of
the bytes that weights and states must move over the rate of a large copy, both measured here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import undrift as fl
from undrift import models
from undrift.core.linear import Descent
from undrift.core.round import Found
from undrift.core.task import Batch
from undrift.engines import reading
from undrift.engines.examples import look_up
from undrift.engines.graphs import Piece, graph_pool
from undrift.engines.linear_chain import LinearChain, Step
from undrift.engines.stepping import Seat, Stepping
from undrift.experiment.environment import commit
from undrift.kernels.ending import Ending


class Work(NamedTuple):
    model: str
    clients: int
    cohort: int
    size: int  # examples of a client
    batch: int
    steps: int


WORKS = {
    "pfl_cifar": Work("simple_cnn", 1000, 50, 50, 10, 5),
    "feddyn_100": Work("feddyn_cnn", 100, 100, 500, 50, 10),
    "feddyn_10": Work("feddyn_cnn", 100, 10, 500, 50, 10),
    "emnist_mlp": Work("emnist_mlp", 1000, 100, 450, 45, 10),
}
ALGORITHMS = {
    "fedavg": lambda: fl.fedavg(0.1),
    "scaffold_momentum": lambda: fl.scaffold(local=fl.sgd(0.05, momentum=0.9)),
    "feddyn": lambda: fl.feddyn(0.1),
    "prox_yogi": lambda: fl.comfed("prox", "yogi"),
}


# How often all weights of a cohort must be read or written: in a local step, and once a round.
# Plain SGD: forward reads, backward reads and writes.  With a chain of rules: forward and backward
# read, the gradient is written and read, model, momentum and state are read, the first two written.
PASSES = {
    "fedavg": (3, 2),  # a round: written at the start, read at the end
    "scaffold_momentum": (9, 7),  # also momentum zeroed; states fetched, renewed, put back
    "feddyn": (7, 6),
    "prox_yogi": (7, 2),
}


def ceilings(device: str) -> dict[str, float]:
    """Measure what the device can do: operations of a large product, bytes of a large copy."""
    if device != "cuda":
        return {}

    def rate(amount: float, run: Callable[[], Any]) -> float:
        run()
        wait(device)
        started = time.perf_counter()
        for _ in range(10):
            run()
        wait(device)
        return 10 * amount / (time.perf_counter() - started)

    a = torch.randn(8192, 8192, device=device)
    narrow, big = a.bfloat16(), torch.randn(2**28, device=device)
    other = torch.empty_like(big)
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    tf32 = rate(2 * 8192.0**3, lambda: a @ a)
    torch.backends.cuda.matmul.allow_tf32 = before
    narrow_rate = rate(2 * 8192.0**3, lambda: narrow @ narrow)
    return {
        "bf16": narrow_rate,
        "fp16": narrow_rate,  # the same units
        "tf32": tf32,
        "bytes": rate(8.0 * 2**28, lambda: other.copy_(big)),
    }


def floor(work: Work, algorithm: str, size: int, flops: float, precision: str, most: Any) -> Any:
    """Give the least milliseconds of a round by operations and by bytes, where it is known."""
    if precision not in most:
        return None
    step, once = PASSES[algorithm]
    samples = work.cohort * work.steps * work.batch
    moved = 4.0 * size * work.cohort * (step * work.steps + once)
    return {
        "operations": flops * samples / most[precision] * 1e3,
        "bytes": moved / most["bytes"] * 1e3,
    }


def operations(module: nn.Module, shape: tuple[int, ...]) -> float:
    """Count what training on one sample takes."""
    found: list[float] = []

    def note(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        places = output[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1
        found.append(2.0 * layer.weight.numel() * places)

    layers = [m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    with torch.no_grad():
        module(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return 3 * sum(found) - found[0]


def federation(work: Work, device: str) -> fl.Federation:
    shape = (784,) if work.model == "emnist_mlp" else (3, 32, 32)
    maker = torch.Generator(device).manual_seed(0)
    x = torch.randn(work.clients * work.size, *shape, generator=maker, device=device)
    y = torch.randint(0, 10, (len(x),), generator=maker, device=device)
    return fl.Federation.split(x, y, torch.arange(len(x)).split(work.size))


def measure(name: str, algorithm: str, options: dict[str, Any], args: Any) -> dict[str, Any]:
    work = WORKS[name]
    if args.tiny:
        work = work._replace(clients=6, cohort=3, size=4, batch=2, steps=2)
    torch.manual_seed(0)
    module = models.build(work.model, 0)
    data = federation(work, args.device)
    flops = operations(module, tuple(data.x.shape[1:]))
    trainer = fl.Trainer(
        fl.Task(module),
        data,
        ALGORITHMS[algorithm](),
        work=fl.Work(steps=work.steps, batch=work.batch),
        sampler=fl.Uniform(count=work.cohort),
        device=args.device,
        **options,
    )
    started = time.perf_counter()
    first = trainer.run(4)
    built = time.perf_counter() - started
    blocks = []
    for _ in range(args.blocks):
        wait(args.device)
        started = time.perf_counter()
        last = trainer.run(args.rounds)
        blocks.append((time.perf_counter() - started) / args.rounds)
    milliseconds = sorted(blocks)[len(blocks) // 2] * 1e3
    samples = work.cohort * work.steps * work.batch
    return {
        "work": name,
        "algorithm": algorithm,
        "options": {k: str(v) for k, v in options.items()},
        "ms": milliseconds,
        "ms_by_block": [b * 1e3 for b in blocks],
        "tflops": flops * samples / milliseconds / 1e9,
        "mflop_per_sample": flops / 1e6,
        "floor_ms": floor(
            work, algorithm, trainer.task.size, flops, options["precision"], args.most
        ),
        "passes_ms": passes_time(trainer, work.steps, args.rounds),
        "gradients_ms": gradients_time(trainer, args.rounds),
        "host_ms": host_time(trainer),
        "built_s": built,
        "losses": [first[0].loss, last[-1].loss],
        "plan": trainer.engine.plan(),
        "profile": profile(trainer.round) if args.profile and args.device == "cuda" else [],
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else 0,
    }


def passes_time(trainer: fl.Trainer, steps: int, rounds: int) -> float | None:
    """Tell how long the forward and backward passes of a round take by themselves."""
    runners = getattr(trainer.engine, "_rounds", [])
    if not runners:
        return None  # a CPU's rounds are not recorded
    runner, device = runners[-1], trainer.engine.device
    drawn = [runner.buffers[name] for name in ("order", "rows", "keys")]
    rows, keys, number, order, mask, _ = reading.picked(
        torch.zeros_like(runner.buffers["k"]), *drawn
    )
    batch = Batch(*(look_up(v, rows) for v in (runner.data.x, runner.data.y)), mask, order)
    models, stepping = runner.buffers["models"], runner.stepping
    seats = runner.seating.seats()

    known = stepping.chains.get(0)
    descent = None if known is None else inside(known, seats[0], batch, keys, number, stepping)

    def pass_through() -> None:
        if descent is not None:
            stepping._found(*models, batch, keys, descent)
        elif stepping.in_place:
            stepping.take(runner.groups, seats, models, batch, keys, number)
        else:
            stepping._found(*models, batch, keys)

    def after(taken: int) -> None:
        with runner.histories.after(taken):
            pass_through()

    if runner.histories is None or not runner.reading.ready:
        return replayed([Piece(pass_through, graph_pool(device))] * steps, device, rounds)
    # where layers remember, a step reads what the steps before it have left
    pool = graph_pool(device)
    return replayed([Piece(partial(after, k), pool) for k in range(steps)], device, rounds)


def gradients_time(trainer: fl.Trainer, rounds: int) -> float | None:
    """Tell how long the weight gradients take that are made when a round ends."""
    runners = getattr(trainer.engine, "_rounds", [])
    if not runners or runners[-1].histories is None or runners[-1].end is None:
        return None
    histories, models = runners[-1].histories, runners[-1].buffers["models"][0]
    (experiments, clients, size), device = models.shape, models.device
    ones = torch.ones((1, experiments, clients, 1), device=device)
    total = torch.empty((experiments, size), dtype=torch.float64, device=device)
    none = torch.empty(0, dtype=torch.bool, device=device)
    ending = Ending(ones, ((0,),), (), [], none, [], ones[0, ..., 0] > 0, [], [], [total])

    def make() -> None:
        for layer in histories.layers.values():
            if layer.used:
                layer.end().close(ending)

    return replayed([Piece(make, graph_pool(device))], device, rounds)


def inside(
    chain: LinearChain, seat: Seat, batch: Batch, keys: Any, number: Any, stepping: Stepping
) -> Descent:
    """Let layers take a step of the chain while going back that leaves everything where it is."""
    nothing = Found(seat.carry.w, {}, seat.carry.loss, {}, seat.carry.buffers)
    way = chain.on_the_way_back(Step(*seat, batch, keys, number, nothing), 1.0)
    carried, clients = len(way.carried), len(way.carried[0])
    width = carried + 1 + len(way.shared) + len(way.own)
    table = torch.eye(carried, width, device=keys.device)[:, None].repeat(1, clients, 1)
    way.tell(table, torch.ones(clients, dtype=torch.bool, device=keys.device))
    return Descent(histories=stepping.histories, steps=chain.fits, chain=way)


def replayed(pieces: list[Piece], device: torch.device, rounds: int) -> float:
    """Tell how many milliseconds the recorded steps of a round take."""
    for _ in range(3):
        for piece in pieces:
            piece()
    wait(str(device))
    started = time.perf_counter()
    for _ in range(rounds):
        for piece in pieces:
            piece()
    wait(str(device))
    return (time.perf_counter() - started) / rounds * 1e3


def host_time(trainer: fl.Trainer) -> float:
    """Tell how long the host takes to queue a round."""
    wait(str(trainer.engine.device))
    started = time.perf_counter()
    queued = [trainer.advance() for _ in range(5)]
    taken = (time.perf_counter() - started) / 5 * 1e3
    queued[-1].result()
    return taken


def profile(run: Callable[[], Any]) -> list[list[Any]]:
    """List the kernels of one round: name, times called, microseconds in all."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watched

    with watched(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    rows = [(e.key, e.count, e.device_time_total) for e in seen.key_averages()]
    return [list(r) for r in sorted(rows, key=lambda r: -r[2])]


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", default="pfl_cifar,feddyn_100,feddyn_10")
    parser.add_argument("--algorithms", default="fedavg,scaffold_momentum")
    parser.add_argument("--precisions", default="tf32,bf16")
    parser.add_argument("--options", default="{}", help="JSON, further options of the engine")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.blocks = 2, 1
    card = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    args.most = ceilings(args.device)
    made = {"torch": torch.__version__, "device": card, "undrift": fl.__version__,
            "commit": commit()}  # fmt: skip
    kept = before(args.json, made)
    made |= {"ceilings": args.most, "results": kept}
    jobs = itertools.product(
        *(v.split(",") for v in (args.works, args.algorithms, args.precisions))
    )
    for name, algorithm, precision in jobs:
        options = {"precision": precision, **json.loads(args.options)}
        if any(has(one, name, algorithm, options) for one in kept):
            continue
        made["results"].append(tried(name, algorithm, options, args))
        show(made["results"][-1])
        if args.json:
            args.json.write_text(json.dumps(made, indent=1) + "\n")


def tried(name: str, algorithm: str, options: dict[str, Any], args: Any) -> dict[str, Any]:
    """Measure one; where it fails, the others go on."""
    try:
        return measure(name, algorithm, options, args)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"[:2000]
        return {"work": name, "algorithm": algorithm, "options": options, "error": told}
    finally:
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def before(file: Path | None, made: dict[str, str]) -> list[dict[str, Any]]:
    """List what was measured by the same versions on the same device."""
    found = json.loads(file.read_text()) if file and file.exists() else {}
    kept = [r for r in found.get("results", []) if "error" not in r]
    return kept if made.items() <= found.items() else []


def has(one: dict[str, Any], work: str, algorithm: str, options: dict[str, Any]) -> bool:
    same = one["options"] == {k: str(v) for k, v in options.items()}
    return same and one["work"] == work and one["algorithm"] == algorithm


def show(one: dict[str, Any]) -> None:
    head = f"{one['work']:11} {one['algorithm']:18} {one['options'].get('precision')!s:8}"
    if "error" in one:
        print(head, one["error"], flush=True)
        return
    told = f"{one['ms']:8.2f} ms {one['tflops']:7.1f} TFLOP/s  host {one['host_ms']:.2f} ms"
    if one["passes_ms"] is not None:
        late = one["gradients_ms"] or 0.0
        rest = 100 * (1 - (one["passes_ms"] + late) / one["ms"])
        told += f"  passes {one['passes_ms']:.2f} + {late:.2f} ms, rest {rest:.1f} %"
    print(head, told, f"built {one['built_s']:.0f} s  loss {one['losses']}", flush=True)
    for name, count, micro in one["profile"][:14]:
        print(f"    {micro:9.0f} us {count:5} x {name[:90]}")


if __name__ == "__main__":
    main()
