"""Checks for rules, aggregates and engines that live outside this library.

A third party runs the checks that our own parts pass; an error names the hook and what is wrong.
"""

from undrift.testing.engines import EveryHook, check_engine, standard_algorithms
from undrift.testing.errors import EngineError, RuleError
from undrift.testing.rules import check_aggregate, check_rule
from undrift.testing.world import World, tiny_task, tiny_world

__all__ = [
    "EngineError",
    "EveryHook",
    "RuleError",
    "World",
    "check_aggregate",
    "check_engine",
    "check_rule",
    "standard_algorithms",
    "tiny_task",
    "tiny_world",
]
