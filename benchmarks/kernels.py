"""The Triton kernels, layer by layer: right or wrong, and how fast against grouped convolutions.

    python benchmarks/kernels.py --out kernels.json            on a CUDA device, about 3 minutes
    python benchmarks/kernels.py --precisions fp16,bf16
    TRITON_INTERPRET=1 python benchmarks/kernels.py --tiny     the same code on a CPU

For every layer and precision: all configurations are compiled side by side, compared with torch in
float64 on poisoned memory and timed; then the op itself, as vmap(grad) calls it, is compared with
float64 (forward, weights, bias, input) and timed against torch's grouped convolution.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from undrift import kernels
from undrift.core.convolution import ConvShape, Way, convolve
from undrift.core.dense import multiply
from undrift.kernels import convolution, linear, trials, tuner
from undrift.kernels.linear import LinearProblem
from undrift.kernels.problem import Problem, thin

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
BOUNDS = {"float32": 2e-5, "tf32": 3e-3, "fp16": 3e-3, "bf16": 2e-2}
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}
REPEATS = 11


class Layer(NamedTuple):
    name: str
    problem: Problem
    first: bool  # its input needs no gradient


def layers(tiny: bool) -> list[Layer]:
    if tiny:
        return [
            Layer("first", Problem(2, 2, 10, 10, 3, 16, (3, 3), relu=True, pool=True), True),
            Layer("second", Problem(2, 2, 6, 6, 16, 20, (3, 3), relu=True, pool=True), False),
            Layer("padded", Problem(2, 2, 6, 5, 5, 16, (3, 3), (1, 1), relu=True), False),
        ]
    found = []
    for clients in (100, 10):
        one = Problem(clients, 50, 32, 32, 3, 64, (5, 5), relu=True, pool=True)
        two = Problem(clients, 50, 14, 14, 64, 64, (5, 5), relu=True, pool=True)
        found += [Layer("feddyn conv1", one, True), Layer("feddyn conv2", two, False)]
    one = Problem(50, 10, 32, 32, 3, 32, (3, 3), relu=True)
    two = Problem(50, 10, 30, 30, 32, 64, (3, 3), relu=True, pool=True)
    return [*found, Layer("simple conv1", one, True), Layer("simple conv2", two, False)]


# ------------------------------------------------------------------------------------- one kernel
def kernel_trials(layer: Layer, p: Problem) -> dict[str, tuple[Problem, tuner.Trial]]:
    """Name the trials as the op will look for them."""
    if thin(p) is not None:
        return {
            "first layer": (p, trials.thin_convolution(p, DEVICE)),
            "first layer's weight gradient": (p, trials.thin_weight_gradient(p, DEVICE)),
        }
    found = {
        "convolution": (p, trials.convolution(p, DEVICE)),
        "weight gradient": (p, trials.weight_gradient(p, DEVICE)),
    }
    if not layer.first:
        mirrored = p.mirrored(narrow=p.narrow)
        found["input gradient"] = (mirrored, trials.convolution(mirrored, DEVICE, mirror=True))
    return found


def tune_layers(chosen: list[Layer], precision: str) -> list[dict[str, Any]]:
    """Compile everything side by side, then time it one by one."""
    began = time.time()
    every = []
    for layer in chosen:
        p = layer.problem._replace(precision=precision, narrow=True)
        every += [(layer, name, *rest) for name, rest in kernel_trials(layer, p).items()]
    tuner.compile_all([trial for *_, trial in every])
    say(f"[{precision}] {len(every)} kernels compiled in {time.time() - began:.0f} s")
    rows = []
    for layer, name, p, trial in every:
        key = tuner.full_key(name, p.key(), DEVICE)
        tuner.chosen[key] = tuner.tune(key, trial)
        best = tuner.timings[key][0]
        failed = sum(math.isinf(t.milliseconds) for t in tuner.timings[key])
        rate = layer.problem.operations / best.milliseconds / 1e9 if best.milliseconds else 0.0
        row = dict(
            layer=layer.name, clients=p.clients, batch=p.batch, precision=precision, kernel=name,
            milliseconds=best.milliseconds, teraflops=rate, error=best.error, failed=failed,
            tried=len(trial.candidates), configuration=best.configuration,
        )  # fmt: skip
        rows.append(row)
        say(
            f"  {layer.name:13s} C={p.clients:<4d} {name:30s} {best.milliseconds:8.3f} ms "
            f"{rate:7.1f} TFLOP/s  error {best.error:.1e}  {failed}/{len(trial.candidates)} failed"
            f"  {list(best.configuration.values())}"
        )
    return rows


# --------------------------------------------------------------------------------------- the op
@contextmanager
def poisoned() -> Iterator[None]:
    """Let torch fill new memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def inputs(p: Problem, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw x, and w and b as rows of one matrix, and a gradient of the output."""
    source = torch.Generator(DEVICE).manual_seed(seed)
    size = p.outputs * p.inputs * p.taps
    rows = torch.randn((p.clients, size + p.outputs + 3), generator=source, device=DEVICE)
    w = rows[:, 1 : size + 1].mul_(0.1).unflatten(1, (p.outputs, p.inputs, *p.kernel))
    x = torch.randn(
        (p.clients, p.batch, p.inputs, p.height, p.width), generator=source, device=DEVICE
    )
    g = torch.randn((p.clients, p.batch, p.outputs, *p.output), generator=source, device=DEVICE)
    return x, w, rows[:, size + 1 : size + 1 + p.outputs], g


def reference(p: Problem, x: Tensor, w: Tensor, g: Tensor, seen: Tensor) -> list[Tensor]:
    """Give dw, db and dx of one client in float64.

    ReLU and pooling are taken as the kernel has decided them (`seen`): near a tie a rounding error
    decides, and that is no mistake.
    """
    whole = trials.whole_gradient(p, g.permute(0, 2, 3, 1), seen)
    by_input = conv2d_input(x.shape, w.double(), whole, 1, p.padding, p.dilation)
    return [trials.weight_gradient_of(p, x.double(), whole), whole.sum((0, 2, 3)), by_input]


def shape_of(p: Problem) -> ConvShape:
    return ConvShape((1, 1), p.padding, p.dilation, 1, p.relu, p.pool)


def operand(t: Tensor, precision: str) -> Tensor:
    """Round to the operand type, so that ReLU and pooling decide as the kernel does."""
    kind = KINDS.get(precision, torch.float32)
    return t.to(kind).float()


def check_op(layer: Layer, precision: str) -> dict[str, float]:
    """Compare vmap(grad) through the seam with float64, for some clients."""
    p = layer.problem._replace(precision=precision, narrow=True)
    x, w, b, g = (operand(t, precision) for t in inputs(p, seed=17))
    how = Way("triton", precision, narrow=True)
    names = ("weights", "bias") if layer.first else ("weights", "bias", "input")

    def loss(w: Tensor, b: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        y = convolve(x, w, b, shape_of(p), how)
        return (y * g).sum(), y

    shown = x if layer.first else x.to(p.operand)
    by = tuple(range(len(names)))
    with poisoned():
        found, y = vmap(grad(loss, argnums=by, has_aux=True))(w, b, shown, g)
        last, place, _ = convolution.convolve(p, shown, w, b)
    last = last.permute(0, 1, 3, 4, 2)
    worst = dict.fromkeys(("forward", *names), 0.0)
    for c in sorted({0, p.clients // 2, p.clients - 1}):
        z = F.conv2d(x[c].double(), w[c].double(), b[c].double(), 1, p.padding, p.dilation)
        seen = place[c] if p.pool else last[c]
        worst["forward"] = max(worst["forward"], trials.finished_error(p, z, last[c], seen))
        right = reference(p, x[c], w[c], g[c], seen)
        for name, mine, wanted in zip(names, found, right, strict=False):
            worst[name] = max(worst[name], trials.relative(mine[c], wanted))
    same = torch.equal(y, last.permute(0, 1, 4, 2, 3))
    finite = all(t.isfinite().all() for t in (y, *found))
    return worst if same and finite else dict.fromkeys(worst, math.inf)


def time_of(work: Callable[[], Any]) -> float:
    """Milliseconds on the device, the median of several calls; 0 on a CPU."""
    if DEVICE.type != "cuda":
        work()
        return 0.0
    for _ in range(3):
        work()
    taken = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # the host runs ahead
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def time_op(layer: Layer, precision: str, way: str) -> tuple[float, float]:
    """Time forward, and forward with all gradients that training needs."""
    p = layer.problem
    x, w, b, g = inputs(p, seed=3)
    how = Way(way, precision, narrow=True)
    kind = KINDS.get(precision, torch.float32)
    if not layer.first:  # as the layer before would leave it
        x = x.to(kind).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    g = g.to(kind).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    leaves = [w.detach().requires_grad_(), b.detach().requires_grad_()]
    leaves += [] if layer.first else [x.detach().requires_grad_()]

    def forward() -> Tensor:
        inner = leaves[2] if len(leaves) == 3 else x
        return vmap(lambda x, w, b: convolve(x, w, b, shape_of(p), how))(inner, *leaves[:2])

    def both() -> None:
        torch.autograd.grad(forward(), leaves, g.to(forward_type))

    with torch.no_grad():
        forward_type = forward().dtype
        alone = time_of(forward)
    return alone, time_of(both)


def measure_op(layer: Layer, precision: str) -> dict[str, Any]:
    p = layer.problem
    errors = check_op(layer, precision)
    right = max(errors.values()) < BOUNDS[precision]
    row: dict[str, Any] = dict(
        layer=layer.name, clients=p.clients, batch=p.batch, precision=precision, errors=errors,
        right=right,
    )  # fmt: skip
    passes = 2 if layer.first else 3
    for way in ("triton", "grouped", "channels_last"):
        alone, both = time_op(layer, precision, way)
        rate = passes * p.operations / both / 1e9 if both else 0.0
        row[way] = dict(forward=alone, both=both, teraflops=rate)
    times = {way: row[way]["both"] for way in ("grouped", "channels_last")}
    ratio = min(times.values()) / row["triton"]["both"] if row["triton"]["both"] else 0.0
    say(
        f"  {layer.name:13s} C={p.clients:<4d} {precision:8s} "
        f"{row['triton']['forward']:7.3f} + {row['triton']['both'] - row['triton']['forward']:7.3f}"
        f" ms {row['triton']['teraflops']:6.1f} TFLOP/s; grouped {times['grouped']:8.3f}, "
        f"channels last {times['channels_last']:8.3f} ms: {ratio:5.1f}x; errors "
        + " ".join(f"{e:.1e}" for e in errors.values())
        + ("" if right else "  WRONG")
    )
    return row


# ------------------------------------------------------------------------------- linear layers
def linear_layers(tiny: bool) -> list[LinearProblem]:
    if tiny:
        return [LinearProblem(2, 3, 50, 20, ""), LinearProblem(2, 10, 64, 32, "")]
    sizes = [(50, 10, 12544, 128), (50, 10, 128, 10), (100, 50, 1600, 384), (100, 50, 384, 192)]
    return [LinearProblem(*size, "") for size in [*sizes, (100, 50, 192, 10), (10, 50, 1600, 384)]]


def measure_linear(problem: LinearProblem, precision: str) -> dict[str, Any]:
    """Check and time forward, backward and the step, as rows of one matrix."""
    p = problem._replace(precision=precision)
    source = torch.Generator(DEVICE).manual_seed(5)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=source, device=DEVICE)

    size = p.outputs * p.inputs
    matrix = draw(p.clients, -(-(size + p.outputs) // 16) * 16).mul_(0.1)
    w = matrix[:, :size].unflatten(1, (p.outputs, p.inputs))
    b = matrix[:, size : size + p.outputs]
    x, g = draw(p.clients, p.rows, p.inputs).to(p.operand), draw(p.clients, p.rows, p.outputs)
    rates = torch.full((p.clients,), 0.01, device=DEVICE)
    some = (True, True, True)
    kind, wide = p.operand, torch.float32
    with poisoned():
        y, made = linear.forward(p, x, w, b, wide), linear.backward(p, g, x, w, some, wide)
    narrow, old = g.to(kind).double(), matrix.clone()
    right = [
        torch.baddbmm(b[:, None].double(), x.double(), w.to(kind).double().transpose(1, 2)),
        narrow @ w.to(kind).double(),
        narrow.transpose(1, 2) @ x.double(),
        g.double().sum(1),
    ]
    errors = [trials.relative(a, r) for a, r in zip([y, *made], right, strict=True)]
    gx = linear.descend(p, g, x, w, b, (rates, 1.0), True, wide)
    moved = (old - matrix)[:, :size].unflatten(1, (p.outputs, p.inputs))
    errors += [trials.relative(gx, right[1]), trials.relative(moved, 0.01 * right[2])]
    row: dict[str, Any] = dict(
        layer=f"{p.inputs}->{p.outputs}", clients=p.clients, batch=p.rows, precision=precision,
        errors=errors, right=max(errors) < 3 * BOUNDS[precision],
        forward=time_of(lambda: linear.forward(p, x, w, b, wide)),
        backward=time_of(lambda: linear.backward(p, g, x, w, some, kind)),
        descend=time_of(lambda: linear.descend(p, g, x, w, b, (rates, 1.0), True, kind)),
        torch_forward=time_of(lambda: multiply(x, w.to(kind).transpose(1, 2), precision)),
        torch_backward=time_of(lambda: (
            multiply(g.to(kind), w.to(kind), precision),
            multiply(g.to(kind).transpose(1, 2), x, precision),
        )),
    )  # fmt: skip
    bytes_of_weights = 4.0 * p.clients * size
    speed = {
        name: bytes_of_weights * times / row[name] / 1e9 if row[name] else 0.0
        for name, times in (("forward", 1), ("backward", 2), ("descend", 2))
    }
    row["terabytes"] = speed
    say(
        f"  {row['layer']:12s} C={p.clients:<4d} B={p.rows:<3d} {precision:8s} "
        f"forward {row['forward']:.3f} ms ({speed['forward']:.1f} TB/s; torch "
        f"{row['torch_forward']:.3f}), backward {row['backward']:.3f}, with the step "
        f"{row['descend']:.3f} ({speed['descend']:.1f} TB/s; torch {row['torch_backward']:.3f}); "
        "errors " + " ".join(f"{e:.1e}" for e in errors) + ("" if row["right"] else "  WRONG")
    )
    return row


def say(text: str) -> None:
    print(text, flush=True)


def versions() -> dict[str, str]:
    import triton

    card = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "interpreter"
    return {"torch": torch.__version__, "triton": triton.__version__, "device": card}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", default="fp16,bf16,tf32,float32")
    parser.add_argument("--only", choices=["convolutions", "linear"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kernels.need(DEVICE)
    began, chosen = time.time(), layers(options.tiny)
    precisions = [
        p for p in options.precisions.split(",") if not (p == "bf16" and kernels.interpreted())
    ]  # the interpreter multiplies bf16 as integers
    say(str(versions()))
    tuned, measured = [], []
    for precision in precisions:
        if options.only != "linear":
            tuned += tune_layers(chosen, precision)
            measured += [measure_op(layer, precision) for layer in chosen]
        if options.only != "convolutions":
            flat = linear_layers(options.tiny)
            measured += [measure_linear(problem, precision) for problem in flat]
        say(f"[{time.time() - began:.0f} s]")
    found = dict(
        versions=versions(), kernels=tuned, ops=measured, configurations=kernels.tuned(),
        timings={key: list(found) for key, found in tuner.timings.items()},
    )  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    wrong = [row for row in measured if not row["right"]]
    say(f"{len(measured)} layers, {len(wrong)} wrong, {time.time() - began:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
