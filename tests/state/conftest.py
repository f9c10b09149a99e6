"""A store in each of its places."""

import pytest
from states import PLACES, make


@pytest.fixture(params=PLACES)
def store(request, tmp_path):
    return make(request.param, tmp_path)
