"""Networks of the papers, by name; see docs/models.md."""

from undrift.models.build import MODELS, build, feature_of

__all__ = ["MODELS", "build", "feature_of"]
