"""The papers' own tables: one file each, run as a whole and set beside what was printed."""

from undrift.papers.plan import Options, chosen_settings
from undrift.papers.records import counts, read_records
from undrift.papers.running import Reproduced, reproduce

__all__ = ["Options", "Reproduced", "chosen_settings", "counts", "read_records", "reproduce"]
