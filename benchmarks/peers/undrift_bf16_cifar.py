"""undrift on pfl's CIFAR-10 work, operands in bfloat16."""

from __future__ import annotations

import undrift_cifar


class Runner(undrift_cifar.Runner):
    note = "FedAvg, Trainer.advance and Trainer.judge, bf16"
    precision = "bf16"
