"""A fused function is compiled once, for tensors as they lie in memory, and gives the same."""

import shutil

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from undrift.engines import fused
from undrift.engines.fused import Fused
from undrift.program.compile import alike


@pytest.fixture
def compiled(monkeypatch):
    """Count how often the compiler is called; it runs what it is given as it stands."""
    calls = []

    def compiler(graph, inputs):
        calls.append(graph)
        return graph

    monkeypatch.setattr(fused, "compile_recorded", compiler)
    return calls


def aligned_rows():
    """Give rows with gaps between them, as models have on a device."""
    return torch.zeros(3, 8)[:, :5].copy_(torch.arange(15.0).view(3, 5))


def test_rows_with_gaps_and_a_row_given_twice_are_compiled_for_once(compiled):
    def move(w, point, step, lr):
        w.copy_(w - lr * (step + point))
        return w.sum(1)

    w, step, lr = aligned_rows(), aligned_rows() + 1, torch.tensor([0.5]).expand(5)
    mine, plain = Fused(move, "a step", compiled=True), w.clone()
    for _ in range(3):
        wanted = move(plain, plain.clone(), step, lr)
        assert torch.equal(mine(w, w[:], step, lr), wanted)
        assert torch.equal(w, plain)
    assert len(compiled) == 1


def test_compiled_code_is_tried_on_what_is_given_not_on_what_tracing_left(compiled):
    def pick(k, values):
        value = values.index_select(0, k)  # out of range once the counter has gone on
        k.add_(1)
        return value

    k, values = torch.tensor([0]), torch.tensor([7.0])
    picked = Fused(pick, "a pick", compiled=True)
    assert torch.equal(picked(k, values), values) and not picked.is_plain
    assert k == 1


def test_what_was_the_same_and_no_longer_is_gets_code_of_its_own(compiled):
    add = Fused(lambda a, b: a + 2 * b, "a sum", compiled=True)
    a, b = torch.ones(4), torch.full((4,), 5.0)
    assert torch.equal(add(a, a), torch.full((4,), 3.0))
    assert torch.equal(add(a, b), torch.full((4,), 11.0))
    assert torch.equal(add(b, b), torch.full((4,), 15.0))


def test_empty_tensors_are_never_the_same(compiled):
    shapes = Fused(lambda a, b: (a.sum() + 1, b.sum() + 2), "sums", compiled=True)
    assert shapes(torch.zeros(0), torch.zeros(0)) == (torch.tensor(1.0), torch.tensor(2.0))


def test_other_shapes_get_code_of_their_own_and_those_of_before_keep_theirs(compiled):
    add = Fused(lambda a: a + len(a), "a sum", compiled=True)
    for count in (3, 5, 3, 5):
        assert torch.equal(add(torch.ones(count)), torch.full((count,), 1.0 + count))
    assert len(compiled) == 2


def test_settings_are_made_for_what_is_compiled(monkeypatch):
    from torch._inductor import config

    seen = {}

    def looking(graph, inputs):
        asked = config.compile_threads, config.deterministic, config.triton.persistent_reductions
        seen[len(seen)] = asked
        return graph

    monkeypatch.setattr(fused, "compile_recorded", looking)
    usual = config.triton.persistent_reductions
    Fused(lambda v: v.sort(stable=True).indices, "an order", compiled=True)(torch.rand(4))
    Fused(lambda v: v + 1, "a sum", compiled=True)(torch.rand(4))
    assert seen == {0: (1, True, False), 1: (1, True, usual)}
    assert config.triton.persistent_reductions == usual


@pytest.mark.parametrize("wrong", [None, "result", "in place"])
def test_a_compiler_that_errs_is_found_out(wrong, monkeypatch, caplog):
    def compiler(traced, _):
        def made(*given):
            results = list(traced(*given))
            if wrong == "result":
                results[0] = results[0] * 1.01
            if wrong == "in place":
                given[0][1] += 0.5
            return [r * (1 + 1e-7) for r in results]

        return made

    monkeypatch.setattr(fused, "compile_recorded", compiler)

    def step(w, g):
        w.sub_(g)
        return w.sum(), torch.where(w > 0, w, torch.nan)

    w, g = torch.arange(4.0), torch.full((4,), 0.5)
    made = Fused(step, "a step", compiled=True, proven=True)
    with caplog.at_level("INFO", "undrift"):
        total, _ = made(w, g)
    assert made.is_plain == (wrong is not None) == ("gives other numbers" in caplog.text)
    assert w.tolist() == [-0.5, 0.5, 1.5, 2.5] and float(total) == pytest.approx(4.0)


def test_numbers_that_arealike():
    a = torch.tensor([1.0, torch.nan, torch.inf, 1e-9])
    assert alike(a * (1 + 1e-6), a) and alike(a[1:3], a[1:3]) and alike(a[:0], a[:0])
    assert not alike(a * 1.001, a) and not alike(a.nan_to_num(), a) and not alike(a[:2], a)
    assert not alike(a.double(), a) and not alike(torch.tensor([2]), torch.tensor([1]))


def test_numbers_that_a_function_has_written_down_lie_where_its_arguments_do():
    def marked(v):
        v[0] = 1.0
        return v * torch.tensor(2.0)

    traced = make_fx(marked)(torch.zeros(3))
    constants = [node.target for node in traced.graph.find_nodes(op="get_attr")]
    fused._bring_constants(traced, [torch.zeros(3, device="meta")])
    assert len(constants) == 2
    assert all(getattr(traced, name).device.type == "meta" for name in constants)


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch compiles by a C++ compiler"
)
def test_the_compiler_itself():
    """Torch's own, for recorded operations, in place and otherwise."""

    def step(w, g, lr):
        w.sub_(lr * g)
        return w.sum(1), torch.where(w > 0, w, -w)

    w, g, lr = aligned_rows(), aligned_rows() + 1, torch.tensor(0.5)
    made, plain = Fused(step, "a step", compiled=True, proven=True), w.clone()
    for _ in range(2):
        for found, wanted in zip(made(w, g, lr), step(plain, g, lr), strict=True):
            torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(w, plain)
    assert not made.is_plain
