import pytest

from undrift.verify.longhand.worlds import World

from .cases import KINDS, WORLDS


@pytest.fixture(params=KINDS)
def world(request) -> World:
    return WORLDS[request.param]()
