"""Train a rule in every engine."""

import pytest
import torch

from core.hand import LR, numbers, trained
from undrift import Algorithm, Mean, Sgd


@pytest.fixture(params=[4, 256], ids=["pieces of 4", "one piece"])
def train(request, monkeypatch):
    """Train with the reference engine; others must agree, whatever the chunk and the piece."""
    monkeypatch.setattr("undrift.engines.engine.PIECE", request.param)

    def run(*rules, by_size=True, weight_decay=0.0, aggregate=None):
        local = Sgd(lr=LR, weight_decay=weight_decay)
        algorithm = Algorithm(rules, local, aggregate or Mean(by_size=by_size))
        wanted = trained(algorithm, engine="reference")
        for chunk in (None, 2):
            found = numbers(trained(algorithm, chunk=chunk))
            for name, value in numbers(wanted).items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)
        return wanted

    return run
