"""Tables of several holders: read, describe, prepare by sums; see README.md."""

from undrift.tabular.agreeing import agree, prepare
from undrift.tabular.encoding import Goal, Part
from undrift.tabular.frames import Frame
from undrift.tabular.preparation import Preparation
from undrift.tabular.reading import NewRows, open_table, read_rows
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
    "NewRows",
    "Number",
    "Numbers",
    "Part",
    "Preparation",
    "Question",
    "Schema",
    "Sums",
    "agree",
    "answer",
    "first_question",
    "open_table",
    "prepare",
    "read_rows",
    "second_question",
    "third_question",
]
