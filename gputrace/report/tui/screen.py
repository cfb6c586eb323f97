"""Keys, prompts and help of the browser, the reader of its traces, and the base of terminal
applications.
"""

from __future__ import annotations

import asyncio
import queue
import re
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeVar

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.timeline_model import GapFilter, Scene, read_scene
from gputrace.analyzers.timeline_model.gaps import IssuingCall, find_issuer
from gputrace.model.options import Options, Window
from gputrace.model.results import CauseNode
from gputrace.model.time_class import IDLE_CAUSES
from gputrace.model.trace import Trace
from gputrace.report.palette import Palette
from gputrace.sanitize import clean
from gputrace.store.cache import ResultCache
from gputrace.units import format_ranges, parse_duration

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


FILTER: Final = "gpu=0 cause=data why=garbage step=8:24 len>1ms"
"""Example of a filter of gaps."""
GROUPS: Final[dict[str, tuple[Key, ...]]] = {
    "Gaps": (
        Key("n,down", "gap(1)", "next gap of the list", "gap", "n ↓"),
        Key("p,up", "gap(-1)", "previous gap", "", "p ↑"),
        Key("pagedown", "gap_page(1)", "a page further in the list", "", "PgDn"),
        Key("pageup", "gap_page(-1)", "a page back", "", "PgUp"),
        Key("home", "gap_first", "first gap of the list", "", "Home"),
        Key("g,enter", "fit_gap", "zoom to the gap", "", "g Enter"),
        Key("o", "sort", "sort by length, start, gpu, cause, step"),
        Key("O", "reverse", "the other way round"),
        Key("F", "filter", f"filter: {FILTER}", "filter"),
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
        Key("W", "explain_step", "why the step under the cursor took as long as it did", "why"),
        Key("0,r", "fit_run", "fit the whole run", "run", "0 r"),
        Key("t", "jump", "jump to a time (28.6s, +5ms) or a step (#17)"),
        Key("full_stop", "cursor(1)", "cursor a cell to the right", "", "."),
        Key("comma", "cursor(-1)", "cursor a cell to the left", "", ","),
        Key("m", "mark", "mark the cursor; a second mark measures"),
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
    "Below the lanes": (
        Key("1", "pane('gaps')", "the gaps"),
        Key("2", "pane('findings')", "all findings, with what to do"),
        Key("3", "pane('kernels')", "the kernels that take most time"),
        Key("4", "pane('steps')", "a chart of the steady steps"),
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


_REMOTE: Final = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)


def picture(app: App[Any]) -> str:
    """Return the screen as an SVG that loads nothing from the network."""
    drawn = app.export_screenshot(title="gputrace browse", simplify=True)
    fonts = "font-family: DejaVu Sans Mono, Menlo, Consolas, monospace;"
    return _REMOTE.sub("", drawn).replace("font-family: Fira Code, monospace;", fonts)


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

    def issuer(self, scene: Scene, operations: GpuOperations, row: int) -> IssuingCall | None:
        """Return the call that issued an operation; for jobs only."""
        issued = find_issuer(self.trace, scene, operations, row, int(operations.start[row]))
        return issued.launch if issued else None

    def export(self, target: Path, start: int, end: int) -> None:
        """Write a window, on the trace's clock, as a trace; for jobs only."""
        from gputrace.report import check_target
        from gputrace.report.export import Job, export

        path = check_target(target, self.trace.paths, False)
        job = Job(self.trace, path, Window(start, end), False, lambda _: read_scene(self.trace))
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
        cache, show = ResultCache(self.paths), partial(self._listener.scene, self.number)
        if (cached := cache.find(Scene, Options())) is not None:
            show(cached)
            return
        # The work of the GPUs is shown while the host's rows are still being read.
        scene = read_scene(self.trace, None, self._progress, early=show)
        show(scene)
        cache.keep(scene, Options())

    def _progress(self, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise _Stopped
        self._listener.progress(self.number, done, total)


class Prompt(ModalScreen[str | None]):
    """Prompt for a line at the bottom of the screen; its result is None if cancelled.

    ``check`` takes the input; it raises ValueError or UsageError if that is invalid.
    """

    DEFAULT_CSS: ClassVar[str] = """
    Prompt { align: center bottom; background: $background 20%; }
    Prompt > Vertical { height: auto; background: $panel; padding: 0 1; }
    Prompt Input { height: 1; border: none; padding: 0; background: $surface; }
    Prompt .wrong { color: $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, question: str, value: str, check: Callable[[str], None]) -> None:
        super().__init__()
        self._question, self._value, self._check = question, value, check

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(self._question), id="question")
            yield Input(self._value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            self._check(event.value)
        except Exception as error:
            question = self.query_one("#question", Static)
            question.update(Text(clean(str(error))))
            question.add_class("wrong")
        else:
            self.dismiss(event.value)

    def action_cancel(self) -> None:
        self.dismiss(None)


_MOUSE: Final = [
    ("wheel", "zoom at the pointer; with Shift, to the side"),
    ("drag", "to the side"),
    ("click", "the gap or the operation there; a gap of the list"),
]


class Help(ModalScreen[None]):
    """Screen that lists all keys."""

    DEFAULT_CSS: ClassVar[str] = """
    Help { align: center middle; background: $background 40%; }
    Help > VerticalScroll {
        width: 78; max-width: 100%; height: auto; max-height: 100%;
        background: $panel; border: round $accent; padding: 0 1;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1", "app.pop_screen", "close")
    ]

    def compose(self) -> ComposeResult:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        rows = {title: [(key.written, key.does) for key in keys] for title, keys in GROUPS.items()}
        for title, keys in (rows | {"Mouse": _MOUSE}).items():
            table.add_row(Text(title, style="bold"), "")
            for key, does in keys:
                table.add_row(Text(f"  {key}"), Text(does))
        with VerticalScroll():
            yield Static(table)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


_CONDITION: Final = re.compile(r"(gpu|cause|why|step|len)\s*([=>])\s*(\S+)")
_CAUSES: Final = {cause.replace("_", "")[:4]: cause for cause in IDLE_CAUSES} | {
    "unexplained": "other_idle",
    "unex": "other_idle",
    "idle": "other_idle",
}


def parse_filter(text: str, labels: Sequence[str], causes: Sequence[CauseNode] = ()) -> GapFilter:
    """Parse a filter of gaps; raise ValueError that names what is invalid.

    ``causes`` are those that may be named, the general ones first.
    """
    result = GapFilter()
    rest = _CONDITION.sub("", text).strip()
    if rest:
        raise ValueError(f"{rest!r} is not understood; write {FILTER}")
    for name, _, value in _CONDITION.findall(text):
        if name == "gpu":
            wanted = set(value.split(","))
            lanes = [n for n, each in enumerate(labels) if wanted & {each, *each.split()}]
            if not lanes:
                raise ValueError(f"no lane is called {value}; there are {', '.join(labels)}")
            result = replace(result, lanes=lanes)
        elif name == "cause":
            result = replace(result, causes=[_cause(each) for each in value.split(",")])
        elif name == "why":
            wanted = set().union(*(_charged(each, causes) for each in value.split(",")))
            result = replace(result, charged=wanted)
        elif name == "step":
            first, _, last = value.partition(":")
            low = int(first or 0)
            result = replace(result, steps=(low, int(last or 1 << 30) if ":" in value else low + 1))
        else:
            result = replace(result, shortest_ns=parse_duration(value))
    return result


def _cause(text: str) -> str:
    """Return a cause by its name or a prefix of it."""
    key = text.replace("_", "").replace("-", "").lower()
    cause = _CAUSES.get(key) or _CAUSES.get(key[:4])
    if cause is None:
        raise ValueError(f"{text!r} is not a cause; choose from {', '.join(IDLE_CAUSES)}")
    return cause


def _charged(text: str, causes: Sequence[CauseNode]) -> set[str]:
    """Return a cause of the ledger by its id or a prefix of it, with all that are part of it."""
    ids = [node.id for node in causes]
    found = {text} & set(ids) or {id for id in ids if id.startswith(text)}
    if not found:
        raise ValueError(f"{text!r} is not a cause; choose from {', '.join(ids)}")
    for node in causes:
        found |= {node.id} if node.parent in found else set()
    return found


def parse_ranks(text: str, known: Collection[int]) -> frozenset[int] | None:
    """Parse ranks as ``0,2-3``; return None, meaning all, for none.

    Raises ValueError for other input and for ranks that do not exist.
    """
    ranks: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is not a rank; write 0,2-3, or nothing for all")
        low, high = int(first), int(last or first)
        ranks |= {rank for rank in known if low <= rank <= high}
        if not ranks:
            raise ValueError(f"no rank {part}; there are {format_ranges(sorted(known))}")
    return frozenset(ranks) or None
