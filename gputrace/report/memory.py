"""Report of who holds a GPU's memory, for every format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from gputrace.model.memory import DeviceMemory, Holder, MemoryReport
from gputrace.model.struct import UNKNOWN, Column
from gputrace.report import (
    Document,
    Limits,
    Line,
    Records,
    Table,
    attributes,
    declared,
    present,
)
from gputrace.report.wording import cut_middle


def document(result: MemoryReport, limits: Limits) -> Document:
    """Return for each GPU the answer, its memory, and who holds it."""
    out = [device.out_of_memory for device in result.devices]
    advice = (Line(text, name="What to do") for each in out if each for text in each.advice)
    return Document(
        head=tuple(
            Line(f"{_name(each, result.devices)}: {each.message}.") for each in result.devices
        ),
        tables=memory_tables(result.devices, limits),
        findings=tuple(advice),
    )


def memory_tables(devices: Sequence[DeviceMemory], limits: Limits) -> tuple[Table, ...]:
    """Tabulate who holds the memory of each GPU, by kind, line and module, and how full it is."""
    return present(table for each in devices for table in _tables(each, devices, limits))


def _name(device: DeviceMemory, devices: Sequence[DeviceMemory]) -> str:
    paths = {each.path for each in devices}
    return f"GPU {device.device}" + (f" of {Path(device.path).name}" if len(paths) > 1 else "")


def _tables(
    device: DeviceMemory, devices: Sequence[DeviceMemory], limits: Limits
) -> Iterator[Table]:
    name, moment = _name(device, devices), device.moments[0].moment
    at = "when memory ran out" if device.out_of_memory else f"at the {moment}"
    longest = max((limits.width or 100) - 45, 24)

    def label(row: Holder) -> str:
        return cut_middle("/".join(row.name.split("/")[-2:]), longest) or UNKNOWN

    kind = Column("kind", "kind")
    yield declared(f"{name}: who holds the memory {at}", device.kinds, Column("", label))
    yield declared(f"{name}: lines that allocated it", device.lines, Column("", label), kind)
    yield declared(f"{name}: modules that allocated it", device.modules, Column("", label), kind)
    yield declared(f"{name}: how full its segments are", device.moments)


def records(result: MemoryReport) -> Records:
    """Return a row for each kind, line and module."""
    names = ("name", "kind", "held_bytes", "blocks", "share")
    rows = (
        (device.path, device.device, by, *row)
        for device in result.devices
        for by, holders in (
            ("kind", device.kinds),
            ("line", device.lines),
            ("module", device.modules),
        )
        for row in attributes(holders, names)
    )
    return ("path", "device", "by", "name", "kind", "held_bytes", "blocks", "share"), rows
