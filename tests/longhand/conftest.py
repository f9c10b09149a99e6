import pytest

from .cases import WORLDS
from .worlds import World


@pytest.fixture(params=["softmax", "mlp", "regression"])
def world(request) -> World:
    return WORLDS[request.param]()
