import pytest

from undrift.verify.longhand.worlds import World

from .cases import WORLDS


@pytest.fixture(params=["softmax", "mlp", "regression"])
def world(request) -> World:
    return WORLDS[request.param]()
