"""Replay an algorithm from outside: everything given explicitly, everything read back by name."""

from undrift.replay.letters import Letters, letters
from undrift.replay.run import Moment, in_order, replay
from undrift.replay.start import by_name
from undrift.replay.witness import Named, watched, weighs_by_size

__all__ = [
    "Letters",
    "Moment",
    "Named",
    "by_name",
    "in_order",
    "letters",
    "replay",
    "watched",
    "weighs_by_size",
]
