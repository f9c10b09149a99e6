"""What an object is, as plain JSON: everything that decides what it does, by path.

Objects count by what they hold, private attributes included; functions and classes of the user's
by their code, and by everything that this code reads; those of installed packages by their version.
Trained parameters count by their place alone, for training begins where a checkpoint says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from undrift.identity.walk import CODE, Walk


class Portrait(NamedTuple):
    """What an object is."""

    parts: Any  # plain JSON
    code: dict[str, Any]  # what its code reads by name, and its classes
    unknown: dict[str, Any]  # by path: objects that nobody can look into

    def told(self) -> Any:
        """Give all of it as plain JSON."""
        if not self.code:
            return self.parts
        whole = self.parts if isinstance(self.parts, dict) else {"value": self.parts}
        return {**whole, CODE: dict(sorted(self.code.items()))}


def portrait(value: Any, within: Any = None) -> Portrait:
    """Look at an object; trained are the parameters of `within`, or its own if it is a module.

    >>> portrait(nn.Dropout(0.1)).parts
    {'use': 'torch.nn.modules.dropout.Dropout', 'inplace': False, 'p': 0.1}
    """
    walk = Walk(places(value if within is None else within))
    parts = walk.look(value)
    return Portrait(parts, walk.code, walk.unknown)


def places(module: Any) -> dict[int, int]:
    """Number the parameters that are trained, by id; tied ones have one number."""
    found = module.parameters() if isinstance(module, nn.Module) else ()
    return {id(p): i for i, p in enumerate(found) if p.requires_grad}


def same(one: Any, other: Any, within: tuple[Any, Any] | None = None) -> bool:
    """Tell whether two objects compute the same, whatever trained parameters they start with.

    Trained are the parameters of the two, or of the modules `within` which they do their work.
    In doubt they do not: two objects that hold something unknown must hold the same object.

    >>> same(nn.Linear(3, 2), nn.Linear(3, 2)), same(nn.Dropout(0.1), nn.Dropout(0.2))
    (True, False)
    """
    if one is other:
        return True
    first, second = within or (one, other)
    return unlike(portrait(one, first), portrait(other, second)) is None


def unlike(one: Portrait, other: Portrait) -> str | None:
    """Name the first thing in which two objects differ; None if there is none."""
    if one is other:
        return None
    found = _first(one.told(), other.told(), "")
    if found is not None:
        return found
    for path, held in one.unknown.items():
        if held is not other.unknown.get(path):
            kind = type(held).__name__
            return f"{path or 'it'} is a {kind}, into which nobody can look"
    return None


def _first(one: Any, other: Any, path: str) -> str | None:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted(one.keys() | other.keys()):
            inner = f"{path}.{key}" if path else str(key)
            if key not in one or key not in other:
                return f"only one has {inner}"
            found = _first(one[key], other[key], inner)
            if found is not None:
                return found
        return None
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        some = (_first(a, b, f"{path}.{i}" if path else str(i)) for i, (a, b) in pairs)
        return next((text for text in some if text is not None), None)
    # as texts: 1 is not 1.0, 0.0 is not -0.0, and nan is nan
    a, b = json.dumps(one), json.dumps(other)
    return None if a == b else f"{path}: {a} and {b}" if path else f"{a} and {b}"
