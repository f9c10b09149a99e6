"""Tables of several holders: read, describe, prepare by sums; see README.md."""

from undrift.tabular.frames import Frame
from undrift.tabular.preparation import Goal, Preparation, agree, prepare
from undrift.tabular.schema import (
    Category,
    Classes,
    Counts,
    Date,
    Flag,
    Number,
    Numbers,
    Schema,
)
from undrift.tabular.sums import (
    Question,
    Sums,
    answer,
    first_question,
    second_question,
    third_question,
)

__all__ = [
    "Category",
    "Classes",
    "Counts",
    "Date",
    "Flag",
    "Frame",
    "Goal",
    "Number",
    "Numbers",
    "Preparation",
    "Question",
    "Schema",
    "Sums",
    "agree",
    "answer",
    "first_question",
    "prepare",
    "second_question",
    "third_question",
]
