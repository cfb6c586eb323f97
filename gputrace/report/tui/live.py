"""Screen of a recording under way, redrawn each second."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Protocol

import numpy as np
from rich.console import RenderableType
from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from gputrace.analyzers.timeline_model.cells import Curve
from gputrace.model.intervals import Times
from gputrace.model.results import Analysis, Breakdown
from gputrace.model.time_class import CLASSES
from gputrace.report.palette import LEVELS, SEVERITIES, Palette
from gputrace.report.tui.screen import TerminalApp
from gputrace.report.tui.state import CURVE_LOOKS
from gputrace.report.wording import gpu_label, shown_findings, verdict
from gputrace.sanitize import clean
from gputrace.units import format_ns

_EVERY_S: Final = 1.0
_OUTPUT_S: Final = 0.25
_ROWS_OF_OUTPUT: Final = 8


class LiveApp(TerminalApp[str]):
    """Live view of a feed; its result is ``open`` if the user wants to open the trace."""

    TITLE = "gputrace live"
    ENABLE_COMMAND_PALETTE = False
    CSS: ClassVar[str] = """
    Screen { layout: vertical; overflow: hidden; }
    #verdict { height: 1; padding: 0 1; background: $panel; }
    #status { height: 1; padding: 0 1; color: $text-muted; }
    #box { height: 1fr; padding: 0 1; }
    #body { height: auto; }
    #output { padding: 0 1; background: $surface; border-top: solid $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "leave"),
        Binding("enter,o", "open", "open the trace", key_display="Enter"),
        Binding("l", "letters", "letters in place of colours"),
        Binding("ctrl+c", "interrupt", "interrupt", show=False, priority=True),
        Binding("ctrl+backslash", "abort", "abort", show=False, priority=True),
    ]

    def __init__(
        self,
        feed: Feed,
        output: Callable[[int], list[str]] | None = None,
        type_control: Callable[[str], None] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the screen; it closes by itself once ``is_over``.

        For programs that do not write to this terminal, ``output`` returns up to so many of their
        last lines, and ``type_control`` types VINTR or VQUIT at their own terminal; without it,
        Ctrl+C leaves.
        """
        super().__init__()
        self._feed, self._output, self._type_control = feed, output, type_control
        self._is_over = is_over
        self._looking = False
        self._task: asyncio.Task[None] | None = None
        self.now: Now | None = None

    def compose(self) -> ComposeResult:
        yield Static("reading …", id="verdict", markup=False)
        yield Static(id="status", markup=False)
        with VerticalScroll(id="box"):
            yield Static(id="body", markup=False)
        if self._output is not None:
            yield Static(id="output", markup=False)
        yield Footer(show_command_palette=False)

    async def on_mount(self) -> None:
        self.use_palette(self.make_palette(letters=self.no_color))
        self.query_one("#box").focus()
        if self._type_control is None:
            self.exit_when_terminated()
        self.set_interval(_EVERY_S, self._look)
        if self._output is not None:
            self.query_one("#output").styles.height = self._rows_of_output + 1
            self.set_interval(_OUTPUT_S, self._show_output)
        self.call_later(self._look)

    @property
    def _rows_of_output(self) -> int:
        return min(_ROWS_OF_OUTPUT, max(self.size.height // 4, 1))

    def _look(self) -> None:
        if not self._looking and (self.now is None or self.now.state in ("running", "ending")):
            self._looking = True
            self._task = asyncio.create_task(self._take())

    async def _take(self) -> None:
        try:
            self.now = await asyncio.to_thread(self._feed.look)
        except Exception as error:
            message = clean(str(error) or type(error).__name__)
            self._put("verdict", Text(message, "bold red", no_wrap=True))
            return
        finally:
            self._looking = False
        self.show()

    def _show_output(self) -> None:
        assert self._output is not None
        if self._is_over():
            self.exit()
            return
        lines = [clean(line, self.size.width - 2) for line in self._output(self._rows_of_output)]
        self._put("output", Text("\n".join(lines), no_wrap=True))

    def show(self) -> None:
        """Draw the last state seen."""
        if self.now is None:
            return
        # The verdict on the last steps, or the reason why there is none.
        if self.now.analysis is None:
            words, style = clean(self.now.why_not) or "reading …", ""
        else:
            findings = shown_findings(self.now.analysis)
            words = clean(verdict(self.now.analysis))
            style = SEVERITIES[findings[0].severity if findings else "none"]
        self._put("verdict", Text(words, style, no_wrap=True, overflow="ellipsis"))
        self._put("status", status(self.now))
        self._put("body", body(self.now, self.palette, max(self.size.width - 4, 20)))

    def _put(self, widget_id: str, what: RenderableType) -> None:
        """Update a widget; do nothing while the screen is closing."""
        for widget in self.query(f"#{widget_id}").results(Static):
            widget.update(what)

    def on_resize(self) -> None:
        self.show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer to open the trace only where a recording is watched, not made."""
        return self._output is None if action == "open" else True

    def action_open(self) -> None:
        if self.now is not None and self.now.state == "ended":
            self.exit("open")
        else:
            self.notify("the recording has not ended", timeout=2, markup=False)

    def action_interrupt(self) -> None:
        if self._type_control is None:
            self.exit()
        else:
            self._type_control("VINTR")

    def action_abort(self) -> None:
        if self._type_control is not None:
            self._type_control("VQUIT")


def watch(feed: Feed) -> tuple[int, Path | None]:
    """Show a recording until the user leaves; return the exit code, and the trace to open."""
    app = LiveApp(feed)
    wanted = app.run()
    return app.return_code or 0, feed.trace if wanted == "open" else None


CURVE_NS: Final = 60_000_000_000
"""Nanoseconds of the past that the curves show."""
_MOST_RANKS: Final = 16
_LABEL: Final = 14
_BOLD: Final = Style(bold=True)
_DIM: Final = Style(dim=True)
_STATES: Final = {
    "running": "recording",
    "ending": "the program has ended; its trace is being made",
    "ended": "ended; Enter opens the trace",
    "cut": "the recorder was killed; `gputrace recover` makes a trace of what is there",
}
_DRAWN: Final = ("utilization", "power", "smClock")
_LEAST_CELLS: Final = 4
_VALUE: Final = 18
"""Columns of a curve's name and value together."""


def status(now: Now) -> Text:
    """Return the status line: state, elapsed time, size, processes."""
    rate = now.bytes / max(now.elapsed_ns, 1) * 1e9
    parts = [
        clean(now.name, 40),
        _STATES[now.state],
        format_ns(now.elapsed_ns),
        f"{now.bytes / 1e6:,.1f} MB, {rate / 1e6:,.1f} MB/s",
        f"processes: {now.processes}",
    ]
    parts = parts[:2] if now.state in ("ended", "cut") else parts
    return Text(" · ".join(parts), no_wrap=True, overflow="ellipsis")


def body(now: Now, palette: Palette, width: int) -> Text:
    """Draw steps, shares and curves, a line each, at most ``width`` columns wide."""
    lines = [*_paces(now, width), *_shares(now, palette, width), *_cards(now.cards, now, width)]
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _paces(now: Now, width: int) -> Iterator[Text]:
    yield Text("Steps", _BOLD)
    steps = now.analysis.steps if now.analysis else None
    if not now.paces and steps is not None and steps.mean_ns:
        pace = f"  {1e9 / steps.mean_ns:,.2f} a second, mean of {steps.steady_count} "
        yield Text(f"{pace}{format_ns(steps.mean_ns)} ({steps.kind}, found by: {steps.source})")
    elif not now.paces:
        yield Text("  none seen yet", _DIM)
    yield from (_pace(pace, width) for pace in now.paces[:_MOST_RANKS])
    if len(now.paces) > _MOST_RANKS:
        yield Text(f"  and {len(now.paces) - _MOST_RANKS} ranks more", _DIM)
    yield Text()


def _pace(pace: Pace, width: int) -> Text:
    speed = "" if pace.per_second is None else f"{pace.per_second:,.2f} a second"
    line = Text(f"  {f'rank {pace.rank}':{_LABEL - 2}}")
    line.append(f"step {pace.number:<8,} {speed:>16}   ")
    line.append(f"last {format_ns(pace.lengths[-1]):>9}   ")
    line.append(f"mean of {len(pace.lengths)} {format_ns(pace.mean_ns):>9}   ")
    room = width - line.cell_len
    if room > _LEAST_CELLS:
        top = float(max(pace.lengths)) or 1.0
        line.append(_levels([length / top for length in pace.lengths[-room:]]), _DIM)
    return line


def _shares(now: Now, palette: Palette, width: int) -> Iterator[Text]:
    if now.analysis is None:
        return
    rows = now.analysis.breakdown
    steps = max((row.steps for row in rows), default=0)
    length = format_ns(now.window[1] - now.window[0])
    what = f"last {steps} steps" if steps else f"last {length}"
    ago = format_ns(max(now.time_ns - now.window[1], 0))
    title = Text("Time of the GPUs" if now.analysis.gpus else "Time of the ranks", _BOLD)
    title.append(f"   {what}, until {ago} ago", _DIM)
    yield title
    for row in rows[:_MOST_RANKS]:
        yield from _share(row, gpu_label(row, now.analysis), palette, width)
    if len(rows) > _MOST_RANKS:
        yield Text(f"  and {len(rows) - _MOST_RANKS} more", _DIM)
    yield Text()


def _share(row: Breakdown, label: str, palette: Palette, width: int) -> Iterator[Text]:
    line = Text(f"  {clean(label, _LABEL - 3):{_LABEL - 2}}")
    if row.compute_ns is None:
        waiting = f"waits for data {row.share('host_data'):.1%} of the time"
        yield line.append(waiting if row.host_data_ns is not None else "", "")
        return
    room = max(width - _LABEL, 8)
    for name, cells in zip(CLASSES, _cells([row.of(n) for n in CLASSES], room), strict=True):
        letter, style = palette.swatch(name)
        line.append(letter * cells, style)
    yield line
    shown = [n for n in sorted(CLASSES, key=lambda n: -row.of(n)) if row.share(n) >= 0.005]
    words = Text(" " * _LABEL)
    for name in shown:
        letter, style = palette.swatch(name)
        words.append(letter, style)
        words.append(f" {palette.look(name).short} {row.share(name):.1%}  ")
    yield words


def _cells(parts: Sequence[int], room: int) -> list[int]:
    """Distribute ``room`` cells over parts in proportion; the counts sum to ``room``."""
    total = sum(parts)
    if not total:
        return [0] * len(parts)
    ends = [round(sum(parts[: at + 1]) * room / total) for at in range(len(parts))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _cards(cards: Sequence[CardNow], now: Now, width: int) -> Iterator[Text]:
    if not cards:
        return
    title = Text("NVML", _BOLD)
    yield title.append(f"   last {format_ns(CURVE_NS)}", _DIM)
    others = [name for name in CURVE_LOOKS if name not in _DRAWN]
    room = (width - _LABEL - 12 * len(others)) // len(_DRAWN) - _VALUE
    edges = np.linspace(now.time_ns - CURVE_NS, now.time_ns, max(room, 0) + 1).astype(np.int64)
    for card in cards:
        line = Text(f"  {f'gpu {card.gpu}':{_LABEL - 2}}")
        for name in _DRAWN:
            line.append(_drawn(name, card.curves.get(name), edges))
        for name in others:
            line.append(f"{_value(name, card.curves.get(name)):12}")
        yield line


def _drawn(name: str, curve: Curve | None, edges: Times) -> Text:
    """Draw a curve and its latest value, padded to equal width."""
    called, room = CURVE_LOOKS[name].short, len(edges) - 1
    line = Text().append(f"{called} ", _DIM)
    if room > _LEAST_CELLS:
        known = None if curve is None else (curve.means(edges) / curve.top).tolist()
        line.append(_levels(known or [math.nan] * room))
    return line.append(f" {_value(name, curve)}".ljust(_VALUE - len(called) - 1))


def _value(name: str, curve: Curve | None) -> str:
    """Format the latest value of a curve."""
    look = CURVE_LOOKS[name]
    return "–" if curve is None else f"{curve.value[-1] / look.scale:,.0f} {look.unit}"


def _levels(shares: Sequence[float]) -> str:
    """Return a row of block characters for shares of 0 to 1; blanks for unknown ones (NaN)."""
    top = len(LEVELS) - 1
    # Any share above 0 is visible.
    return "".join(
        " " if share != share else LEVELS[min(max(round(share * top), 1 if share > 0 else 0), top)]
        for share in shares
    )


@dataclass(frozen=True, slots=True)
class Pace:
    """Pace of the last steps of a rank."""

    rank: int
    number: int
    """Number of the last step, from 0."""
    lengths: tuple[int, ...]
    """Duration of each step in nanoseconds, oldest first; at least one."""
    per_second: float | None
    """Steps per second over these and the time since then; None for too few steps."""

    @property
    def mean_ns(self) -> int:
        return sum(self.lengths) // len(self.lengths)


@dataclass(frozen=True, eq=False, slots=True)
class CardNow:
    """NVML samples of a card's last minute."""

    gpu: int
    curves: Mapping[str, Curve]
    """Curves by name; times on CLOCK_REALTIME."""


@dataclass(frozen=True, eq=False, slots=True)
class Now:
    """Snapshot of a recording."""

    name: str
    """Name of the trace that is being recorded."""
    state: str
    """``running``, ``ending`` (the trace is being made), ``ended`` or ``cut`` (killed)."""
    time_ns: int
    """Time of the snapshot, CLOCK_REALTIME."""
    elapsed_ns: int
    bytes: int
    processes: int
    paces: tuple[Pace, ...] = ()
    cards: tuple[CardNow, ...] = ()
    analysis: Analysis | None = None
    """Analysis of the last steps; None while there is none yet."""
    window: tuple[int, int] = (0, 0)
    """Window that was analyzed, CLOCK_REALTIME."""
    why_not: str = ""
    """Reason why there is no analysis."""


class Feed(Protocol):
    """Observer of a recording."""

    @property
    def trace(self) -> Path:
        """Path of the trace, which exists once the recording has ended."""

    def look(self) -> Now:
        """Return a snapshot; called in a worker thread, never concurrently."""
