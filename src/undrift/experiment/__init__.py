"""Experiments: one file or one frozen object, run, compared and kept."""

from undrift.experiment.comparison import Comparison
from undrift.experiment.events import Listener, RunInfo
from undrift.experiment.history import History
from undrift.experiment.run import run
from undrift.experiment.sections import (
    Choice,
    EngineSettings,
    Evaluation,
    Holding,
    TaskSettings,
)
from undrift.experiment.spec import Experiment
from undrift.experiment.spec import load as load_experiments

__all__ = [
    "Choice",
    "Comparison",
    "EngineSettings",
    "Evaluation",
    "Experiment",
    "History",
    "Holding",
    "Listener",
    "RunInfo",
    "TaskSettings",
    "load_experiments",
    "run",
]
