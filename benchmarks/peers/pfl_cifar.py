"""pfl on its own CIFAR-10 work, put together as its benchmark puts it together."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from cifar import EVERY, LR, Mark, Scores, Setting, simple_cnn
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.aggregate_metrics_to_disk import AggregateMetricsToDisk
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.callback.stopwatch import StopwatchCallback
from pfl.callback.track_best_overall_metrics import TrackBestOverallMetrics
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import get_default_device, to_tensor
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism, NoPrivacy
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """Images come channels last and labels as floats [n, 1], as pfl's loader leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = simple_cnn()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.permute(0, 3, 1, 2))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self(x), y.squeeze().long())

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        out, target = self(x), y.squeeze().long()
        correct = (out.argmax(-1) == target).float().sum().item()
        loss = F.cross_entropy(out, target, reduction="sum").item()
        return {"loss": Weighted(loss, len(x)), "accuracy": Weighted(correct, len(x))}


class Marks(TrainingProcessCallback):
    """Marks the end of each block of rounds and collects the central scores."""

    def __init__(self, mark: Mark, central: list[Scores]) -> None:
        self.mark, self.central = mark, central

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.mark()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        found = aggregate_metrics.to_simple_dict()
        if "Central val | accuracy" in found:
            names = ("Central val | loss", "Central val | accuracy")
            self.central.append(Scores(*(float(found[name]) for name in names)))
        if (central_iteration + 1) % EVERY == 0:
            self.mark()
        return False, Metrics()


class Runner:
    packages = ("pfl", "torch", "numpy")
    note = "FederatedAveraging in SimulatedBackend, one process; users' tensors on the device"
    user_metrics = True

    def __init__(self, setting: Setting) -> None:
        if get_default_device().type != setting.device.type:
            raise RuntimeError(
                f"pfl computes on {get_default_device()}; set PFL_PYTORCH_DEVICE={setting.device}"
            )
        work, data = setting.work, setting.data
        self.work, self.central = work, []
        module = Classifier()
        self.model = PyTorchModel(
            module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0)
        )
        x, y = to_tensor(data.x.numpy()), to_tensor(data.y[:, None].numpy())
        pieces = [slice(i * work.size, (i + 1) * work.size) for i in range(work.users)]
        users = {i: (x[rows], y[rows]) for i, rows in enumerate(pieces)}
        sampler = get_user_sampler("random", range(work.users))
        self.backend = SimulatedBackend(
            training_data=FederatedDataset.from_slices(users, sampler),
            val_data=None,
            postprocessors=[
                WeightByUser(),
                NoPrivacy(),
                CentrallyAppliedPrivacyMechanism(NoPrivacy()),
            ],
        )
        # in pfl's benchmark too the test set is numpy and moves to the device at every evaluation;
        # there it is float64, which costs more
        self.test = Dataset(raw_data=[data.test_x.numpy(), data.test_y[:, None].numpy()])

    def run(self, blocks: int, mark: Mark) -> None:
        evaluation = NNEvalHyperParams(local_batch_size=self.work.test)
        with tempfile.TemporaryDirectory() as folder:
            FederatedAveraging().run(
                algorithm_params=NNAlgorithmParams(
                    central_num_iterations=blocks * EVERY,
                    evaluation_frequency=EVERY,
                    train_cohort_size=self.work.cohort,
                    val_cohort_size=0,
                ),
                backend=self.backend,
                model=self.model,
                model_train_params=NNTrainHyperParams(
                    local_num_epochs=1, local_learning_rate=LR, local_batch_size=self.work.batch
                ),
                model_eval_params=evaluation,
                callbacks=[
                    StopwatchCallback(),
                    CentralEvaluationCallback(
                        self.test, model_eval_params=evaluation, frequency=EVERY
                    ),
                    AggregateMetricsToDisk(str(Path(folder) / "metrics.csv")),
                    TrackBestOverallMetrics(
                        higher_is_better_metric_names=["Central val | accuracy"]
                    ),
                    Marks(mark, self.central),
                ],
                send_metrics_to_platform=False,  # its platform prints twenty lines a round
            )
