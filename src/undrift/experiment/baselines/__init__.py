"""Baselines beside a comparison, so that a useless model is seen to be one.

Always the same answer, each site alone, all data pooled, gradient boosting: see
docs/experiments.md.
"""

from undrift.experiment.baselines.keeping import FILE, Tell, baselines_of
from undrift.experiment.baselines.rows import ALWAYS, NONE, Baseline, Baselines

__all__ = ["ALWAYS", "FILE", "NONE", "Baseline", "Baselines", "Tell", "baselines_of"]
