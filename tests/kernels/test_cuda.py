"""What only a device can show: graphs, streams, tuning, and every configuration that is tried."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

pytest.importorskip("triton", reason="the kernels need triton")

from undrift import kernels
from undrift.core.convolution import ConvShape, Way, convolve
from undrift.core.dense import dense
from undrift.core.dropping import drop
from undrift.kernels import linear, memory, trials, tuner
from undrift.kernels.linear import LinearProblem
from undrift.kernels.problem import Problem, thin
from undrift.testing.compare import distance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

C, B = 4, 6
SHAPE = ConvShape(padding=(1, 1), relu=True, pool=True)


def step(
    w: Tensor, b: Tensor, v: Tensor, x: Tensor, key: Tensor, precision: str, way: str, bent=True
):
    """Go through a first layer, dropout and a linear layer, and back."""
    shape = SHAPE._replace(relu=bent, pool=bent)

    def loss(w, b, v, x, key):
        h = convolve(x, w, b, shape, Way(way, precision, narrow=True))
        h = drop(h, key, (1, 0), 0.25, h.dim(), use_kernel=way == "triton")
        return (dense(h.flatten(1), v, None, Way(way, precision)) ** 2).mean()

    return vmap(grad(loss, (0, 1, 2)))(w, b, v, x, key)


def operands(pixels: int = 36) -> tuple[Tensor, ...]:
    source = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=source, device="cuda")

    keys = torch.arange(C, device="cuda")
    return draw(C, 16, 3, 3, 3), draw(C, 16), draw(C, 10, 16 * pixels), draw(C, B, 3, 12, 12), keys


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "float32"])
def test_a_captured_step_is_the_eager_one(precision):
    values = operands()
    wanted = step(*values, precision, "triton")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*values, precision, "triton")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(*values, precision, "triton")
    for t in found:
        t.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("bent", [False, True])
@pytest.mark.parametrize(("precision", "bound"), [("tf32", 3e-3), ("bf16", 2e-2), ("fp16", 3e-3)])
def test_kernels_agree_with_torch(precision, bound, bent):
    values = operands(36 if bent else 144)
    wanted = step(*values, "float32", "loop", bent)
    bound = 10 * bound if bent else bound  # rounding turns some signs, and the largest of a window
    for a, r in zip(step(*values, precision, "triton", bent), wanted, strict=True):
        assert float((a - r).norm() / r.norm()) <= bound


def test_streams_give_the_numbers_of_a_loop():
    w, b, _, x, _ = (t.double() for t in operands())

    def run(way: str):
        def loss(w, b, x):
            return (convolve(x, w, b, SHAPE, Way(way)) ** 2).mean()

        return vmap(grad(loss, (0, 1, 2)))(w, b, x)

    assert distance(run("streams"), run("loop")) <= 1e-12


PROBLEMS = [
    Problem(20, 10, 16, 16, 3, 32, (5, 5), relu=True, pool=True),
    Problem(20, 10, 12, 12, 32, 48, (3, 3), (1, 1), relu=True),
    Problem(20, 10, 12, 12, 24, 160, (3, 3), relu=True, pool=True),
]


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "float32"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=["first", "padded", "wide"])
def test_most_configurations_are_right(problem, precision):
    p, device = problem._replace(precision=precision), torch.device("cuda")
    tried = [trials.convolution(p, device), trials.weight_gradient(p, device)]
    tried.append(trials.convolution(p.mirrored(True), device, mirror=True))
    if thin(p) is not None:
        tried += [trials.thin_convolution(p, device), trials.thin_weight_gradient(p, device)]
    for trial in tried:
        tuner.compile_all([trial])
        found = [tuner._try(trial, c, timed=False) for c in trial.candidates]
        assert found[0].milliseconds < float("inf"), found[0]
        wrong = [t for t in found if t.error == t.error and t.milliseconds == float("inf")]
        assert not wrong, "compiled, ran and gave wrong numbers"


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "float32"])
def test_linear_configurations_are_right(precision):
    p, device = LinearProblem(10, 20, 300, 70, precision), torch.device("cuda")
    makers = [linear._forward_trial, linear._backward_trial, linear._step_trial]
    makers += [linear._adding_trial]
    makers += [linear._rebuilding_trial] if linear.rebuilds(p) else []
    for make in makers:
        trial = make(p, device)
        assert all(
            tuner._try(trial, c, timed=False).milliseconds < float("inf") for c in trial.candidates
        )


def test_a_large_problem_is_tuned_and_remembered(tmp_path, monkeypatch):
    # nothing is known: neither from this process and others beside it, nor shipped
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path))
    monkeypatch.setattr(memory, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(memory, "_known", {})
    monkeypatch.setattr(tuner, "chosen", {})
    monkeypatch.setattr(tuner, "timings", {})
    source = torch.Generator("cuda").manual_seed(0)
    x = torch.randn((32, 32, 3, 32, 32), generator=source, device="cuda")
    w = torch.randn((32, 32, 3, 5, 5), generator=source, device="cuda")
    vmap(lambda x, w: convolve(x, w, None, SHAPE, Way("triton", "bf16")))(x, w)
    (made,) = kernels.tuned()
    assert made.startswith("first layer: 32x32 32x32 3->32 5x5")
    assert made in tuner.timings
    memory._known.clear()  # as another process would find it
    assert memory.recall(made) == tuner.chosen[made]
