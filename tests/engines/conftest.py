import pytest
from replaying import Replayed

from undrift.engines import device_round


@pytest.fixture
def recorded(monkeypatch):
    """Record and replay the pieces of a round as a device does."""
    monkeypatch.setattr(Replayed, "recorded", [], raising=False)
    monkeypatch.setattr(device_round, "Piece", Replayed)
    return Replayed.recorded
