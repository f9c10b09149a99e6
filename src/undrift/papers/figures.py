"""Figures that draw the runs of a table, or of another figure: nothing new is run for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Curves(NamedTuple):
    """Where the curves of a figure come from."""

    of: str
    figure: str
    metric: str
    settings: tuple[str, ...]  # names of settings, or how they begin
    ours: str = ""  # what we had to choose

    def __str__(self) -> str:
        what = {"test_accuracy": "test accuracy", "train_loss": "training loss"}
        told = what.get(self.metric, self.metric.replace("train_", "training ").replace("_", " "))
        return f"{told} of {', '.join(self.settings)}"


_WHICH = "which data sets it shows"
_SILO = ("rfedavg-table1-mnist", "rfedavg-table1-cifar10")
_DEVICE = ("rfedavg-table2-mnist", "rfedavg-table2-cifar10")
_TWEETS = ("rfedavg-table1-sent140", "rfedavg-table2-sent140")

CURVES_OF: Mapping[str, Curves] = {
    "comfed-fig2": Curves("ComFed", "Fig. 2", "test_accuracy", ("comfed-table4",)),
    "rfedavg-fig2": Curves("rFedAvg", "Fig. 2", "test_accuracy", _SILO, _WHICH),
    "rfedavg-fig3": Curves("rFedAvg", "Fig. 3", "train_loss", _SILO, _WHICH),
    "rfedavg-fig4": Curves("rFedAvg", "Fig. 4", "test_accuracy", _DEVICE, _WHICH),
    "rfedavg-fig5": Curves("rFedAvg", "Fig. 5", "train_loss", _DEVICE, _WHICH),
    "rfedavg-fig6": Curves("rFedAvg", "Fig. 6", "test_accuracy", _TWEETS, _WHICH),
    "rfedavg-fig7": Curves("rFedAvg", "Fig. 7", "train_loss", _TWEETS, _WHICH),
    "fedvra-fig3": Curves(
        "FedVRA", "Fig. 3", "test_accuracy",
        ("fedvra-table3-noniid", "fedvra-table3-noniid-hlu", "fedvra-table4"),
    ),
    "adabest-fig5": Curves("AdaBest", "Fig. 5", "train_accuracy", ("adabest-fig1",)),
}  # fmt: skip


def drawn_from(name: str) -> tuple[str, ...]:
    """Name the settings behind a figure; another name stands for itself.

    >>> drawn_from("comfed-fig2"), drawn_from("fedvra-fig2")
    (('comfed-table4',), ('fedvra-fig2',))
    """
    return CURVES_OF[name].settings if name in CURVES_OF else (name,)
