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
    runs: int = 5
    """How often each command runs; tables show the median."""
    chart: Path | None = None
    """Where to draw gputrace and the peers."""
    seeds: int = 200
    """Generated runs that are diagnosed."""
    minutes: int = 0
    """How long the recording of hours takes; 0 leaves it out."""
    huge: bool = False
    """Measure only what takes most of a disk, once."""
