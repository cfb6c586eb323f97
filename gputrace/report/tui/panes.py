"""Panes below the lanes: gaps with the details of the selection, findings, kernels, steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Final

import numpy as np
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static

from gputrace.analyzers.timeline_model import NO_STEP, GapFilter, Scene
from gputrace.analyzers.timeline_model.cells import stack
from gputrace.analyzers.timeline_model.gaps import GapDetail, IssuingCall, Operation, times_in
from gputrace.model.comparison import StepExplanation
from gputrace.model.events import Kind
from gputrace.model.results import Analysis, Step
from gputrace.model.time_class import CLASSES, IDLE_CAUSES
from gputrace.report import room_for_names, wording
from gputrace.report.palette import LOOKS, SEVERITIES, Palette
from gputrace.report.step import worth_listing
from gputrace.report.tables import BESIDE_KERNELS, kernels_table
from gputrace.report.text import open_console, print_table, without_blanks
from gputrace.report.tui.state import CURVE_LOOKS, Board, ShownLane
from gputrace.report.tui.timeline import bar_rows, class_words
from gputrace.sanitize import clean, sentence
from gputrace.units import format_change, format_count, format_ns, format_ranges, format_share

_COLUMNS: Final = {
    "lane": ("gpu", "<9.9"),
    "length": ("length", ">9.9"),
    "start": ("from", ">13.13"),
    "step": ("step", ">6.6"),
    "cause": ("cause", "<34.34"),
}
"""Titles of the list's columns, with the formats of their texts."""


class GapList(ScrollView, can_focus=False):
    """List of the gaps that pass the board's filter, in its order."""

    DEFAULT_CSS: ClassVar[str] = "GapList { scrollbar-size-horizontal: 0; }"

    @dataclass
    class Chosen(Message):
        """Click on a gap."""

        index: int

    def __init__(self, board: Board, palette: Palette) -> None:
        super().__init__(id="gaps")
        self.board, self.palette = board, palette
        self.index = 0
        """Index of the selected row of the list."""

    def show_board(self) -> None:
        """Redraw, and keep the selection in view."""
        self.virtual_size = Size(self.size.width, len(self.board.rows) + 1)
        top, height = self.scroll_offset.y, max(self.size.height - 1, 1)
        if self.index < top:
            self.scroll_to(y=self.index, animate=False)
        elif self.index >= top + height:
            self.scroll_to(y=self.index - height + 1, animate=False)
        self.refresh()

    def on_resize(self) -> None:
        self.show_board()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y == 0:
            arrow = "▾" if self.board.descending else "▴"
            header = "".join(
                f" {title + arrow * (self.board.sort == name):{spec}}"
                for name, (title, spec) in _COLUMNS.items()
            )
            line = [Segment(header, self.rich_style + Style(bold=True))]
        else:
            index = y - 1 + self.scroll_offset.y
            line = self._line(index) if index < len(self.board.rows) else []
        return Strip(line).adjust_cell_length(width, self.rich_style)

    def _line(self, index: int) -> list[Segment]:
        table, row = self.board.table, int(self.board.rows[index])
        cause, step = IDLE_CAUSES[int(table.cause[row])], int(table.step[row])
        start, end = self.board.gap_span(row)
        texts = {
            "lane": self.board.gpus[int(table.lane[row])].label,
            "length": format_ns(end - start),
            "start": wording.moment(start),
            "step": "" if step == NO_STEP else str(step),
            "cause": self._charged(row) or class_words(cause),
        }
        chosen = index == self.index
        style = self.rich_style + Style(reverse=chosen, bold=chosen)
        swatch, color = self.palette.swatch(cause)
        cells = [Segment(f" {texts[name]:{spec}}", style) for name, (_, spec) in _COLUMNS.items()]
        return [*cells[:-1], Segment(" ", style), Segment(swatch, color), *cells[-1:]]

    def _charged(self, row: int) -> str:
        """Return the cause that the ledger charges most of a gap to; empty where none is known."""
        shown = self.board.gpus[int(self.board.table.lane[row])]
        scene = self.board.scenes[shown.trace]
        if scene is None or scene.analysis is None:
            return ""
        start, end = self.board.gap_span(row)
        charges = times_in(shown.lane.lost, start + shown.zero, end + shown.zero)
        return next((clean(scene.analysis.cause_label(cause)) for cause in charges), "")

    def on_mouse_down(self, event: events.MouseDown) -> None:
        index = event.y - 1 + self.scroll_offset.y
        if event.y > 0 and index < len(self.board.rows):
            self.post_message(self.Chosen(index))


class Pane(VerticalScroll):
    """Text in place of the gaps, drawn anew by ``draw`` when the height for it changes."""

    def __init__(self, draw: Callable[[int], Text], **named: Any) -> None:
        super().__init__(**named)
        self._draw = draw

    def compose(self) -> ComposeResult:
        yield Static(id="pane-text", markup=False)

    def show_board(self) -> None:
        self.query_one(Static).update(self._draw(self.size.height))

    def on_resize(self) -> None:
        self.show_board()


def verdict_text(scenes: Sequence[Scene | None]) -> Text:
    """Return the verdicts on the traces, as far as they are analyzed."""
    text = Text(overflow="ellipsis")
    for trace, scene in enumerate(scenes):
        if scene is None or scene.analysis is None:
            continue
        if len(scenes) > 1:
            text.append(f"{'AB'[trace]} ", "bold")
        findings = wording.shown_findings(scene.analysis)
        style = SEVERITIES[findings[0].severity if findings else "none"]
        text.append(f"{clean(wording.verdict(scene.analysis))}  ", style)
        text.append(f"{numbers}  " if (numbers := wording.describe_numbers(scene.analysis)) else "")
    return text


def legend_text(lanes: Sequence[ShownLane], palette: Palette, width: int) -> Text:
    """Return the classes of time and the curve that some lanes have, in rows at most ``width``
    cells wide.
    """
    there = {
        name
        for shown in lanes
        for name, times in zip(shown.lane.layers.classes, shown.lane.layers.sets, strict=True)
        if len(times)
    }
    curves = {shown.lane.part for shown in lanes}.intersection(CURVE_LOOKS)
    words = [
        Text.assemble(palette.swatch(name), f" {LOOKS[name].short}  ")
        for name in LOOKS
        if name in there
    ]
    words += [Text(f"{CURVE_LOOKS[name].label}: as NVML samples {name}  ") for name in curves]
    rows = [Text()]
    for word in words:
        if rows[-1].cell_len + word.cell_len > width:
            rows.append(Text())
        rows[-1].append(word)
    return Text("\n").join(rows)


def status_text(board: Board, index: int, width: int) -> Text:
    """Return window, cursor and the index of the gap in the list, as far as they fit."""
    parts = [f"window {format_ns(board.view.length)}", f"cursor {wording.moment(board.cursor)}"]
    if len(board.marks) == 2:
        parts.insert(0, f"a to b {format_ns(abs(board.marks[1] - board.marks[0]))}")
    number = index + 1 if len(board.rows) else 0
    which = "of steady steps" if board.gap_filter.steady else ""
    which = which or ("in all" if board.gap_filter == GapFilter() else "")
    if len(board.table):
        parts.append(f"gap {number:,} of {len(board.rows):,} {which}".rstrip())
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        del parts[0]
    return Text(" · ".join(parts), no_wrap=True, overflow="ellipsis")


_MOST_HOST: Final = 8
_MOST_OTHERS: Final = 8
_VERSION: Final = re.compile(r"_v\d+(_ptsz|_ptds)?$")
_HOST: Final = {
    Kind.DATA_WAIT: "data wait",
    Kind.OS_RUNTIME: "system call",
    Kind.API: "CUDA call",
    Kind.RANGE: "range",
    Kind.OVERHEAD: "overhead",
    Kind.STEP: "step",
}


def gap_text(
    detail: GapDetail,
    analysis: Analysis,
    name: str,
    labels: Sequence[str],
    zero: int,
    where: str,
) -> Text:
    """Describe a gap on the lane ``name``, with ``where``, the steps around it in words.

    ``labels`` are those of the lanes in ``detail.others``; the axis is 0 at the time ``zero``.
    """
    gap, text = detail.gap, Text()
    text.append(f"{name}: nothing for {format_ns(gap.length_ns)}", "bold")
    text.append(f", from {wording.moment(gap.start_ns - zero)}{where and ', '}{where}\n")
    # A small screen shows no more: what the host did says more than the cause, which the list has.
    if gap.evidence:
        text.append(f"{clean(gap.evidence)}\n")
    main = max(gap.charges, key=lambda cause: gap.charges[cause], default=None)
    why = f"; {clean(analysis.cause_label(main))}" if main else ""
    text.append(f"{_shares(detail.by_cause, gap.length_ns)}{why}\n")
    text.append("why\n" if gap.charges else "", "bold")
    for cause, ns in gap.charges.items():
        if ns * 200 >= gap.length_ns:
            share = format_share(ns, gap.length_ns)
            text.append(f"- {clean(analysis.cause_label(cause))} {format_ns(ns)} ({share})\n")
    if (finding := detail.finding) is not None:
        text.append(f"{finding.id}: ", SEVERITIES[finding.severity])
        text.append(f"{clean(finding.message)}\n")
        if finding.advice:
            text.append("what to do: ", "bold")
            text.append(f"{clean(finding.advice)}\n")
    thread = f"host thread {detail.launch.thread}\n" if detail.host and detail.launch else ""
    text.append(thread, "bold")
    for each in detail.host[:_MOST_HOST]:
        call, count = call_name(each.name), f" ×{each.count}" if each.count > 1 else ""
        share = format_share(each.ns, gap.length_ns)
        text.append(f"- {_HOST[each.kind]} {call}{count} {format_ns(each.ns)} ({share})\n")
    if len(detail.host) > _MOST_HOST:
        text.append(f"- and {len(detail.host) - _MOST_HOST} more\n")
    text.append("on the GPU\n", "bold")
    text.append(_operation("before", detail.before))
    text.append(_operation("after", detail.after))
    if detail.launch is not None:
        text.append(launch_line(detail.launch, detail.gap.end_ns))
    if detail.others:
        text.append("meanwhile\n", "bold")
    for lane, shares in islice(detail.others.items(), _MOST_OTHERS):
        text.append(f"- {labels[lane]}: {_shares(shares, gap.length_ns)}\n")
    if len(detail.others) > _MOST_OTHERS:
        text.append(f"- and {len(detail.others) - _MOST_OTHERS} more\n")
    return text


def step_text(found: StepExplanation, shown: ShownLane) -> Text:
    """Describe a step against the median step, on the GPU where it grew most.

    Of the GPU of the lane ``shown``, if that is another one, the length is told.
    """
    first, text = found.gpus[0], Text()
    text.append(f"{clean(wording.capital(found.message))}\n", "bold")
    for row in found.gpus[1:]:
        if (row.gpu, row.rank) == (shown.lane.gpu, shown.lane.rank):
            length, more = format_ns(row.end_ns - row.start_ns), format_change(row.more_ns)
            text.append(f"{shown.label}, at the cursor: {length} ({more}), less of it its own\n")
    for part in worth_listing(first):
        usual = f"{format_ns(part.ns)}, usually {format_ns(part.usual_ns)}"
        text.append(f"- {clean(part.label)} {format_change(part.more_ns)} ({usual})\n")
    if (gap := first.longest_gap) is not None:
        text.append("longest gap\n", "bold")
        text.append(f"- {format_ns(gap.length_ns)}: {clean(gap.evidence)}\n")
    if first.kernels:
        text.append("kernels that differ\n", "bold")
    for kernel in first.kernels:
        count = f"{kernel.launches} launches, usually {kernel.usual_launches}"
        text.append(f"- {wording.label(kernel.name)} {format_change(kernel.more_ns)} ({count})\n")
    if found.advice:
        text.append("what to do\n", "bold").append(f"{clean(found.advice)}\n")
    return text


def operation_text(
    operation: Operation, launch: IssuingCall | None, name: str, what: str, zero: int
) -> Text:
    """Describe a picked operation."""
    text = Text()
    length = operation.end_ns - operation.start_ns
    text.append(f"{name}: {format_ns(length)} of {what}", "bold")
    text.append(f", from {wording.moment(operation.start_ns - zero)}\n")
    text.append(f"{clean(operation.name, 1_000)}\n")
    if operation.bytes >= 0:
        rate = f", {operation.bytes / length:.1f} GB/s" if length else ""
        text.append(f"{format_count(operation.bytes, 'byte')}{rate}\n")
    if operation.correlation > 0:
        text.append(f"correlation {operation.correlation}\n")
    if launch is None:
        text.append("the trace does not show which call issued it\n")
    else:
        text.append(launch_line(launch, operation.start_ns))
    return text


def launch_line(launch: IssuingCall, started: int) -> str:
    """Describe the call that issued an operation started at ``started``."""
    before = started - launch.start_ns
    when = f"{format_ns(before)} before" if before >= 0 else f"{format_ns(-before)} after"
    return f"- issued by {call_name(launch.name)} {when} it starts (thread {launch.thread})\n"


def call_name(name: str) -> str:
    """Return a call's name without its API version."""
    return clean(_VERSION.sub("", name), 80)


def _operation(when: str, operation: Operation | None) -> str:
    if operation is None:
        return f"- {when}: nothing\n"
    size = f", {format_count(operation.bytes, 'byte')}" if operation.bytes >= 0 else ""
    length = format_ns(operation.end_ns - operation.start_ns)
    return f"- {when}: {wording.label(operation.name)} ({length}{size})\n"


def _shares(shares: Mapping[str, int], length: int) -> str:
    parts = [
        f"{class_words(name)} {format_share(ns, length)}"
        for name, ns in shares.items()
        if ns * 200 >= length
    ]
    return ", ".join(parts) or "nothing"


_MOST_KERNELS: Final = 50
_LONGEST: Final = 8
"""Columns of the longest launch of a kernel."""
_WITH_LONGEST: Final = 90
"""Terminal columns from which it is shown."""
_SCALE: Final = 9
"""Columns left of the bars, for the length of the longest step."""
_WIDEST: Final = 6
"""Maximum columns of a step."""


def findings_pane(analysis: Analysis, width: int, height: int, palette: Palette) -> Text:
    """List all findings with their advice, the most important first."""
    del width, height, palette
    text = Text()
    for finding in wording.shown_findings(analysis):
        text.append(f"{finding.id} ", SEVERITIES[finding.severity] or "bold")
        text.append(f"{sentence(wording.capital(finding.message))}.\n")
        for name, line in wording.explain(analysis, finding):
            text.append(f"  {name}: " if name else "  ", "bold")
            text.append(f"{sentence(line)}\n", "dim")
    return text or Text(wording.verdict(analysis))


def kernels_pane(analysis: Analysis, width: int, height: int, palette: Palette) -> Text:
    """Tabulate the kernels that take most time."""
    del height, palette
    has_room = width >= _WITH_LONGEST
    names = room_for_names(width, BESIDE_KERNELS + (_LONGEST if has_room else 0))
    table = kernels_table(analysis, _MOST_KERNELS, names, longest_launches=has_room)
    if table is None:
        return Text("No kernels were recorded.")
    console = open_console(width, color=False)
    print_table(console, table)
    return Text(without_blanks(console))


def steps_pane(analysis: Analysis, width: int, height: int, palette: Palette) -> Text:
    """Draw the steady steps as bars of the classes of time, each the mean of its GPUs."""
    steps = [step for step in analysis.step_list if step.phase == "steady"]
    if not steps:
        return Text("No steps were found.")
    names = CLASSES if analysis.gpus else ("host_data", "host_rest")
    numbers, index = np.unique([step.step for step in steps], return_inverse=True)
    room = max(width - _SCALE - 1, 1)
    columns = min(len(numbers), room)
    column = index * columns // len(numbers)
    shares = np.zeros((columns, len(names)), np.int64)
    np.add.at(shares, column, [[_class_time(step, name) for name in names] for step in steps])
    shares //= np.bincount(column)[:, None]
    lengths = shares.sum(axis=1)
    each = min(max(room // columns, 1), _WIDEST)
    longest = np.full(columns, max(int(lengths.max()), 1))
    bars = bar_rows(stack(shares, longest, max(height - 2, 1)), (*names, ""), palette, each)
    over = format_count(len(numbers), "steady step")
    gpus = f", mean of {len(analysis.gpus)} GPUs" if len(analysis.gpus) > 1 else ""
    text = Text(f"{over}{gpus}; the longest takes {format_ns(int(longest[0]))}\n", "bold")
    for line, row in enumerate(bars):
        text.append(f"{format_ns(int(longest[0])) if not line else '':>{_SCALE - 1}} ")
        for segment in row.segments():
            text.append(segment.text, segment.style)
        text.append("\n")
    first, last = (format_ranges([int(number)]) for number in numbers[[0, -1]])
    between = " " * max(columns * each - len(first) - len(last), 1)
    return text.append(" " * _SCALE + (f"{first}{between}{last}" if first != last else first))


def _class_time(step: Step, name: str) -> int:
    if name == "host_rest":
        return step.end_ns - step.start_ns - (step.host_data_ns or 0)
    return getattr(step, f"{name}_ns") or 0


PANES: Final[Mapping[str, Callable[[Analysis, int, int, Palette], Text]]] = {
    "findings": findings_pane,
    "kernels": kernels_pane,
    "steps": steps_pane,
}
"""Panes beside the list of gaps, by name."""
