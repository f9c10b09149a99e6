"""FedLab's serial simulator: https://github.com/SMILELab-FL/FedLab"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import torch
from fedlab_imports import SGDSerialClientTrainer, StandalonePipeline, SyncServerHandler
from torch_model import Client, arrays, batches, build, clients
from works import LR, Job, Weights, main


class Data:
    """Batches as ready tensors: quicker than the DataLoader of FedLab's own datasets."""

    def __init__(self, job: Job) -> None:
        self.job, self.clients = job, clients(job)

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> list[Client]:
        return batches(self.job, *self.clients[id])


class Pipeline(StandalonePipeline):
    """Its main loop calls `evaluate` after each round."""

    def __init__(self, *parts: object, mark: Callable[[], None]) -> None:
        super().__init__(*parts)
        self.evaluate = mark


def run(job: Job, mark: Callable[[], None]) -> Weights:
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    random.seed(0)
    quiet = logging.getLogger("fedlab")
    net, work = build(job), job.work
    handler = SyncServerHandler(net, job.rounds, work.cohort / work.clients, logger=quiet)
    trainer = SGDSerialClientTrainer(net, work.clients, logger=quiet)
    trainer.setup_dataset(Data(job))
    trainer.setup_optim(1, work.batch, LR)
    pipeline = Pipeline(handler, trainer, mark=mark)
    mark()
    pipeline.main()
    return arrays(handler.model)


if __name__ == "__main__":
    main(
        run,
        ["fedlab", "torch", "numpy"],
        "SGDSerialClientTrainer in StandalonePipeline, batches as ready tensors",
    )
