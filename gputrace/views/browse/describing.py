"""A gap, or an operation, in words: what the panel shows and what is copied."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.text import Text

from gputrace.analyzers.results import Finding
from gputrace.analyzers.scene.gap_detail import GapDetail, HostTime, Operation
from gputrace.analyzers.scene.launches import Launch
from gputrace.cleaning import clean
from gputrace.traces.events import Kind
from gputrace.units import format_share
from gputrace.views.palette import SEVERITIES
from gputrace.views.words import duration, label, moment

_MOST_HOST: Final = 8
_MOST_OTHERS: Final = 8
_VERSION: Final = re.compile(r"_v\d+(_ptsz|_ptds)?$")
_NAMES: Final = {
    "other_idle": "unexplained",
    "h2d": "host to device",
    "other_copy": "other copies",
}
_HOST: Final = {
    Kind.DATA_WAIT: "data wait",
    Kind.OS_RUNTIME: "system call",
    Kind.API: "CUDA call",
    Kind.RANGE: "range",
    Kind.OVERHEAD: "overhead",
    Kind.STEP: "step",
}


def gap_text(detail: GapDetail, name: str, labels: Sequence[str], zero: int, where: str) -> Text:
    """All about a gap.

    Args:
        detail: the gap.
        name: of its lane.
        labels: of the lanes that ``detail.others`` counts.
        zero: the moment that is called 0.
        where: which batches it lies between.
    """
    gap, text = detail.gap, Text()
    text.append(f"{name}: nothing for {duration(gap.length_ns)}", "bold")
    text.append(f", from {moment(gap.start_ns - zero)}{where and ', '}{where}\n")
    text.append(f"{_shares(detail.by_cause, gap.length_ns)}\n")
    if gap.evidence:
        text.append(f"{clean(gap.evidence)}\n")
    _append_finding(text, detail.finding)
    text.append(f"host thread {detail.thread}\n" if detail.host else "", "bold")
    for line in _host_lines(detail.host, gap.length_ns):
        text.append(line)
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
    """All about an operation that was picked."""
    text = Text()
    length = operation.end_ns - operation.start_ns
    text.append(f"{name}: {duration(length)} of {what}", "bold")
    text.append(f", from {moment(operation.start_ns - zero)}\n")
    text.append(f"{clean(operation.name, 1_000)}\n")
    if operation.bytes >= 0:
        rate = f", {operation.bytes / length:.1f} GB/s" if length else ""
        text.append(f"{operation.bytes:,} bytes{rate}\n")
    if operation.correlation > 0:
        text.append(f"correlation {operation.correlation}\n")
    if launch is None:
        text.append("the trace does not tell which call issued it\n")
    else:
        text.append(launch_line(launch, operation.start_ns))
    return text


def launch_line(launch: Launch, started: int) -> str:
    """Which call issued what started at a moment."""
    before = started - launch.start_ns
    when = f"{duration(before)} before" if before >= 0 else f"{duration(-before)} after"
    return f"- issued by {call_name(launch.name)} {when} it starts (thread {launch.thread})\n"


def call_name(name: str) -> str:
    """Without the version of the interface that it is of."""
    return clean(_VERSION.sub("", name), 80)


def _append_finding(text: Text, finding: Finding | None) -> None:
    if finding is None:
        return
    text.append(f"{finding.id}: ", SEVERITIES[finding.severity])
    text.append(f"{clean(finding.message)}\n")
    if finding.advice:
        text.append("what to do: ", "bold")
        text.append(f"{clean(finding.advice)}\n")


def _host_lines(host: Sequence[HostTime], length: int) -> Iterator[str]:
    for each in host[:_MOST_HOST]:
        count = f" ×{each.count}" if each.count > 1 else ""
        share = format_share(each.ns, length)
        yield f"- {_HOST[each.kind]} {call_name(each.name)}{count} {duration(each.ns)} ({share})\n"
    if len(host) > _MOST_HOST:
        yield f"- and {len(host) - _MOST_HOST} more\n"


def _operation(when: str, operation: Operation | None) -> str:
    if operation is None:
        return f"- {when}: nothing\n"
    size = f", {operation.bytes:,} bytes" if operation.bytes >= 0 else ""
    length = duration(operation.end_ns - operation.start_ns)
    return f"- {when}: {label(operation.name)} ({length}{size})\n"


def _shares(shares: Mapping[str, int], length: int) -> str:
    told = [
        f"{_NAMES.get(name, name).replace('_', ' ')} {format_share(ns, length)}"
        for name, ns in shares.items()
        if ns * 200 >= length
    ]
    return ", ".join(told) or "nothing"
