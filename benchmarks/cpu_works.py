"""Networks that people train on a CPU, and hand-written loops of the algorithms beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models_works import CharLstm, FeddynCnn, Gpt, every_letter

Clients = list[tuple[Tensor, Tensor]]


class ConvNext(nn.Module):
    """Depthwise convolutions, LayerNorm, pointwise layers."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, 4)
        self.mix = nn.ModuleList(
            nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x)
        for mix, norm, up, down in zip(self.mix, self.norms, self.up, self.down, strict=True):
            y = norm(mix(x).permute(0, 2, 3, 1))
            x = x + down(F.gelu(up(y))).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


class Inverted(nn.Module):
    """MobileNet's block: wide inside, narrow outside, BatchNorm everywhere."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.up, self.down = nn.Conv2d(inputs, wide, 1, bias=False), nn.Conv2d(wide, outputs, 1)
        self.mix = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (wide, wide, outputs))
        self.around = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.norms[0](self.up(x)))
        y = self.norms[2](self.down(F.relu6(self.norms[1](self.mix(y)))))
        return x + y if self.around else y


class MobileNet(nn.Module):
    """A small MobileNet v2."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        kinds = ((16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1))
        self.blocks = nn.ModuleList(Inverted(*kind) for kind in kinds)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Mixer(nn.Module):
    """Linear layers over places, then over channels."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.cut, self.depth = nn.Conv2d(3, width, 4, 4), depth
        sizes = ((64, 32), (32, 64), (width, 256), (256, width))
        self.layers = nn.ModuleList(nn.Linear(*s) for _ in range(depth) for s in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2)
        for i in range(self.depth):
            a, b, c, d = self.layers[4 * i : 4 * i + 4]
            y = self.norms[2 * i](x).transpose(1, 2)
            x = x + b(F.gelu(a(y))).transpose(1, 2)
            x = x + d(F.gelu(c(self.norms[2 * i + 1](x))))
        return self.head(x.mean(1))


class Unet(nn.Module):
    """Down and up again, with a way across; a class for every pixel."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 2 * width, 3, 1, 1)
        self.c = nn.Conv2d(2 * width, 2 * width, 3, 1, 1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.d, self.head = nn.Conv2d(2 * width, width, 3, 1, 1), nn.Conv2d(width, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        y = F.relu(self.c(F.relu(self.b(F.max_pool2d(x, 2)))))
        y = F.relu(self.d(torch.cat([x, self.up(y)], 1)))
        return self.head(y).mean((2, 3))


class Gru(nn.Module):
    """A recurrent network over a series."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(16, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


class Encoder(nn.Module):
    """torch's own transformer encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.enter, self.head = nn.Linear(16, 64), nn.Linear(64, 10)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.enter(x)).mean(1))


def dense(*sizes: int) -> nn.Sequential:
    """Make a dense network with ReLU."""
    layers = [p for a, b in pairwise(sizes) for p in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Work(NamedTuple):
    """A network, its examples and how it is trained."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of an example; () for letters
    classes: int
    cohort: int
    batch: int
    steps: int
    lr: float = 0.05


IMAGES = ((3, 32, 32), 10, 4, 16, 5)
WORKS = {
    "mlp_17_32_2": Work(lambda: dense(17, 32, 2), (17,), 2, 12, 32, 20),
    "mlp_784_100_100_26": Work(lambda: dense(784, 100, 100, 26), (784,), 26, 20, 45, 10),
    "cnn_own": Work(FeddynCnn, *IMAGES),
    "cnn_sequence": Work(lambda: FeddynCnn().as_sequence(), *IMAGES),
    "convnext": Work(ConvNext, *IMAGES),
    "mobilenet": Work(MobileNet, *IMAGES),
    "mixer": Work(Mixer, *IMAGES),
    "unet": Work(Unet, *IMAGES),
    "gru": Work(Gru, (24, 16), 10, 8, 16, 5),
    "encoder": Work(Encoder, (24, 16), 10, 8, 16, 5),
    "gpt": Work(lambda: Gpt(64, 2), (), 90, 4, 8, 5),
    "lstm": Work(lambda: CharLstm(64), (), 90, 4, 8, 5),
}


def draw(work: Work) -> Clients:
    """Draw the examples of all clients."""
    maker = torch.Generator().manual_seed(1)

    def one() -> tuple[Tensor, Tensor]:
        if not work.shape:
            x, y = (torch.randint(0, 90, (work.batch, 32), generator=maker) for _ in range(2))
            return x, y
        x = torch.randn(work.batch, *work.shape, generator=maker)
        return x, torch.randint(0, work.classes, (work.batch,), generator=maker)

    return [one() for _ in range(work.cohort)]


class Loop:
    """A round written by hand: client after client, autograd, vectors by parameter.

    `pull` is FedProx's mu, FedDyn's alpha or AdaBest's mu; `controls` are SCAFFOLD's c.
    """

    def __init__(self, work: Work, module: nn.Module, clients: Clients, algorithm: str) -> None:
        self.net, self.work, self.clients = copy.deepcopy(module), work, clients
        self.own, self.kind = list(self.net.parameters()), algorithm
        zeros = [torch.zeros_like(p) for p in self.own]
        self.shared = copy.deepcopy(zeros)  # SCAFFOLD's c, FedDyn's h
        self.before = [p.detach().clone() for p in self.own]  # AdaBest's mean of the last round
        self.states = [copy.deepcopy(zeros) for _ in clients]  # c_i, FedDyn's h_i
        self.momentum = 0.9 if algorithm in ("momentum", "scaffold_momentum") else 0.0
        self.pull = {"fedprox": 0.1, "feddyn": 0.1}.get(algorithm, 0.0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss of a batch."""
        out = self.net(x)
        return F.cross_entropy(out, y) if self.work.shape else every_letter(out, y).mean()

    @torch.no_grad()
    def step(self, gradients: list[Tensor], start: list[Tensor], state: list[Tensor]) -> None:
        """Move the model by one corrected gradient."""
        lr = self.work.lr
        for i, (p, g) in enumerate(zip(self.own, gradients, strict=True)):
            if self.kind.startswith("scaffold"):
                g = g + (self.shared[i] - state[i])
            elif self.kind in ("feddyn", "adabest"):
                g = g - state[i]
            if self.pull:
                g = g + self.pull * (p - start[i])
            if self.momentum:
                self.buffers[i].mul_(self.momentum).add_(g)
                g = self.buffers[i]
            p.sub_(g, alpha=lr)

    def round(self) -> None:
        """Train everybody and average."""
        start = [p.detach().clone() for p in self.own]
        mean = [torch.zeros_like(p) for p in start]
        moved = [torch.zeros_like(p) for p in start]
        for (x, y), state in zip(self.clients, self.states, strict=True):
            with torch.no_grad():
                for p, q in zip(self.own, start, strict=True):
                    p.copy_(q)
            self.buffers = [torch.zeros_like(p) for p in start] if self.momentum else []
            for _ in range(self.work.steps):
                self.step(list(torch.autograd.grad(self.loss(x, y), self.own)), start, state)
            self.end(start, state, mean, moved)
        with torch.no_grad():
            for i, p in enumerate(self.own):
                p.copy_(mean[i])
                if self.kind.startswith("scaffold"):
                    self.shared[i] += moved[i]
                elif self.kind == "feddyn":
                    self.shared[i] += 0.1 * (start[i] - mean[i])
                    p.sub_(self.shared[i], alpha=1 / 0.1)
                elif self.kind == "adabest":
                    p.sub_(self.before[i] - mean[i], alpha=0.9)
                    self.before[i] = mean[i]

    @torch.no_grad()
    def end(self, start: list, state: list, mean: list, moved: list) -> None:
        """Add a client's model to the mean, and renew its state."""
        each, path = 1 / len(self.clients), self.path()
        for i, (p, q) in enumerate(zip(self.own, start, strict=True)):
            mean[i].add_(p, alpha=each)
            if self.kind.startswith("scaffold"):
                new = state[i] - self.shared[i] + (q - p) / (path * self.work.lr)
                moved[i].add_(new - state[i], alpha=each)
                state[i] = new
            elif self.kind in ("feddyn", "adabest"):
                state[i] = state[i] + 0.1 * (q - p)

    def path(self) -> float:
        """Total weight with which gradients entered the change, as heavy ball sums them."""
        b, steps = self.momentum, self.work.steps
        return sum((1 - b ** (steps - k)) / (1 - b) for k in range(steps))
