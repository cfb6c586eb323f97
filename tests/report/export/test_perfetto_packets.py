"""Files of `gputrace export --to perfetto -o NAME.pftrace` hold the slices of the JSON's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import gputrace
from gputrace.readers.protobuf import BYTES, Wire
from tests.report.export.test_perfetto import validated
from tests.synthetic import Plan, simulate, write_kineto, write_nsys

Slice = tuple[str, str, int, int, str, tuple[tuple[str, str], ...]]
"""Process, track, start, end, name, arguments."""


class Message:
    """A message of protocol buffers: its fields by number, in order."""

    def __init__(self, wire: Wire, start: int, end: int) -> None:
        self.wire = wire
        self.fields: dict[int, list[Any]] = defaultdict(list)
        for field in wire.fields(start, end):
            value = (field.value, field.end) if field.wire == BYTES else field.value
            self.fields[field.number].append(value)

    def number(self, field: int) -> int:
        return int(self.fields[field][0])

    def text(self, field: int) -> str:
        return self.wire.text(*self.fields[field][0])

    def messages(self, field: int) -> Iterator[Message]:
        return (Message(self.wire, *place) for place in self.fields[field])


def slices_of(path: Path) -> Counter[Slice]:
    """The slices of a file whose packets keep the rules that Perfetto needs kept."""
    data = bytearray(path.read_bytes())
    size = len(data)
    file = Message(Wire(data), 0, size)
    names: dict[int, dict[int, str]] = {2: {}, 3: {}}
    tracks: dict[int, tuple[str, str]] = {}
    running: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    latest: dict[int, int] = defaultdict(int)
    slices = Counter[Slice]()
    for number, packet in enumerate(file.messages(1)):
        assert packet.number(10) == 1
        assert packet.fields[13] == [1] if number == 0 else packet.fields[13] in ([], [2])
        for interned in packet.messages(12):
            for kind, known in names.items():
                for entry in interned.messages(kind):
                    assert entry.number(1) not in known
                    known[entry.number(1)] = entry.text(2)
        for track in packet.messages(60):
            parent = track.fields[5]
            assert track.number(1) not in tracks
            process = tracks[parent[0]][0] if parent else track.text(2)
            tracks[track.number(1)] = process, track.text(2)
        for event in packet.messages(11):
            id, time = event.number(11), packet.number(8)
            assert time >= latest[id]
            latest[id] = time
            if event.number(9) == 1:
                running[id].append((time, names[2][event.number(10)], arguments(event, names[3])))
            else:
                start, name, about = running[id].pop()
                slices[(*tracks[id], start, time, name, about)] += 1
    assert not any(running.values())
    return slices


def arguments(event: Message, names: dict[int, str]) -> tuple[tuple[str, str], ...]:
    found = []
    for each in event.messages(4):
        value = each.text(6) if each.fields[6] else str(each.number(4))
        found.append((names[each.number(1)], value))
    return tuple(found)


def slices_of_json(path: Path) -> Counter[Slice]:
    events = validated(path)
    about = {
        (event["pid"], event["tid"], event["name"]): event["args"]
        for event in events
        if event["ph"] == "M"
    }
    slices = Counter[Slice]()
    for event in events:
        if event["ph"] == "X":
            start, length = (round(Decimal(event[key]) * 1000) for key in ("ts", "dur"))
            process = about[event["pid"], 0, "process_name"]["name"]
            track = about[event["pid"], event["tid"], "thread_name"]["name"]
            given = event.get("args", {}).items()
            values = tuple((key, str(value)) for key, value in given)
            slices[process, track, start, start + length, event["name"], values] += 1
    return slices


@pytest.mark.parametrize("form", ["one file", "a file a rank"])
def test_the_packets_hold_the_slices_of_the_json(tmp_path: Path, form: str) -> None:
    recording = simulate(Plan(steps=6, ranks=2, kernels_per_step=30))
    paths = [tmp_path / "run.sqlite"]
    if form == "one file":
        write_nsys(recording, paths[0])
    else:
        paths = write_kineto(recording, tmp_path)
    with gputrace.open(*paths) as trace:
        trace.export("perfetto", tmp_path / "x.json")
        trace.export("perfetto", tmp_path / "x.pftrace")
    found = slices_of(tmp_path / "x.pftrace")
    assert found == slices_of_json(tmp_path / "x.json")
    assert len({process for process, *_ in found if process.startswith(("GPU", "device"))}) == 2
    assert sum(found.values()) > 100
