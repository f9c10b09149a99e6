"""What people see: pictures, tables and pages."""

from undrift.report.partition_picture import draw_partition, partition_figure

__all__ = ["draw_partition", "partition_figure"]
