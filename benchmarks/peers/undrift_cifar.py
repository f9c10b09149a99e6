"""undrift on pfl's CIFAR-10 work: its trainer, and its evaluation every ten rounds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from cifar import EVERY, LR, Mark, Scores, Setting, channels_first, simple_cnn

import undrift as fl
from undrift.core.losses import accuracy
from undrift.rounds import Judged, JudgedClients, Reading


class Block(NamedTuple):
    """What ten rounds and their evaluation tell, on its way to the host."""

    rounds: Reading
    before: JudgedClients
    after: JudgedClients
    central: Judged


class Runner:
    packages = ("undrift", "torch", "numpy")
    note = "FedAvg, Trainer.advance and Trainer.judge, tf32"
    precision = "tf32"
    user_metrics = True

    def __init__(self, setting: Setting) -> None:
        work, data = setting.work, setting.data
        x, y = channels_first(data.x), data.y
        cuda = str(setting.device).startswith("cuda")
        device = setting.device
        self.trainer = fl.Trainer(
            fl.Task(simple_cnn(), metrics={"accuracy": accuracy}),
            fl.Federation.split(x, y, torch.arange(len(x)).split(work.size)),
            self.algorithm(),
            work=fl.Work(epochs=1, batch=work.batch),
            sampler=fl.Uniform(count=work.cohort),
            device=device,
            # one chunk, as one: then the models of a round stay at hand to be judged
            graph=True,
            chunk=work.cohort,
            workers=1,
            **({"precision": self.precision} if cuda else {}),
        )
        self.test = channels_first(data.test_x).to(device), data.test_y.to(device)
        self.central: list[Scores] = []
        self.users: list[tuple[Scores, Scores]] = []
        self.losses: list[float] = []  # of every round's local training

    def algorithm(self) -> fl.Algorithm:
        return fl.fedavg(LR)

    def run(self, blocks: int, mark: Mark) -> None:
        """Queue block after block; what one tells is read while the next is under way."""
        mark()
        unread: Block | None = None
        for _ in range(blocks):
            queued = self.block()
            mark()
            if unread is not None:
                self.read(unread)
            unread = queued
        if unread is not None:
            self.read(unread)

    def block(self) -> Block:
        """Queue ten rounds and the evaluation of the last; nothing waits for the device."""
        trainer = self.trainer
        rounds = [trainer.advance() for _ in range(EVERY - 1)]
        ids = trainer.roster.cohort(trainer.rounds_done, ordered=False).ids
        before = trainer.judge_clients(ids)
        rounds.append(trainer.advance())
        after = trainer.judge_clients(ids, own=True)
        central = trainer.judge(*self.test, batch=2500)
        return Block(Reading(rounds), before, after, central)

    def read(self, block: Block) -> None:
        self.losses += [result.loss for result in block.rounds.results()]
        before, after, central = (
            Scores(found["loss"], found["accuracy"])
            for found in (block.before.result(), block.after.result(), block.central.result())
        )
        self.users.append((before, after))
        self.central.append(central)
