"""Every program, every kind of shape and configuration, against torch in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from undrift.kernels import launches, trials
from undrift.kernels.problem import Problem, takes, thin
from undrift.kernels.tuner import Trial

BOUND = {"float32": 1e-6, "tf32": 2e-3, "fp16": 2e-3, "bf16": 1e-2}
PRECISIONS = ["float32", "fp16", "tf32"] + (["bf16"] if torch.cuda.is_available() else [])

PROBLEMS = {
    "square": Problem(2, 3, 6, 6, 16, 16, (3, 3), relu=True, pool=True),
    "odd": Problem(2, 2, 7, 5, 5, 20, (3, 2), (1, 1), relu=True),
    "dilated": Problem(2, 1, 5, 6, 16, 5, (3, 3), (2, 1), (1, 2), bias=False),
    "wide": Problem(1, 1, 3, 4, 16, 140, (2, 1), (1, 0), pool=True),  # two blocks of channels
    "one channel": Problem(3, 1, 5, 5, 1, 1, (5, 5), (2, 2), relu=True),
}
CASES = [(name, "float32") for name in PROBLEMS] + [
    (name, precision) for name in ("square", "odd") for precision in PRECISIONS[1:]
]
CONVOLUTION = dict(BM=64, BN=16, BK=16, BY_ROW=False, QUAD_FIRST=False, num_warps=4, num_stages=2)
FIRST = {
    "even": Problem(2, 3, 6, 6, 3, 16, (3, 3), relu=True),
    "padded": Problem(2, 2, 5, 7, 1, 20, (5, 5), (2, 2), relu=True, pool=True),
    "wide": Problem(1, 2, 4, 6, 2, 70, (3, 3), (1, 1), bias=False, pool=True),
}


def error_of(trial: Trial, config: dict) -> float:
    for output in trial.outputs:
        output.fill_(float("nan") if output.is_floating_point() else 77)
    for launch in trial.launches(config):
        launch.run()
    return trial.error()


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_convolutions(name, precision, device):
    p = PROBLEMS[name]._replace(precision=precision)
    assert takes(p)
    columns = min(p.rows, 128)
    variants = [dict(CONVOLUTION, BN=columns)]
    variants += [dict(CONVOLUTION, BN=columns, QUAD_FIRST=True)] if p.pool else []
    by_row = not p.pool and p.inputs % 16 == 0
    variants += [dict(CONVOLUTION, BN=columns, BY_ROW=True)] if by_row else []
    trial = trials.convolution(p, device)
    for config in variants:
        assert error_of(trial, config) < BOUND[precision], config


@pytest.mark.parametrize("name", PROBLEMS)
def test_input_gradients(name, device):
    p = PROBLEMS[name].mirrored(narrow=False)
    variants = [dict(CONVOLUTION, BN=min(p.rows, 128))]
    variants += [dict(variants[0], BY_ROW=True)] if p.inputs % 16 == 0 else []
    trial = trials.convolution(p, device, mirror=True)
    for config in variants:
        assert error_of(trial, config) < BOUND["float32"], config


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_weight_gradients(name, precision, device):
    p = PROBLEMS[name]._replace(precision=precision)
    trial = trials.weight_gradient(p, device)
    for split in {1, trial.candidates[0]["SPLIT"]}:
        config = dict(trial.candidates[0], SPLIT=split, BC=64, BN=64, BP=32)
        assert error_of(trial, config) < BOUND[precision], config


@pytest.mark.parametrize(
    ("name", "precision"), [("even", "tf32"), ("padded", "fp16"), ("wide", "tf32")]
)
def test_first_layers(name, precision, device):
    p = FIRST[name]._replace(precision=precision)
    form = thin(p)
    assert form is not None
    forward, backward = trials.thin_convolution(p, device), trials.thin_weight_gradient(p, device)
    tile = dict(W=form.pairs, num_warps=4)
    for lines in (1, 2):
        config = dict(tile, R=lines, TILES_EACH=2, STAGES=2)
        assert error_of(forward, config) < BOUND[precision], config
        config = dict(tile, R=lines, SPLIT=2, BN=16, num_stages=2)
        assert error_of(backward, config) < BOUND[precision], config


@pytest.mark.parametrize("name", ["square", "odd"])
@pytest.mark.parametrize("order", ["as torch", "channels last"])
def test_gradients_go_back_through_relu_and_pooling(name, order, device):
    p = PROBLEMS[name]._replace(precision="fp16")
    g = torch.randn((p.clients, p.batch, *p.output, p.outputs), device=device)
    mine = g.permute(0, 1, 4, 2, 3)
    mine = mine.contiguous() if order == "as torch" else mine
    if p.pool:
        seen = torch.randint(0, 5, g.shape, dtype=torch.int8, device=device)
    else:
        seen = torch.randn(g.shape, dtype=torch.float16, device=device)
    size = (p.clients, p.batch, *p.between, p.outputs)
    whole = torch.full(size, float("nan"), dtype=torch.float16, device=device)
    cells, blocks = launches.unfinish_parts(p)
    parts = torch.full((p.clients, cells, p.outputs), float("nan"), device=device)
    peaks = torch.full((p.clients, cells * blocks), float("nan"), device=device)
    launches.unfinish(p, mine, seen, whole, parts, peaks).run()
    for c in range(p.clients):
        wanted = trials.whole_gradient(p, g[c], seen[c])
        assert torch.equal(trials.images_first(whole[c]), wanted.half().double())
        assert peaks[c].max() == wanted.abs().max()
        torch.testing.assert_close(
            parts[c].sum(0).double(), wanted.sum((0, 2, 3)), rtol=1e-5, atol=1e-5
        )


def test_wrong_numbers_are_noticed(device):
    """The comparisons must be able to fail."""
    p = PROBLEMS["square"]
    trial = trials.convolution(p, device)
    config = dict(CONVOLUTION, BN=p.rows)
    y, place = trial.outputs
    assert error_of(trial, config) < 1e-6
    y[-1, 0, 0, 0, 0] += 1
    assert trial.error() > 1e-3
    error_of(trial, config)
    place[0].fill_(0)
    assert trial.error() > 1e-3
    error_of(trial, config)
    y[0, 0, 0, 0, 0] = float("nan")
    assert trial.error() == float("inf")


def test_diverged_activations_stay_visible(device):
    """A NaN must reach the next layer: a client that diverged is found by it."""
    for p in (PROBLEMS["square"], PROBLEMS["odd"], FIRST["padded"]._replace(precision="tf32")):
        form = thin(p)
        trial = (
            trials.convolution(p, device) if form is None else trials.thin_convolution(p, device)
        )
        launch = trial.launches(trial.candidates[0])[0]
        launch.arguments[0][:, 0, 0, 0] = float("nan")  # one pixel of every client's first image
        launch.run()
        y = trial.outputs[0]
        assert y[:, 0, 0, 0].isnan().all()
        assert y[:, 1:].isfinite().all()


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("padding beyond the kernel", dict(padding=(3, 0))),
        ("too many channels", dict(inputs=4096)),
        ("nothing left to pool", dict(height=3, width=3)),
        ("offsets beyond 32 bits", dict(batch=2**24)),
    ],
)
def test_what_is_not_taken(why, change):
    assert takes(PROBLEMS["square"])
    assert not takes(PROBLEMS["square"]._replace(**change)), why
