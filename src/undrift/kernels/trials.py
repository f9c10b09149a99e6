"""Kernels on random inputs, compared with torch in float64 on the very operands that they read.

Some clients are compared, the first and the last among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from undrift.kernels import candidates, launches
from undrift.kernels.problem import Problem, Thin, thin
from undrift.kernels.tuner import Configuration, Launch, Trial


def _random(seed: int, device: torch.device) -> Callable[..., Tensor]:
    source = torch.Generator(device).manual_seed(seed)

    def draw(*size: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        values = torch.randn(size, generator=source, device=device)
        return values.mul_(scale).to(dtype)

    return draw


def some_of(clients: int) -> list[int]:
    """Choose the clients that are compared."""
    return sorted({0, clients // 2, clients - 1})


def relative(a: Tensor, b: Tensor) -> float:
    """Give the distance of a from b over the length of b."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def largest(g: Tensor) -> Tensor:
    """Give the largest magnitude of each client."""
    return torch.linalg.vector_norm(g.flatten(1), float("inf"), 1, dtype=torch.float32)


def images_first(x: Tensor) -> Tensor:
    """[B, H, W, c] -> [B, c, H, W] in float64."""
    return x.double().permute(0, 3, 1, 2)


def plain_output(p: Problem, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Convolve one client's [B, ci, H, W] with torch, before ReLU and pooling."""
    bias = None if b is None else b.double()
    return F.conv2d(x.double(), w.double(), bias, 1, p.padding, p.dilation)


def finished_error(p: Problem, z: Tensor, y: Tensor, place: Tensor) -> float:
    """Compare y and place [B, h, w, co] with what the convolution's output z calls for."""
    wanted = F.max_pool2d(z, 2) if p.pool else z
    wanted = wanted.relu() if p.relu else wanted
    error = relative(images_first(y), wanted)
    if not p.pool:
        return error
    where = place.permute(0, 3, 1, 2)
    if bool(((where < 0) | (where > 4)).any()):
        return float("inf")
    rows, columns = p.output
    picked = torch.zeros_like(wanted)
    for q in range(4):
        part = z[..., q // 2 : 2 * rows : 2, q % 2 : 2 * columns : 2]
        picked = torch.where(where == q, part, picked)
    return max(error, relative(picked, wanted))


def convolution(p: Problem, device: torch.device, mirror: bool = False) -> Trial:
    """Try `convolve`; `mirror`: as the gradient by an input."""
    draw = _random(1, device)
    x = draw(p.clients, p.batch, p.height, p.width, p.inputs, dtype=p.operand)
    sizes = (p.inputs, p.outputs) if mirror else (p.outputs, p.inputs)
    w = draw(p.clients, *sizes, *p.kernel, scale=0.1)
    b = draw(p.clients, p.outputs) if p.bias else None
    packed = w.new_empty((p.clients, p.rows, p.depth), dtype=p.operand)
    launches.pack_weights(p, w.flatten(3), packed, mirror).run()
    y = torch.empty((p.clients, p.batch, *p.output, p.outputs), dtype=p.result, device=device)
    place = torch.empty(y.shape if p.pool else (1,), dtype=torch.int8, device=device)

    def launch(config: Configuration) -> list[Launch]:
        return [launches.convolve(p, config, x, packed, b, y, place)]

    def error() -> float:
        worst = 0.0
        for c in some_of(p.clients):
            kernel = w[c].to(p.operand)
            kernel = kernel.transpose(0, 1).flip(2, 3) if mirror else kernel
            z = plain_output(p, images_first(x[c]), kernel, None if b is None else b[c])
            worst = max(worst, finished_error(p, z, y[c], place[c] if p.pool else place))
        return worst if bool(y.isfinite().all()) else float("inf")

    outputs = [y, place] if p.pool else [y]
    return Trial(candidates.for_convolution(p), launch, outputs, error, p.precision)


def weight_gradient(p: Problem, device: torch.device) -> Trial:
    """Try `weight_gradient` and the sum of its parts."""
    draw = _random(2, device)
    x = draw(p.clients, p.batch, p.height, p.width, p.inputs, dtype=p.operand)
    g = draw(p.clients, p.batch, *p.between, p.outputs, dtype=p.operand)
    peaks = torch.stack([largest(g), largest(x)], 1)
    options = candidates.for_weight_gradient(p)
    most = max(config["SPLIT"] for config in options)
    parts = g.new_empty((most, p.clients, p.outputs, p.taps, p.inputs), dtype=torch.float32)
    dw = parts.new_empty((p.clients, p.outputs, p.inputs, p.taps))

    def launch(config: Configuration) -> list[Launch]:
        return [
            launches.weight_gradient(p, config, x, g, peaks, parts),
            launches.sum_parts(p, config["SPLIT"], parts, None, dw, None),
        ]

    def error() -> float:
        wanted = [
            weight_gradient_of(p, images_first(x[c]), images_first(g[c]))
            for c in some_of(p.clients)
        ]
        found = [dw[c] for c in some_of(p.clients)]
        worst = max(relative(a, b.flatten(2)) for a, b in zip(found, wanted, strict=True))
        return worst if bool(dw.isfinite().all()) else float("inf")

    return Trial(options, launch, [parts, dw], error, p.precision)


def weight_gradient_of(p: Problem, x: Tensor, g: Tensor) -> Tensor:
    """Differentiate one client's convolution by its weights, with torch."""
    size = (p.outputs, p.inputs, *p.kernel)
    found: Tensor = conv2d_weight(x, size, g, 1, p.padding, p.dilation)
    return found


# --------------------------------------------------------------------------------- a first layer
def _thin_inputs(p: Problem, form: Thin, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    draw = _random(seed, device)
    x = draw(p.clients, p.batch, p.inputs, p.height, p.width)
    packed = x.new_empty((p.clients, p.batch, form.height, form.width, 4), dtype=p.operand)
    launches.pack_images(p, form, x, packed).run()
    return x.to(p.operand), packed


def thin_convolution(p: Problem, device: torch.device) -> Trial:
    """Try `thin_convolve`."""
    form = thin(p)
    assert form is not None, "asked for before"
    x, images = _thin_inputs(p, form, device, 3)
    draw = _random(4, device)
    w = draw(p.clients, p.outputs, p.inputs, *p.kernel, scale=0.1)
    b = draw(p.clients, p.outputs) if p.bias else None
    packed = images.new_empty((p.clients, form.blocks, 2 * form.block, form.depth))
    launches.pack_pairs(p, form, w, b, packed).run()
    y = torch.empty((p.clients, p.batch, *p.output, p.outputs), dtype=p.result, device=device)
    place = torch.empty(y.shape if p.pool else (1,), dtype=torch.int8, device=device)

    def launch(config: Configuration) -> list[Launch]:
        return [launches.thin_convolve(p, form, config, images, packed, y, place)]

    def error() -> float:
        worst = 0.0
        for c in some_of(p.clients):
            bias = None if b is None else b[c].to(p.operand)
            z = plain_output(p, x[c], w[c].to(p.operand), bias)
            worst = max(worst, finished_error(p, z, y[c], place[c] if p.pool else place))
        return worst if bool(y.isfinite().all()) else float("inf")

    outputs = [y, place] if p.pool else [y]
    return Trial(candidates.for_thin(p, form), launch, outputs, error, p.precision)


def thin_weight_gradient(p: Problem, device: torch.device) -> Trial:
    """Try `thin_weight_gradient` and the sum of its parts."""
    form = thin(p)
    assert form is not None, "asked for before"
    x, images = _thin_inputs(p, form, device, 5)
    draw = _random(6, device)
    g = draw(p.clients, p.batch, *p.output, p.outputs, dtype=p.operand)
    if p.pool:
        seen = draw(*g.shape).abs().mul_(3).clamp_max_(4).to(torch.int8)
    else:
        seen = draw(*g.shape, dtype=p.operand)
    peaks = torch.stack([largest(g), largest(images)], 1)
    options = candidates.for_thin_weight_gradient(p, form)
    most = max(math.prod(launches.thin_parts(p, form, config)) for config in options)
    parts = g.new_empty((most,), dtype=torch.float32)
    dw = parts.new_empty((p.clients, p.outputs, p.inputs, *p.kernel))
    db = parts.new_empty((p.clients, p.outputs))

    def launch(config: Configuration) -> list[Launch]:
        return [
            launches.thin_weight_gradient(p, form, config, images, g, seen, peaks, parts),
            launches.sum_pairs(p, form, config, parts, dw, db),
        ]

    def error() -> float:
        worst = 0.0
        for c in some_of(p.clients):
            whole = whole_gradient(p, g[c], seen[c])
            worst = max(worst, relative(dw[c], weight_gradient_of(p, x[c].double(), whole)))
            worst = max(worst, relative(db[c], whole.sum((0, 2, 3))))
        return worst if bool(dw.isfinite().all() and db.isfinite().all()) else float("inf")

    return Trial(options, launch, [parts, dw, db], error, p.precision)


def whole_gradient(p: Problem, g: Tensor, seen: Tensor) -> Tensor:
    """Bring one client's gradient [B, h, w, co] back through ReLU and pooling, with torch."""
    g, seen = images_first(g), seen.permute(0, 3, 1, 2)
    if not p.pool:
        return torch.where(seen > 0, g, 0.0) if p.relu else g
    rows, columns = p.output
    whole = g.new_zeros((*g.shape[:2], *p.between))
    for q in range(4):
        part = torch.where(seen == q, g, 0.0)
        whole[..., q // 2 : 2 * rows : 2, q % 2 : 2 * columns : 2] = part
    return whole
