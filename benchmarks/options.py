"""Options of all benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `python -m benchmarks`."""

    check: bool = False
    """Compare with the committed bounds, and do nothing else."""
    large: bool = False
    """Include what takes minutes to prepare."""
    peers: bool = True
    """Run other programs, where they are installed."""
    asked_runs: int | None = None
    """How often each command runs; None leaves it to the benchmark."""
    chart: Path | None = None
    """Where to draw gputrace and the peers."""
    seeds: int = 200
    """Generated runs that are diagnosed."""
    minutes: float = 0
    """How long hour and minutes record, and what experiments on GPUs may take; 0 says nothing."""
    parts: tuple[str, ...] = ()
    """Parts of an experiment to run; all without any."""
    save: Path | None = None
    """JSON file for the figures of experiments."""
    cpu: bool = False
    """Tiny models on the CPU in place of a GPU, to see that experiments run."""
    huge: bool = False
    """Measure only what takes most of a disk, once."""

    @property
    def runs(self) -> int:
        """How often each command runs; tables show the median."""
        return self.runs_or(5)

    def runs_or(self, usual: int) -> int:
        """Return the number of runs that was asked for, or the benchmark's own."""
        return self.asked_runs or usual
