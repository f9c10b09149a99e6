import pytest
import torch

from longhand.cases import KINDS, WORLDS
from undrift.verify.longhand.worlds import World


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """The worlds are tiny: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=KINDS)
def world(request) -> World:
    return WORLDS[request.param]()


@pytest.fixture
def mlp() -> World:
    return WORLDS["mlp"]()
