"""Modules with a forward of their own on a CUDA device: numbers of a CPU, the same bits twice."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import undrift as fl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Of the change, relative.  Rounding the inputs of all products to the 10 bits of tf32 and fp16
# moves `Pictures` by 2 to 3 % in float64 already: pooling and ReLU then choose other elements.
APART = {"float32": 2e-5, "tf32": 5e-2, "bf16": 8e-2, "fp16": 5e-2}


class Pictures(nn.Module):
    """Convolutions that kernels take, strided and transposed ones, pooling, dropout."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 5, padding=2), nn.Conv2d(16, 32, 3, padding=1)
        self.norm, self.third = norm(32), nn.Conv2d(32, 32, 3, 2, 1, groups=2)
        self.up, self.head = nn.ConvTranspose2d(32, 8, 2, 2), nn.Linear(8, 10)
        self.drop, self.drop2 = nn.Dropout(0.2), nn.Dropout2d(0.2)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = self.drop(F.relu(self.norm(torch.relu(self.second(x)))))
        return self.head(self.drop2(self.up(self.third(x) + x[:, :, ::2, ::2])).mean((2, 3)))


class Letters(nn.Module):
    """Embedding, LSTM, both kinds of attention, a frozen layer."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(31, 16), nn.LSTM(16, 32, 2, batch_first=True)
        self.heads, self.qkv = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 96)
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 10)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x):
        x = self.lstm(self.words(x))[0]
        x = x + self.heads(x, x, x, need_weights=False)[0]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(self.frozen(x + y.transpose(1, 2).flatten(2)).mean(1))


MODULES = {
    "groups": lambda: Pictures(lambda c: nn.GroupNorm(4, c)),
    "batches": lambda: Pictures(nn.BatchNorm2d),
    "letters": Letters,
}
ALGORITHMS = {
    "scaffold": lambda: fl.scaffold(local=fl.sgd(0.05, momentum=0.9, clip=5.0)),
    "fedprox": lambda: fl.fedprox(lr=0.05, mu=0.1),
}


def clients(letters, dtype):
    maker = torch.Generator().manual_seed(3)

    def one(n):
        x = torch.randn(n, 3, 12, 12, generator=maker).to(dtype)
        if letters:
            x = torch.randint(0, 31, (n, 9), generator=maker)
        return x, torch.randint(0, 10, (n,), generator=maker)

    return [one(n) for n in (6, 12, 9)]


def made(name, algorithm, dtype=torch.float32, **options):
    torch.manual_seed(0)
    task = fl.Task(MODULES[name](), dtype=dtype)
    data = fl.Federation.of(clients(name == "letters", dtype))
    work = fl.Work(epochs=2, batch=6)
    return fl.Trainer(task, data, ALGORITHMS[algorithm](), work=work, seed=1, **options)


def change(trainer, rounds):
    start = trainer.server.w.clone()
    trainer.run(rounds)
    return (trainer.server.w - start).cpu().double()


@pytest.mark.parametrize(("name", "algorithm"), [("groups", "scaffold"), ("letters", "fedprox")])
def test_in_float64_it_is_the_reference(name, algorithm):
    ours = change(made(name, algorithm, torch.float64, device="cuda"), 3)
    theirs = change(made(name, algorithm, torch.float64, engine="reference"), 3)
    assert (ours - theirs).abs().max() < 1e-11


@pytest.mark.parametrize("precision", APART)
@pytest.mark.parametrize(
    ("name", "algorithm"), [("groups", "scaffold"), ("batches", "fedprox"), ("letters", "scaffold")]
)
def test_in_every_precision_it_is_near(name, algorithm, precision, caplog):
    caplog.set_level("INFO")
    ours = change(made(name, algorithm, device="cuda", precision=precision), 1)
    theirs = change(made(name, algorithm, torch.float64, engine="reference"), 1)
    assert (ours - theirs).norm() < APART[precision] * theirs.norm()
    assert "unfused" not in caplog.text


@pytest.mark.parametrize("name", MODULES)
def test_the_same_bits_twice_and_after_a_stop(name, tmp_path):
    first = made(name, "scaffold", device="cuda", precision="bf16")
    first.run(4)
    second = made(name, "scaffold", device="cuda", precision="bf16")
    second.run(2)
    second.save(tmp_path / "run")
    third = made(name, "scaffold", device="cuda", precision="bf16")
    third.load(tmp_path / "run")
    third.run(2)
    assert torch.equal(first.server.w, third.server.w)


def test_a_sequence_and_an_own_forward_agree():
    """The same layers, written twice, differ by rounding alone."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 10)]
    sequence = nn.Sequential(*layers)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = layers[0], layers[4]

        def forward(self, x):
            return self.b(F.max_pool2d(F.relu(self.a(x)), 2).flatten(1))

    found = []
    for module in (sequence, Own()):
        task, data = fl.Task(copy.deepcopy(module)), fl.Federation.of(clients(False, torch.float32))
        trainer = fl.Trainer(
            task, data, fl.fedavg(0.05), work=fl.Work(epochs=2, batch=6), seed=1, device="cuda",
            precision="float32",
        )  # fmt: skip
        found.append(change(trainer, 2))
    assert (found[0] - found[1]).norm() < 1e-4 * found[0].norm()
