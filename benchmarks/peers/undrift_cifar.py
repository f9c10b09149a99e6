"""undrift on pfl's CIFAR-10 work: its trainer, and its evaluation every ten rounds."""

from __future__ import annotations

import torch
from cifar import EVERY, LR, Mark, Scores, Setting, channels_first, simple_cnn

import undrift as fl
from undrift.core.losses import accuracy


class Runner:
    packages = ("undrift", "torch", "numpy")
    note = "FedAvg, Trainer.run and Trainer.evaluate, tf32"
    precision = "tf32"
    # On evaluation rounds the server's model is judged on the cohort's own examples before and
    # after the round (the peers judge each user's own model after it), as many images as theirs.
    user_metrics = True

    def __init__(self, setting: Setting) -> None:
        work, data = setting.work, setting.data
        x, y = channels_first(data.x), data.y
        cuda = str(setting.device).startswith("cuda")
        self.size, device = work.size, setting.device
        self.trainer = fl.Trainer(
            fl.Task(simple_cnn(), metrics={"accuracy": accuracy}),
            fl.Federation.split(x, y, torch.arange(len(x)).split(work.size)),
            self.algorithm(),
            work=fl.Work(epochs=1, batch=work.batch),
            sampler=fl.Uniform(count=work.cohort),
            device=device,
            **({"precision": self.precision} if cuda else {}),
        )
        self.test = channels_first(data.test_x).to(device), data.test_y.to(device)
        self.central: list[Scores] = []
        self.users: list[tuple[Scores, Scores]] = []

    def algorithm(self) -> fl.Algorithm:
        return fl.fedavg(LR)

    def run(self, blocks: int, mark: Mark) -> None:
        mark()
        for _ in range(blocks):
            self.trainer.run(EVERY - 1)
            ids = self.trainer.roster.cohort(self.trainer.rounds_done, ordered=False).ids
            before = self.judge_users(ids)
            self.trainer.run(1)
            self.users.append((before, self.judge_users(ids)))
            found = self.trainer.evaluate(*self.test, batch=len(self.test[1]))
            self.central.append(Scores(found["loss"], found["accuracy"]))
            mark()

    def judge_users(self, ids: list[int]) -> Scores:
        """Judge the server's model on the examples of some users."""
        held = self.trainer.federation
        rows = torch.cat([torch.arange(i * self.size, (i + 1) * self.size) for i in ids])
        rows = rows.to(held.x.device)
        found = self.trainer.evaluate(held.x[rows], held.y[rows], batch=len(rows))
        return Scores(found["loss"], found["accuracy"])
