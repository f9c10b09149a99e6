"""Who calls the core functions, and how the sum is taken."""

from undrift.engines.engine import Engine
from undrift.engines.ray import Ray
from undrift.engines.reference import Reference
from undrift.engines.sharded import Sharded
from undrift.engines.vectorised import Vectorised

ENGINES: dict[str, type[Engine]] = {
    "vectorised": Vectorised,
    "reference": Reference,
    "ray": Ray,
}

__all__ = ["ENGINES", "Engine", "Ray", "Reference", "Sharded", "Vectorised"]
