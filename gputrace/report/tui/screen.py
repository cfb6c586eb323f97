"""Keys of the browser, the reader of its traces, and the base of terminal applications."""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

from textual.app import App
from textual.binding import Binding

from gputrace.analyzers.findings.context import Facts
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.pipeline import Options, analyze
from gputrace.analyzers.result_cache import ResultCache
from gputrace.analyzers.timeline_model import Scene, SceneLane, first_scene, full_scene
from gputrace.analyzers.timeline_model.gaps import GapDetail, Launch, describe_gap, find_issuer
from gputrace.analyzers.timeline_model.trace_rows import stream_lanes, thread_lanes
from gputrace.model.trace import Trace, Window
from gputrace.report.palette import Palette

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key:
    """Key binding, with its help text."""

    keys: str
    """Textual's names of the keys, separated by commas."""
    action: str
    does: str
    shown: str = ""
    """Label in the footer; empty to leave it out."""
    display: str = ""
    """Keys as shown to people; empty to show ``keys``."""

    @property
    def binding(self) -> Binding:
        return Binding(
            self.keys, self.action, self.shown or self.does, bool(self.shown), self.display or None
        )

    @property
    def written(self) -> str:
        """Keys as the help shows them."""
        return self.display or self.keys.replace(",", " ")


GROUPS: Final[dict[str, tuple[Key, ...]]] = {
    "Gaps": (
        Key("n,down", "gap(1)", "next gap of the list", "gap", "n ↓"),
        Key("p,up", "gap(-1)", "previous gap", "", "p ↑"),
        Key("pagedown", "gap_page(1)", "a page further in the list", "", "PgDn"),
        Key("pageup", "gap_page(-1)", "a page back", "", "PgUp"),
        Key("home", "gap_first", "first gap of the list", "", "Home"),
        Key("g,enter", "fit_gap", "zoom to the gap", "", "g Enter"),
        Key("o", "sort", "sort by length, start, gpu, cause, step", "sort"),
        Key("O", "reverse", "the other way round"),
        Key("F", "filter", "filter: gpu=0 cause=data step=8:24 len>1ms", "filter"),
        Key("i", "toggle_filter('steady')", "steady steps only, or all"),
        Key("B", "toggle_filter('between')", "between batches only, or all"),
    ),
    "Time": (
        Key("plus,equals_sign,w", "zoom(0.5)", "zoom in at the cursor", "", "+ w"),
        Key("minus,s", "zoom(2.0)", "zoom out", "", "- s"),
        Key("right,d", "pan(0.25)", "to the right", "", "→ d"),
        Key("left,a", "pan(-0.25)", "to the left", "", "← a"),
        Key("right_square_bracket", "step(1)", "next step", "step", "]"),
        Key("left_square_bracket", "step(-1)", "previous step", "", "["),
        Key("f", "fit_step", "fit the step", "fit"),
        Key("0,r", "fit_run", "fit the whole run", "run", "0 r"),
        Key("t", "jump", "jump to a time (28.6s, +5ms) or a step (#17)"),
        Key("full_stop", "cursor(1)", "cursor a cell to the right", "", "."),
        Key("comma", "cursor(-1)", "cursor a cell to the left", "", ","),
        Key("m", "mark", "mark the cursor; a second mark measures", "mark"),
        Key("escape", "clear", "forget marks and selection", "", "Esc"),
    ),
    "Lanes": (
        Key("j", "lane(1)", "next lane"),
        Key("k", "lane(-1)", "previous lane"),
        Key("e", "pick", "the operation under the cursor"),
        Key("c", "follow", "follow it to its launch, and back"),
        Key("slash", "search", "search operations by name", "search", "/"),
        Key("greater_than_sign", "match(1)", "next match", "", ">"),
        Key("less_than_sign", "match(-1)", "previous match", "", "<"),
        Key("R", "ranks", "show some ranks only: 0,2-3"),
        Key("b", "beside", "this rank and the next alone, side by side; or all"),
        Key("A", "align", "align two traces at the step under the cursor, by its number"),
        Key("S", "toggle_parts(False)", "a lane for each stream"),
        Key("H", "toggle_parts(True)", "a lane for each host thread"),
        Key("v", "curves", "what NVML sampled: use, clock, power, memory, heat, or nothing"),
        Key("l", "letters", "letters in place of colours"),
        Key("z", "enlarge", "lanes on the whole screen, or the gaps below them again"),
    ),
    "Other": (
        Key("J", "scroll_detail(1)", "the detail further down"),
        Key("K", "scroll_detail(-1)", "the detail further up"),
        Key("y", "copy", "copy the detail"),
        Key("x", "export", "write the view (.svg), or its window as a trace"),
        Key("question_mark,f1", "help", "this help", "help", "?"),
        Key("q,ctrl+c", "quit", "leave", "quit", "q"),
    ),
}

KEYS: Final = tuple(key for group in GROUPS.values() for key in group)


class TerminalApp(App[T]):
    """Application in colours or letters that leaves the terminal usable when it is terminated."""

    palette = Palette()

    def make_palette(self, *, letters: bool) -> Palette:
        """Return the palette of letters, or of the colours that the terminal has."""
        colors = 16 if self.console.color_system == "standard" else 1 << 24
        return Palette(0 if letters else colors)

    def use_palette(self, palette: Palette) -> None:
        self.palette = palette

    def exit_when_terminated(self) -> None:
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, partial(self.exit, return_code=128 + signal.SIGTERM)
        )

    def action_letters(self) -> None:
        """Switch between colours and letters."""
        self.use_palette(self.make_palette(letters=bool(self.palette.colors)))
        self.show()

    def show(self) -> None:
        """Redraw everything."""
        raise NotImplementedError


class Listener(Protocol):
    """Receiver of a source's progress and results; called from the source's thread."""

    def progress(self, trace: int, done: int, total: int) -> None: ...
    def scene(self, trace: int, scene: Scene) -> None: ...
    def failed(self, trace: int, error: Exception) -> None: ...


class _Stopped(Exception):
    """Cancellation of reading, as the user has left."""


class Source:
    """Reader of a trace, and of details requested later, in its own thread."""

    def __init__(self, number: int, paths: Sequence[Path], listener: Listener) -> None:
        self.number, self.paths = number, paths
        self._listener = listener
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._trace: Trace | None = None
        self._facts: Facts | None = None
        # A daemon, so that no job keeps the program from exiting.
        self._thread = threading.Thread(target=self._work, name="trace", daemon=True)

    def start(self) -> None:
        self._jobs.put(self._load)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the rows that it is reading."""
        self._stopped.set()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def ask(self, job: Callable[[], None]) -> None:
        """Enqueue a job."""
        self._jobs.put(job)

    def detail(self, scene: Scene, row: int) -> GapDetail:
        """Return the details of a gap of the scene's table; for jobs only."""
        return describe_gap(self.trace, scene, row)

    def issuer(self, scene: Scene, operations: GpuOperations, row: int) -> Launch | None:
        """Return the call that issued an operation; for jobs only."""
        issued = find_issuer(self.trace, scene, operations, row, int(operations.start[row]))
        return issued.launch if issued else None

    def parts(self, scene: Scene, threads: bool) -> list[SceneLane]:
        """Return lanes of the host's threads, or of the streams; for jobs only."""
        return thread_lanes(self.trace, scene) if threads else stream_lanes(self.trace)

    def export(self, target: Path, start: int, end: int) -> None:
        """Write a window, on the trace's clock, as a trace; for jobs only."""
        from gputrace.report.export import Job, export
        from gputrace.report.output_file import check_target

        path = check_target(target, self.trace.paths, False)
        job = Job(self.trace, path, Window(start, end), False, lambda _: analyze(self.trace))
        export(job, "trace")

    @property
    def trace(self) -> Trace:
        """Trace, opened on first use; for jobs only."""
        if self._trace is None:
            from gputrace.readers.open import open_traces

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
        earlier = ResultCache(self.paths)
        if (known := earlier.find(Scene, Options())) is not None:
            self._listener.scene(self.number, known)
            return
        analysis = analyze(self.trace, None, self._progress, self)
        assert self._facts is not None
        scene = full_scene(self._facts, analysis)
        # The facts take as much memory as the scene, and are not needed any more.
        self._facts = None
        self._listener.scene(self.number, scene)
        earlier.keep(scene, Options())

    def operations_read(self, operations: Sequence[GpuOperations]) -> None:
        """Show the work of the GPUs while the host's rows are still being read."""
        if operations:
            self._listener.scene(self.number, first_scene(self.trace, operations))

    def facts_found(self, facts: Facts) -> None:
        self._facts = facts

    def _progress(self, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise _Stopped
        self._listener.progress(self.number, done, total)
