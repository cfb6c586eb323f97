"""Traces of slow steps, saved from the ring buffer of a program under way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

from gputrace.collectors.job_tasks import read_meta, write_meta
from gputrace.collectors.nvml import own_environment
from gputrace.collectors.spool import ChunkTail, base_of, in_order
from gputrace.collectors.spool.host_events import EVENT, HOST, KINDS, read_records
from gputrace.errors import InputError
from gputrace.units import format_ns

MOST: Final = 3
"""Maximum traces of slow steps in a recording."""
_MOST_COMPARED: Final = 100
_LEAST_COMPARED: Final = 20
"""Maximum and minimum number of preceding steps whose median is the usual time."""
_SETTLED_S: Final = 2.0
"""Seconds after which all records of a step are written."""


@dataclass(frozen=True, slots=True)
class SlowStep:
    """Step that took too long, by its process's clock."""

    number: int
    length_ns: int
    usual_ns: int

    def __str__(self) -> str:
        times = self.length_ns / self.usual_ns
        return f"step {self.number} took {format_ns(self.length_ns)}, {times:.1f} times the usual"


@dataclass(slots=True)
class StepLengths:
    """Lengths of the last steps of one process, in nanoseconds."""

    factor: float
    rank: int = 0
    """Rank of the best source of steps so far; events of other sources are ignored."""
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_MOST_COMPARED))

    def take(self, rank: int, number: int, start: int, end: int) -> SlowStep | None:
        """Record a step; return it if it is slow."""
        if rank < self.rank:
            return None
        if rank > self.rank:
            self.rank = rank
            self.lengths.clear()
        length, usual = (
            end - start,
            median(self.lengths) if len(self.lengths) >= _LEAST_COMPARED else 0,
        )
        if start:
            self.lengths.append(length)
        slow = start and usual and length > self.factor * usual
        return SlowStep(number, length, int(usual)) if slow else None


class SlowSteps:
    """Detector of slow steps in a recording's folder, which saves a trace of the ring for each.

    It then pauses for the length of the ring, so that traces do not overlap.
    """

    def __init__(
        self,
        folder: Path,
        output: Path,
        factor: float,
        ring_ns: int,
        log: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._output, self._log, self._clock = folder, output, log, clock
        self._factor, self._ring_s = factor, ring_ns / 1e9
        self._tails: dict[Path, ChunkTail] = {}
        self._lengths: dict[str, StepLengths] = {}
        self._due: tuple[float, SlowStep] | None = None
        self._quiet_until = 0.0
        self._made: list[tuple[Path, subprocess.Popen[bytes]]] = []

    def look(self) -> None:
        """Read new events, and save the ring if a slow step is due."""
        for slow in self._new():
            if self._due is None and self._clock() >= self._quiet_until and len(self._made) < MOST:
                self._due = self._clock() + _SETTLED_S, slow
        if self._due is not None and self._clock() >= self._due[0]:
            self._save(self._due[1])

    def finish(self) -> None:
        """Check once more, save the ring for a step that is still due, and wait for the traces."""
        self.look()
        if self._due is not None:
            self._save(self._due[1])
        for folder, process in self._made:
            if process.wait():
                self._log(f"no trace could be made of it; gputrace recover {folder}")

    def _new(self) -> Iterator[SlowStep]:
        paths = in_order(self._folder.glob("*.host"))
        self._tails = {path: self._tails.get(path) or ChunkTail(path, HOST) for path in paths}
        for path, tail in self._tails.items():
            lengths = self._lengths.setdefault(base_of(path), StepLengths(self._factor))
            try:
                chunks = tail.read({b"EVNT"})
            except InputError:
                continue
            for body in (body for tag, body in chunks if tag == b"EVNT"):
                rows = read_records(memoryview(body), EVENT)
                for row in rows[rows["kind"] == KINDS["step"]]:
                    numbers = (int(row[name]) for name in ("rank", "number", "start", "end"))
                    if slow := lengths.take(*numbers):
                        yield slow

    def _save(self, slow: SlowStep) -> None:
        self._due = None
        self._quiet_until = self._clock() + self._ring_s
        for number in count(1):
            trace = self._output.with_name(f"{self._output.stem}.slow{number}{self._output.suffix}")
            folder = trace.with_name(f"{trace.name}.spool")
            if not trace.exists() and not folder.exists():
                break
        try:
            copy_ring(self._folder, folder)
            write_meta(folder, read_meta(folder) | {"slow_step": str(slow)})
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            self._log(f"{trace}: {slow}, but it cannot be kept ({error.strerror})")
            return
        words = [sys.executable, "-P", "-m", "gputrace", "recover", str(folder), "-o", str(trace)]
        process = subprocess.Popen(
            ["nice", "-n", "19", *words] if shutil.which("nice") else words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=own_environment(),
            start_new_session=True,
        )
        self._made.append((folder, process))
        self._log(f"{trace}: {slow} ({len(self._made)} of at most {MOST})")


def copy_ring(source: Path, target: Path) -> None:
    """Copy the current content of a ring into a folder; raise OSError if that fails.

    Complete files are linked, which takes no space until the ring removes them.
    """
    target.mkdir(mode=0o700, exist_ok=True)
    growing = [source / "meta.json", source / "team.json"]
    complete: list[Path] = []
    for pattern in ("*.spool", "*.host", "*.nvml.jsonl", "*.cores.jsonl"):
        paths = in_order(source.glob(pattern))
        growing += {base_of(path): path for path in paths}.values()
        complete += [path for path in paths if path not in growing]
    for path in (*complete, *growing):
        # The ring may have removed it.
        with suppress(FileNotFoundError):
            if path not in growing:
                # Some file systems have no links. Where the file is gone, the copy raises, too.
                with suppress(OSError):
                    os.link(path, target / path.name)
                    continue
            shutil.copy2(path, target / path.name)
