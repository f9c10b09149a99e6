"""Other people's behaviours, kept apart so that the real rules stay short.

Each says whose it is, what it deviates from, and why somebody may want it: to reproduce numbers
that were published with it.
"""

from undrift.rules.compat.adabest import (
    AdaBestFedsim,
    AdaBestInTurn,
    AdaBestPrinted,
    means_in_turn,
)
from undrift.rules.compat.aggregates import (
    MeanBy,
    NovaBySteps,
    NovaCounted,
    NovaHarmonic,
    QFairFree,
)
from undrift.rules.compat.features import (
    MoonRounds,
    RFedAvgAtStart,
    RFedAvgPlusAtStart,
    chosen_examples,
)
from undrift.rules.compat.fedpd import FedPdAlone
from undrift.rules.compat.optimizers import (
    AverageOptimizer,
    KeepOptimizer,
    keep_client_opt,
)
from undrift.rules.compat.pulls import (
    FedAdmmRestart,
    FedDcConstant,
    FedDynHalf,
    FedDynUnclipped,
    ProxAfterMomentum,
    VrlPostStep,
    prox_of_fedsim,
    prox_of_rfedavg,
)
from undrift.rules.compat.scaffold import (
    ScaffoldBaseLr,
    ScaffoldFreshPostStep,
    ScaffoldMPrinted,
    ScaffoldPostStep,
    ScaffoldPostStepGradient,
    ScaffoldUnbalanced,
)

__all__ = [
    "AdaBestFedsim",
    "AdaBestInTurn",
    "AdaBestPrinted",
    "AverageOptimizer",
    "FedAdmmRestart",
    "FedDcConstant",
    "FedDynHalf",
    "FedDynUnclipped",
    "FedPdAlone",
    "KeepOptimizer",
    "MeanBy",
    "MoonRounds",
    "NovaBySteps",
    "NovaCounted",
    "NovaHarmonic",
    "ProxAfterMomentum",
    "QFairFree",
    "RFedAvgAtStart",
    "RFedAvgPlusAtStart",
    "ScaffoldBaseLr",
    "ScaffoldFreshPostStep",
    "ScaffoldMPrinted",
    "ScaffoldPostStep",
    "ScaffoldPostStepGradient",
    "ScaffoldUnbalanced",
    "VrlPostStep",
    "chosen_examples",
    "keep_client_opt",
    "means_in_turn",
    "prox_of_fedsim",
    "prox_of_rfedavg",
]
