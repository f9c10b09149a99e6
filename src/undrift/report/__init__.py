"""What people see: pictures, tables and pages."""

from undrift.report.curves import draw_curves
from undrift.report.page import write_page
from undrift.report.page_data import (
    Group,
    Page,
    Partition,
    RunCurves,
    Table,
    TableRow,
    groups_from,
)
from undrift.report.partition_picture import draw_partition, partition_figure
from undrift.report.terminal import TerminalView

__all__ = [
    "Group",
    "Page",
    "Partition",
    "RunCurves",
    "Table",
    "TableRow",
    "TerminalView",
    "draw_curves",
    "draw_partition",
    "groups_from",
    "partition_figure",
    "write_page",
]
