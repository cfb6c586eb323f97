"""List of gaps, and descriptions of a gap or an operation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from gputrace.analyzers.timeline_model import NO_STEP
from gputrace.analyzers.timeline_model.gaps import GapDetail, HostTime, Launch, Operation
from gputrace.model.events import Kind
from gputrace.model.time_class import IDLE_CAUSES
from gputrace.report.palette import SEVERITIES, Palette
from gputrace.report.tables import label, moment
from gputrace.report.tui.state import Board
from gputrace.report.tui.timeline import class_words
from gputrace.sanitize import clean
from gputrace.units import format_count, format_ns, format_share

_COLUMNS: Final = {
    "lane": ("gpu", "<9.9"),
    "length": ("length", ">9.9"),
    "start": ("from", ">13.13"),
    "step": ("step", ">6.6"),
    "cause": ("cause", "<15.15"),
}
"""Titles of the list's columns, with the formats of their texts."""


class GapList(ScrollView, can_focus=False):
    """List of the gaps that pass the board's filter, in its order."""

    DEFAULT_CSS: ClassVar[str] = "GapList { scrollbar-size-horizontal: 0; }"

    @dataclass
    class Chosen(Message):
        """Click on a gap."""

        place: int

    def __init__(self, board: Board, palette: Palette) -> None:
        super().__init__(id="gaps")
        self.board, self.palette = board, palette
        self.place = 0
        """Index of the selected row of the list."""

    def show_board(self) -> None:
        """Redraw, and keep the selection in view."""
        self.virtual_size = Size(self.size.width, len(self.board.rows) + 1)
        top, height = self.scroll_offset.y, max(self.size.height - 1, 1)
        if self.place < top:
            self.scroll_to(y=self.place, animate=False)
        elif self.place >= top + height:
            self.scroll_to(y=self.place - height + 1, animate=False)
        self.refresh()

    def on_resize(self) -> None:
        self.show_board()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y == 0:
            line = [Segment(self._header(), self.rich_style + Style(bold=True))]
        else:
            index = y - 1 + self.scroll_offset.y
            line = self._line(index) if index < len(self.board.rows) else []
        return Strip(line).adjust_cell_length(width, self.rich_style)

    def _header(self) -> str:
        arrow = "▾" if self.board.descending else "▴"
        return "".join(
            f" {title + arrow * (self.board.sort == name):{spec}}"
            for name, (title, spec) in _COLUMNS.items()
        )

    def _line(self, index: int) -> list[Segment]:
        table, row = self.board.table, int(self.board.rows[index])
        cause, step = IDLE_CAUSES[int(table.cause[row])], int(table.step[row])
        start, end = self.board.gap_span(row)
        texts = {
            "lane": self.board.gpus[int(table.lane[row])].label,
            "length": format_ns(end - start),
            "start": moment(start),
            "step": "" if step == NO_STEP else str(step),
            "cause": class_words(cause),
        }
        chosen = index == self.place
        style = self.rich_style + Style(reverse=chosen, bold=chosen)
        swatch, color = self.palette.swatch(cause)
        cells = [Segment(f" {texts[name]:{spec}}", style) for name, (_, spec) in _COLUMNS.items()]
        return [*cells[:-1], Segment(" ", style), Segment(swatch, color), *cells[-1:]]

    def on_mouse_down(self, event: events.MouseDown) -> None:
        index = event.y - 1 + self.scroll_offset.y
        if event.y > 0 and index < len(self.board.rows):
            self.post_message(self.Chosen(index))


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


def gap_text(detail: GapDetail, name: str, labels: Sequence[str], zero: int, where: str) -> Text:
    """Describe a gap on the lane ``name``, with ``where``, the steps around it in words.

    ``labels`` are those of the lanes in ``detail.others``; the axis is 0 at the time ``zero``.
    """
    gap, text = detail.gap, Text()
    text.append(f"{name}: nothing for {format_ns(gap.length_ns)}", "bold")
    text.append(f", from {moment(gap.start_ns - zero)}{where and ', '}{where}\n")
    text.append(f"{_shares(detail.by_cause, gap.length_ns)}\n")
    if gap.evidence:
        text.append(f"{clean(gap.evidence)}\n")
    if (finding := detail.finding) is not None:
        text.append(f"{finding.id}: ", SEVERITIES[finding.severity])
        text.append(f"{clean(finding.message)}\n")
        if finding.advice:
            text.append("what to do: ", "bold")
            text.append(f"{clean(finding.advice)}\n")
    text.append(f"host thread {detail.thread}\n" if detail.host else "", "bold")
    text.append("".join(_host_lines(detail.host, gap.length_ns)))
    text.append("on the GPU\n", "bold")
    text.append(_operation("before", detail.before))
    text.append(_operation("after", detail.after))
    if detail.launch is not None:
        text.append(launch_line(detail.launch, detail.gap.end_ns))
    if detail.others:
        text.append("meanwhile\n", "bold")
    for other in detail.others[:_MOST_OTHERS]:
        text.append(f"- {labels[other.lane]}: {_shares(other.shares, gap.length_ns)}\n")
    if len(detail.others) > _MOST_OTHERS:
        text.append(f"- and {len(detail.others) - _MOST_OTHERS} more\n")
    return text


def operation_text(
    operation: Operation, launch: Launch | None, name: str, what: str, zero: int
) -> Text:
    """Describe a picked operation."""
    text = Text()
    length = operation.end_ns - operation.start_ns
    text.append(f"{name}: {format_ns(length)} of {what}", "bold")
    text.append(f", from {moment(operation.start_ns - zero)}\n")
    text.append(f"{clean(operation.name, 1_000)}\n")
    if operation.bytes >= 0:
        rate = f", {operation.bytes / length:.1f} GB/s" if length else ""
        text.append(f"{format_count(operation.bytes, 'byte')}{rate}\n")
    if operation.correlation > 0:
        text.append(f"correlation {operation.correlation}\n")
    if launch is None:
        text.append("the trace does not tell which call issued it\n")
    else:
        text.append(launch_line(launch, operation.start_ns))
    return text


def launch_line(launch: Launch, started: int) -> str:
    """Describe the call that issued an operation started at ``started``."""
    before = started - launch.start_ns
    when = f"{format_ns(before)} before" if before >= 0 else f"{format_ns(-before)} after"
    return f"- issued by {call_name(launch.name)} {when} it starts (thread {launch.thread})\n"


def call_name(name: str) -> str:
    """Return a call's name without its API version."""
    return clean(_VERSION.sub("", name), 80)


def _host_lines(host: Sequence[HostTime], length: int) -> Iterator[str]:
    for each in host[:_MOST_HOST]:
        count = f" ×{each.count}" if each.count > 1 else ""
        share = format_share(each.ns, length)
        yield f"- {_HOST[each.kind]} {call_name(each.name)}{count} {format_ns(each.ns)} ({share})\n"
    if len(host) > _MOST_HOST:
        yield f"- and {len(host) - _MOST_HOST} more\n"


def _operation(when: str, operation: Operation | None) -> str:
    if operation is None:
        return f"- {when}: nothing\n"
    size = f", {format_count(operation.bytes, 'byte')}" if operation.bytes >= 0 else ""
    length = format_ns(operation.end_ns - operation.start_ns)
    return f"- {when}: {label(operation.name)} ({length}{size})\n"


def _shares(shares: Mapping[str, int], length: int) -> str:
    parts = [
        f"{class_words(name)} {format_share(ns, length)}"
        for name, ns in shares.items()
        if ns * 200 >= length
    ]
    return ", ".join(parts) or "nothing"
