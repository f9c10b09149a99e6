"""undrift's SCAFFOLD with client momentum on pfl's CIFAR-10 work (pfl itself runs FedAvg)."""

from __future__ import annotations

import undrift_cifar

import undrift as fl


class Runner(undrift_cifar.Runner):
    note = "SCAFFOLD, client momentum 0.9, Trainer.advance and Trainer.judge, bf16"
    precision = "bf16"

    def algorithm(self) -> fl.Algorithm:
        return fl.scaffold(local=fl.sgd(0.01, momentum=0.9))
