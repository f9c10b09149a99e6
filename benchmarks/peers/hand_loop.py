"""FedAvg as anybody would write it: load, train, add up, divide."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch_model import arrays, build, clients, cohort, train
from works import Job, Weights, main


def run(job: Job, mark: Callable[[], None]) -> Weights:
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    net, data = build(job), clients(job)
    model = {n: v.clone() for n, v in net.state_dict().items()}
    mark()
    for round in range(job.rounds):
        total = {n: torch.zeros_like(v) for n, v in model.items()}
        for x, y in (data[i] for i in cohort(job, round)):
            net.load_state_dict(model)
            train(net, job, x, y)
            for name, value in net.state_dict().items():
                total[name] += value * len(x)
        examples = job.work.cohort * job.work.size
        model = {n: v / examples for n, v in total.items()}
        mark()
    net.load_state_dict(model)
    return arrays(net)


if __name__ == "__main__":
    main(run, ["torch", "numpy"], "one module, torch.optim.SGD, shuffled tensors")
