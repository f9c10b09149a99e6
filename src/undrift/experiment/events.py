"""What happens while experiments run, told to whoever listens: terminal views and trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

Record = Mapping[str, Any]  # one line of rounds.jsonl


class RunInfo(NamedTuple):
    """One run among those that are shown or tracked together."""

    name: str  # of the experiment
    label: str  # which variant of it, e.g. "scaffold"
    seed: int
    rounds: int  # how many it is to have
    folder: Path | None  # None for a run that is kept in memory
    experiment: Mapping[str, Any]  # everything that decides it, as plain tables

    @property
    def seed_text(self) -> str:
        """Write the seed as the run's folder does: partition, model and run where they differ.

        >>> seeds = {"partition": 0, "model": 1, "run": 1}
        >>> RunInfo("e", "fedavg", 7488935335552649, 10, None, {"seed": seeds}).seed_text
        '0-1-1'
        """
        parts = self.experiment.get("seed")
        return "-".join(map(str, parts.values())) if isinstance(parts, Mapping) else str(self.seed)


class Listener(Protocol):
    """Whoever wants to know how runs go on.  Calls come from one thread, in order."""

    def started(self, run: RunInfo, past: Sequence[Record]) -> None:
        """Tell that a run begins, or goes on after the rounds of `past`."""

    def round(self, run: RunInfo, record: Record) -> None:
        """Tell what is known after one more round."""

    def finished(self, run: RunInfo, history: Sequence[Record]) -> None:
        """Tell that a run is complete."""

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Tell that a run stopped early: an error, or the user's Ctrl-C."""

    def close(self) -> None:
        """Tell that nothing more will come."""
