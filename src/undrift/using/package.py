"""All that a trained model needs to be used elsewhere: network, weights, preparation, origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undrift.errors import ConfigError, DataError
from undrift.experiment.blueprint import Blueprint
from undrift.tabular import Preparation


@dataclass(frozen=True, eq=False)
class Package:
    """What a run's folder holds, or an exported file."""

    blueprint: Blueprint
    preparation: Preparation | None  # None: the model was trained on tensors, not on a table
    tensors: Mapping[str, Tensor]  # the weights by the module's own names
    about: Mapping[str, Any]  # where the model comes from, and how good it is
    place: str  # the folder or the file, for messages
    home: Path | None = None  # the folder of the experiment file, where code of the user's own is
    note: str = field(default="")  # what somebody who uses it should know

    def module(self, trust: bool = False) -> nn.Module:
        """Build the network with its weights, ready to predict."""
        module = self.blueprint.module(trust=trust, home=self.home)
        try:
            module.load_state_dict(dict(self.tensors))
        except RuntimeError as error:
            told = " ".join(str(error).split())[:300]
            raise DataError(
                f"{self.place}: its weights do not fit its network ({told}): export it again"
            ) from error
        wrong = [n for n, t in self.tensors.items() if not bool(torch.isfinite(t).all())]
        if wrong:
            raise ConfigError(
                f"{self.place}: the training has diverged, {wrong[0]} is not finite: there is "
                "nothing to predict with. Train again with a lower learning rate"
            )
        return module.eval()
