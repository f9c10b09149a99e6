"""FedLab's serial trainer on pfl's CIFAR-10 work."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import torch
from cifar import EVERY, LR, Mark, Scores, Setting, channels_first, score, simple_cnn
from fedlab_imports import SGDSerialClientTrainer, StandalonePipeline, SyncServerHandler
from torch import Tensor


class Batches:
    """One user's examples, dealt as ready tensors on the device."""

    def __init__(self, x: Tensor, y: Tensor, batch: int) -> None:
        self.x, self.y, self.batch = x, y, batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.x), device=self.x.device).split(self.batch):
            yield self.x[rows], self.y[rows]


class Users:
    def __init__(self, setting: Setting) -> None:
        self.work, device = setting.work, setting.device
        self.x, self.y = channels_first(setting.data.x).to(device), setting.data.y.to(device)

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Batches:
        rows = slice(id * self.work.size, (id + 1) * self.work.size)
        return Batches(self.x[rows], self.y[rows], batch_size)


class Trainer(SGDSerialClientTrainer):
    """Scores each user before and after its training in rounds with an evaluation."""

    evaluating = False

    def train(self, model_parameters: Tensor, train_loader: Batches) -> list[Tensor]:
        if not self.evaluating:
            return super().train(model_parameters, train_loader)
        self.set_model(model_parameters)
        before = score(self.model, train_loader.x, train_loader.y)
        pack = super().train(model_parameters, train_loader)
        after = score(self.model, train_loader.x, train_loader.y)
        self.before_after.append((before, after))
        return pack


class Pipeline(StandalonePipeline):
    """Its main loop calls `evaluate` after each round."""

    def __init__(self, handler: Any, trainer: Trainer, runner: Runner) -> None:
        super().__init__(handler, trainer)
        self.runner = runner

    def evaluate(self) -> None:
        if self.trainer.evaluating:
            self.runner.central.append(score(self.handler.model, *self.runner.test))
        self.trainer.evaluating = self.handler.round % EVERY == 0
        if self.handler.round % EVERY == 0:
            self.runner.mark()


class Runner:
    packages = ("fedlab", "torch", "numpy")
    note = "SGDSerialClientTrainer in StandalonePipeline; users' tensors on the device"
    user_metrics = True

    def __init__(self, setting: Setting) -> None:
        work, device = setting.work, setting.device
        quiet, cuda = logging.getLogger("fedlab"), device.type == "cuda"
        place = {"cuda": cuda, "device": "cuda:0" if cuda else None, "logger": quiet}
        random.seed(0)
        net = simple_cnn()
        self.handler = SyncServerHandler(net, 0, work.cohort / work.users, **place)
        self.trainer = Trainer(net, work.users, **place)
        self.trainer.setup_dataset(Users(setting))
        self.trainer.setup_optim(1, work.batch, LR)
        self.trainer.before_after = []
        self.pipeline = Pipeline(self.handler, self.trainer, self)
        data = setting.data
        self.test = channels_first(data.test_x).to(device), data.test_y.to(device)
        self.central: list[Scores] = []

    def run(self, blocks: int, mark: Mark) -> None:
        self.mark = mark
        self.handler.global_round += blocks * EVERY
        self.trainer.evaluating = True
        mark()
        self.pipeline.main()
