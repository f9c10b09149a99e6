"""Who calls the core functions, and how the sum is taken."""

from undrift.engines.engine import Engine
from undrift.engines.reference import Reference
from undrift.engines.vectorised import Vectorised

ENGINES: dict[str, type[Engine]] = {"vectorised": Vectorised, "reference": Reference}

__all__ = ["ENGINES", "Engine", "Reference", "Vectorised"]
