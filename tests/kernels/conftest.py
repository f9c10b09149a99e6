"""Where the kernels run: on a CUDA device, or in Triton's interpreter (see tests/conftest.py)."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fresh():
    """Forget configurations that another test has set."""
    from undrift.kernels import tuner

    before = dict(tuner.chosen)
    yield
    tuner.chosen.clear()
    tuner.chosen.update(before)
