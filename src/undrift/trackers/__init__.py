"""Trackers: listeners that keep runs for TensorBoard, Weights & Biases or MLflow."""

from undrift.trackers.guarded import Guarded
from undrift.trackers.named import TRACKERS, open_trackers

__all__ = ["TRACKERS", "Guarded", "open_trackers"]
