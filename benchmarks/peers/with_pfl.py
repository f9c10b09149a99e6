"""pfl's simulator: https://github.com/apple/pfl-research"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch_model import arrays, build, clients
from works import LR, Job, Weights, main


class Scored(nn.Module):
    """A module as pfl wants it: it knows its loss and its metrics."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        return {"loss": Weighted(F.cross_entropy(self.net(x), y, reduction="sum").item(), len(y))}


class Marks(TrainingProcessCallback):
    def __init__(self, mark: Callable[[], None]) -> None:
        self.mark = mark

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.mark()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.mark()
        return False, Metrics()


def run(job: Job, mark: Callable[[], None]) -> Weights:
    torch.set_num_threads(job.threads)
    net, users = build(job), dict(enumerate(clients(job)))
    scored = Scored(net)
    model = PyTorchModel(scored, torch.optim.SGD, torch.optim.SGD(scored.parameters(), lr=1.0))
    sampler = get_user_sampler("minimize_reuse" if job.check else "random", range(len(users)))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds + 1,  # its first round is always an evaluation
            train_cohort_size=job.work.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=FederatedDataset.from_slices(users, sampler),
            val_data=None,
            postprocessors=[WeightByDatapoints()],
        ),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=job.work.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Marks(mark)],
        send_metrics_to_platform=False,
    )
    return arrays(net)


if __name__ == "__main__":
    main(
        run,
        ["pfl", "torch", "numpy"],
        "FederatedAveraging in SimulatedBackend, one process, users' tensors in memory; pfl "
        "takes batches in stored order",
    )
