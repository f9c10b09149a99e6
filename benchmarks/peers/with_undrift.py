"""undrift's own trainer on a peer's work."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch_model import arrays, build, clients
from works import LR, Job, Weights, main

import undrift as fl


def local_work(job: Job) -> fl.Work | fl.ExplicitWork:
    if not job.check:
        return fl.Work(steps=job.work.steps, batch=job.work.batch)
    stored = torch.arange(job.work.size).view(job.work.steps, job.work.batch).tolist()
    return fl.ExplicitWork({(0, client): stored for client in range(job.work.clients)})


def run(job: Job, mark: Callable[[], None]) -> Weights:
    torch.set_num_threads(job.threads)
    trainer = fl.Trainer(
        fl.Task(build(job)),
        fl.Federation.of(clients(job)),
        fl.fedavg(LR),
        work=local_work(job),
        sampler=fl.Uniform(count=job.work.cohort),
    )
    mark()
    for _ in range(job.rounds):
        trainer.round()
        mark()
    return arrays(trainer.model())


if __name__ == "__main__":
    main(run, ["undrift", "torch", "numpy"], "Trainer.round with the vectorised engine, shuffled")
