"""A local step as one program: any module, any chain of rules, the numbers of the reference."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import undrift as fl
from undrift.engines import fused, stepping, whole_step


class Residual(nn.Module):
    """Convolutions of several kinds, norms, pooling, dropout, a way around."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), norm(4)
        self.second, self.norm2 = nn.Conv2d(4, 4, (3, 1), (2, 1), "valid", groups=2), norm(4)
        self.around, self.up = nn.Conv2d(4, 4, 3, (2, 1), (0, 1)), nn.ConvTranspose2d(4, 2, 2, 2)
        self.drop, self.drop2, self.head = nn.Dropout(0.2), nn.Dropout2d(0.2), nn.Linear(2, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.first(x))), 1, 1)
        x = self.drop(F.relu(self.norm2(self.second(x)), inplace=True) + self.around(x))
        return self.head(self.drop2(self.up(x)).mean((2, 3)))


class Letters(nn.Module):
    """Embedding, LSTM, attention by hand, einsum, a line of a convolution, a frozen layer."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True)
        self.qkv, self.line, self.out = nn.Linear(8, 24), nn.Conv1d(8, 8, 3), nn.Linear(8, 5)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        x = self.lstm(self.words(x))[0]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = torch.softmax(q @ k.transpose(-1, -2), -1)
        x = x + torch.einsum("bhts,bhsd->bthd", y, v).flatten(2)
        return self.out(self.frozen(self.line(x.transpose(1, 2)).mean(-1)))


MODULES = {
    "groups": lambda: Residual(lambda c: nn.GroupNorm(2, c)),
    "batches": lambda: Residual(nn.BatchNorm2d),
    "letters": Letters,
}
ALGORITHMS = {
    "scaffold": lambda: fl.scaffold(local=fl.sgd(0.05, momentum=0.9, clip=1.0)),
    "fedprox": lambda: fl.fedprox(lr=0.05, mu=0.1),
    "feddyn": lambda: fl.feddyn(0.05),
    "moon": lambda: fl.moon(0.05),
}


def clients(letters):
    maker = torch.Generator().manual_seed(3)

    def one(n):
        if letters:
            x = torch.randint(0, 11, (n, 6), generator=maker)
        else:
            x = torch.randn(n, 3, 7, 6, generator=maker, dtype=torch.float64)
        return x, torch.randint(0, 5, (n,), generator=maker)

    return [one(n) for n in (5, 9, 4)]


def after(module, algorithm, data, **options):
    feature = "head:input" if isinstance(module, Residual) else "out:input"
    task = fl.Task(copy.deepcopy(module), dtype=torch.float64, feature=feature)
    work = fl.Work(epochs=2, batch=4)
    made = fl.Trainer(task, fl.Federation.of(data), algorithm, work=work, seed=1, **options)
    made.run(2)
    return made.server.w


@pytest.fixture
def on_cpu(monkeypatch):
    """Let a CPU do as a device does, but for compiling."""
    monkeypatch.setattr(stepping, "WHOLE", {"cpu"})
    monkeypatch.setattr(fused, "TRACES", True)
    monkeypatch.setattr(whole_step, "LARGE", 64)  # several pieces


def agree(name, algorithm, monkeypatch):
    torch.manual_seed(0)
    module, data = MODULES[name](), clients(name == "letters")
    made, run = [], whole_step.WholeStep.__call__
    monkeypatch.setattr(
        whole_step.WholeStep, "__call__", lambda self, *t: made.append(self) or run(self, *t)
    )
    ours = after(module, ALGORITHMS[algorithm](), data, graph=True)
    theirs = after(module, ALGORITHMS[algorithm](), data, engine="reference")
    assert made and not made[0]._run.is_plain
    assert (ours - theirs).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("groups", "scaffold"), ("groups", "moon"), ("batches", "fedprox"), ("letters", "feddyn")],
)
def test_it_gives_the_numbers_of_the_reference(name, algorithm, on_cpu, monkeypatch):
    agree(name, algorithm, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_compiled_it_does_so_too(name, algorithm, on_cpu, monkeypatch):
    made = whole_step.Fused
    monkeypatch.setattr(
        whole_step, "Fused", lambda *a, **more: made(*a, **{**more, "compiled": True})
    )
    agree(name, algorithm, monkeypatch)


def test_what_cannot_be_traced_goes_line_by_line(on_cpu, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no trace today")

    torch.manual_seed(0)
    module, data = MODULES["groups"](), clients(False)
    monkeypatch.setattr(fused, "make_fx", refuse)
    ours = after(module, fl.fedavg(0.05), data, graph=True)
    theirs = after(module, fl.fedavg(0.05), data, engine="reference")
    assert (ours - theirs).abs().max() < 1e-12
