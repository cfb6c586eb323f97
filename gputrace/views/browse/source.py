"""A trace that is read beside the screen: one thread, one job after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from gputrace.analyzers.analysis import analyze
from gputrace.analyzers.earlier import Earlier
from gputrace.analyzers.findings import Facts
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.options import Options
from gputrace.analyzers.scene.gap_detail import GapDetail, describe_gap
from gputrace.analyzers.scene.launches import Launch, find_issuer
from gputrace.analyzers.scene.more_lanes import stream_lanes, thread_lanes
from gputrace.analyzers.scene.scene import Scene, SceneLane, first_scene, full_scene
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
        # No job may keep the program from ending.
        self._thread = threading.Thread(target=self._work, name="trace", daemon=True)

    def start(self) -> None:
        self._jobs.put(self._load)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread soon: after the rows that it is reading."""
        self._stopped.set()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def ask(self, job: Callable[[], None]) -> None:
        """Does a job after those that wait already."""
        self._jobs.put(job)

    def detail(self, scene: Scene, row: int) -> GapDetail:
        """All about a gap of the scene's table; for jobs only."""
        return describe_gap(self.trace, scene, row)

    def issuer(self, scene: Scene, own: GpuOperations, row: int) -> Launch | None:
        """The call that issued an operation; for jobs only."""
        issued = find_issuer(self.trace, scene, own, row, int(own.start[row]))
        return issued.launch if issued else None

    def parts(self, scene: Scene, threads: bool) -> list[SceneLane]:
        """Lanes of the host's threads, or of the streams; for jobs only."""
        return thread_lanes(self.trace, scene) if threads else stream_lanes(self.trace)

    def export(self, target: Path, start: int, end: int) -> None:
        """Cuts a window of the trace's clock out; for jobs only."""
        from gputrace.views.exports import Job, export
        from gputrace.views.exports.targets import check_target

        path = check_target(target, self.trace.paths, False)
        job = Job(self.trace, path, Window(start, end), False, lambda _: analyze(self.trace))
        export(job, "trace")

    @property
    def trace(self) -> Trace:
        """The trace, which is opened when it is first needed; for jobs only."""
        if self._trace is None:
            from gputrace.traces.opening import open_traces

            self._trace = open_traces(self.paths)
        return self._trace

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
        earlier = Earlier(self.paths)
        if (known := earlier.find(Scene, Options())) is not None:
            self._listener.scene(self.number, known)
            return
        analysis = analyze(self.trace, None, self._progress, self)
        assert self._facts is not None
        scene = full_scene(self._facts, analysis)
        # What it was made of takes as much memory as the scene, and is not needed any more.
        self._facts = None
        self._listener.scene(self.number, scene)
        earlier.keep(scene, Options())

    def operations_read(self, operations: Sequence[GpuOperations]) -> None:
        """Shows what the GPUs did while the host's rows are still read."""
        if operations:
            self._listener.scene(self.number, first_scene(self.trace, operations))

    def facts_found(self, facts: Facts) -> None:
        self._facts = facts

    def _progress(self, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise _Stopped
        self._listener.progress(self.number, done, total)
