"""Without a CUDA device Triton's interpreter stands in; it must be asked for before any import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def traced(monkeypatch):
    """Record the algebra as a device does, though nothing is compiled."""
    monkeypatch.setattr("undrift.engines.fused.TRACES", True)
