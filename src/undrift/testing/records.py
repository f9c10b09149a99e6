"""A rule is a frozen record that pickles, copies and stacks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from torch import Tensor

from undrift.core.rule import Aggregate, Rule
from undrift.core.tree import leaves, named_leaves, stack, structure
from undrift.testing.compare import differs
from undrift.testing.errors import RuleError, told


def check_record(part: Rule | Aggregate) -> None:
    """Raise unless a part is a frozen record whose branches are numbers."""
    name = type(part).__name__
    if leaves(part) == [part]:
        raise RuleError(f"{name} is not a record: write @record above its class")
    for what, twin in (("pickled", pickled), ("copied", copy.deepcopy)):
        with told(part, f"cannot be {what} (classes inside functions cannot)"):
            again = twin(part)
        if structure(again) != structure(part) or differs(leaves(again), leaves(part)):
            raise RuleError(f"{name} is not the same after it was {what}")
    for field, value in named_leaves(part).items():
        if not isinstance(value, (int, float, Tensor)) or isinstance(value, bool):
            raise RuleError(
                f"{name}.{field} = {value!r} is not a number: declare it `static(...)`, "
                "or runs that differ in it cannot be stacked"
            )
    stack([part, part])


def pickled(part: Any) -> Any:
    """Send something through pickle."""
    return pickle.loads(pickle.dumps(part))
