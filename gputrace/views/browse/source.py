"""A trace that is read beside the screen: one thread, one job after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from gputrace.analyzers.analysis import analyze
from gputrace.analyzers.findings import Facts
from gputrace.analyzers.gap_detail import GapDetail, describe_gap
from gputrace.analyzers.more_lanes import stream_lanes, thread_lanes
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.results import Analysis
from gputrace.analyzers.scene import Scene, SceneLane, first_scene, full_scene
from gputrace.traces.trace import Trace, Window


class Listener(Protocol):
    """Who is told how a trace comes along; called from the source's thread."""

    def progress(self, trace: int, done: int, total: int) -> None: ...
    def scene(self, trace: int, scene: Scene) -> None: ...
    def failed(self, trace: int, error: Exception) -> None: ...


class _Stopped(Exception):
    """The person has left."""


class Source:
    """Reads a trace, and later what is asked of it, in a thread of its own."""

    def __init__(self, number: int, paths: Sequence[Path], listener: Listener) -> None:
        self.number, self.paths = number, paths
        self._listener = listener
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._trace: Trace | None = None
        self._facts: Facts | None = None
        self._analysis: Analysis | None = None
        # No job may keep the program from ending.
        self._thread = threading.Thread(target=self._work, name="trace", daemon=True)

    def start(self) -> None:
        self._jobs.put(self._load)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread soon: after the rows that it is reading."""
        self._stopped.set()
        self._jobs.put(None)
        self._thread.join(timeout=2)

    def ask(self, job: Callable[[], None]) -> None:
        """Does a job after those that wait already."""
        self._jobs.put(job)

    def detail(self, number: int, start: int, end: int) -> GapDetail | None:
        """All about a gap of the trace's lane; for jobs only. None before the analysis is done."""
        if self._facts is None or self._analysis is None:
            return None
        return describe_gap(self._facts, self._analysis.findings, number, start, end)

    def parts(self, threads: bool) -> list[SceneLane]:
        """Lanes of the host's threads, or of the streams; for jobs only."""
        if self._trace is None or self._facts is None:
            return []
        return thread_lanes(self._facts) if threads else stream_lanes(self._trace)

    @property
    def facts(self) -> Facts | None:
        """What the analysis was made of; for jobs only, but for arrays, which never change."""
        return self._facts

    def export(self, target: Path, start: int, end: int) -> None:
        """Cuts a window of the trace's clock out; for jobs only."""
        from gputrace.views.exports import Job, export
        from gputrace.views.exports.targets import check_target

        if self._trace is not None and self._analysis is not None:
            analysis = self._analysis
            path = check_target(target, self._trace.paths, False)
            job = Job(self._trace, path, Window(start, end), False, lambda _: analysis)
            export(job, "trace")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._stopped.is_set():
            try:
                job()
            except _Stopped:
                break
            except Exception as error:
                self._listener.failed(self.number, error)
        if self._trace is not None:
            self._trace.close()

    def _load(self) -> None:
        from gputrace.traces.readers import open_traces

        self._trace = open_traces(self.paths)
        self._analysis = analyze(self._trace, None, self._progress, self)
        assert self._facts is not None
        self._listener.scene(self.number, full_scene(self._facts, self._analysis))

    def operations_read(self, operations: Sequence[GpuOperations]) -> None:
        """Shows what the GPUs did while the host's rows are still read."""
        assert self._trace is not None
        if operations:
            self._listener.scene(self.number, first_scene(self._trace, operations))

    def facts_found(self, facts: Facts) -> None:
        self._facts = facts

    def _progress(self, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise _Stopped
        self._listener.progress(self.number, done, total)
