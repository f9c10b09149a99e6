import pytest

from .tiny import threads


@pytest.fixture(autouse=True)
def one_thread():
    """Give the second core to others: these runs are too small to share."""
    with threads(1):
        yield
