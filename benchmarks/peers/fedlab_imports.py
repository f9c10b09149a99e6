"""FedLab's serial simulator without what only its ready-made datasets need.

`import fedlab` loads torchvision, scikit-learn, pandas and pynvml, of which the serial trainer uses
nothing.  Where one of them is missing or does not load, an empty module takes its place.
"""

from __future__ import annotations

import sys
import types
import warnings
from importlib import import_module

REPLACEABLE = [
    *("torchvision", "torchvision.transforms", "sklearn", "sklearn.datasets"),
    *("pandas", "pynvml", "tqdm", "PIL", "PIL.Image", "munch"),
]


class Empty(types.ModuleType):
    """A module in which every ordinary name is there and good for nothing."""

    __path__: list[str] = []  # noqa: RUF012  (so that it counts as a package)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def replace_missing() -> list[str]:
    """Put empty modules where an import fails, and tell which."""
    replaced = []
    for name in REPLACEABLE:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(name)
        except Exception:  # torchvision for CUDA beside torch for CPUs raises RuntimeError
            for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[loaded]
            sys.modules[name] = Empty(name)
            replaced.append(name)
    return replaced


REPLACED = replace_missing()

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402

for name in REPLACED:  # others ask for them too, and handle their absence
    del sys.modules[name]

__all__ = ["REPLACED", "SGDSerialClientTrainer", "StandalonePipeline", "SyncServerHandler"]
