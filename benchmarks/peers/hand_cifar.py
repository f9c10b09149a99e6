"""pfl's CIFAR-10 work as anybody would write it."""

from __future__ import annotations

import numpy as np
import torch
from cifar import EVERY, LR, Mark, Scores, Setting, channels_first, score, simple_cnn
from torch import Tensor
from torch.nn import functional as F


class Runner:
    packages = ("torch", "numpy")
    note = "one module, torch.optim.SGD, everything on the device, shuffled batches"
    user_metrics = True

    def __init__(self, setting: Setting) -> None:
        self.work, device = setting.work, setting.device
        self.net = simple_cnn().to(device)
        self.model = {n: v.clone() for n, v in self.net.state_dict().items()}
        data = setting.data
        self.x, self.y = channels_first(data.x).to(device), data.y.to(device)
        self.test = channels_first(data.test_x).to(device), data.test_y.to(device)
        self.users = np.random.default_rng(0)
        self.central: list[Scores] = []
        self.before_after: list[tuple[Scores, Scores]] = []

    def run(self, blocks: int, mark: Mark) -> None:
        mark()
        for _ in range(blocks):
            for number in range(EVERY):
                self.round(evaluate=number == 0)
            mark()

    def round(self, evaluate: bool) -> None:
        total = {n: torch.zeros_like(v) for n, v in self.model.items()}
        for user in self.users.choice(self.work.users, self.work.cohort, replace=False):
            rows = slice(user * self.work.size, (user + 1) * self.work.size)
            self.train(self.x[rows], self.y[rows], evaluate)
            for name, value in self.net.state_dict().items():
                total[name] += value
        self.model = {n: v / self.work.cohort for n, v in total.items()}
        if evaluate:
            self.net.load_state_dict(self.model)
            self.central.append(score(self.net, *self.test))

    def train(self, x: Tensor, y: Tensor, evaluate: bool) -> None:
        self.net.load_state_dict(self.model)
        before = score(self.net, x, y) if evaluate else None
        self.net.train()
        optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)
        for some in torch.randperm(len(x), device=x.device).split(self.work.batch):
            optimizer.zero_grad()
            F.cross_entropy(self.net(x[some]), y[some]).backward()
            optimizer.step()
        if before is not None:
            self.before_after.append((before, score(self.net, x, y)))
