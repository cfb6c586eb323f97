"""Who holds a GPU's memory: snapshots with planted truth."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import pytest

from gputrace.analyzers.memory_holders import report_memory
from gputrace.model.memory import DeviceMemory
from gputrace.readers.memory_snapshot import read_snapshot
from tests.helpers import memory_snapshots as made
from tests.helpers.memory_snapshots import MIB, Allocator


def analyzed(path: Path) -> DeviceMemory:
    (device,) = report_memory([(str(path), read_snapshot(path))]).devices
    return device


def by_kind(device: DeviceMemory) -> Counter[str]:
    return Counter({row.name: row.held_bytes for row in device.kinds})


@pytest.mark.parametrize("stacks", ["all", "python"])
def test_each_kind_of_tensor_is_found_at_the_peak(stacks: str, tmp_path: Path) -> None:
    allocator = Allocator(stacks)
    made.train(allocator)
    device = analyzed(allocator.write(tmp_path / "s.pickle"))
    assert by_kind(device) == +allocator.peak
    moment, end = device.moments
    assert (moment.moment, moment.allocated_bytes) == ("peak", allocator.peak.total())
    assert end.reserved_bytes == allocator.reserved
    assert end.free_bytes == sum(allocator.holes)
    assert end.largest_free_bytes == max(allocator.holes)
    first = device.lines[0]
    assert (first.name, first.kind) == ("/home/me/model.py:103 forward", "activations")
    assert [row.name for row in device.modules] == ["model"]
    assert device.out_of_memory is None


def test_parameters_of_before_the_history_are_proven_by_their_gradients(tmp_path: Path) -> None:
    """Those of the optimizer have the same sizes, but nothing tells them from other tensors."""
    allocator = Allocator()
    made.train(allocator)
    first = next(n for n, each in enumerate(allocator.events) if each["frames"] == made.LOAD)
    made_again = Allocator()
    made.train(made_again, steps=3)
    device = analyzed(made_again.write(tmp_path / "s.pickle", forget=len(allocator.events)))
    found = by_kind(device)
    assert first
    assert found["parameters"] == sum(made.WEIGHTS)
    assert found["optimizer"] == 0
    assert found["unknown"] == 2 * sum(made.WEIGHTS) + MIB
    assert found["activations"] == made_again.peak["activations"]
    assert "(before the history)" in {row.name for row in device.lines}


def test_a_batch_as_large_as_a_weight_is_not_a_parameter(tmp_path: Path) -> None:
    """The gradients of that size are of weights that are known by where they were made."""
    allocator = Allocator()
    made.train(allocator, refused_in="forward", batch_bytes=made.WEIGHTS[0])
    found = by_kind(analyzed(allocator.write(tmp_path / "s.pickle")))
    assert found["parameters"] == sum(made.WEIGHTS)


def test_a_shortage_names_what_holds_as_much_as_lacks(tmp_path: Path) -> None:
    allocator = Allocator()
    made.train(allocator, steps=2, refused_in="forward")
    device = analyzed(allocator.write(tmp_path / "s.pickle"))
    out = device.out_of_memory
    assert out is not None
    missing = 64 * MIB - MIB - sum(allocator.holes)
    assert (out.cause, out.requested_bytes, out.missing_bytes) == ("shortage", 64 * MIB, missing)
    assert out.line == "/home/me/model.py:103 forward"
    assert by_kind(device)["activations"] == 5 * sum(made.WEIGHTS[:3])
    assert [line.partition(" ")[0] for line in out.advice] == [
        *("a", "checkpointing", "less", "parameters")
    ]
    assert device.moments[0].moment == "out of memory"


def test_tensors_that_modules_hold_before_any_backward_pass_are_activations(tmp_path: Path) -> None:
    allocator = Allocator()
    made.train(allocator, steps=1, refused_in="forward")
    device = analyzed(allocator.write(tmp_path / "s.pickle"))
    assert by_kind(device)["activations"] == 5 * sum(made.WEIGHTS[:3])
    assert by_kind(device)["parameters"] == sum(made.WEIGHTS)


def fragmented() -> Allocator:
    """Eight segments of 20 MiB, of each of which 1 MiB is held; 40 MiB are asked for."""
    allocator, stack, rest = Allocator(), made.forward(0), []
    for _ in range(8):
        rest.append(allocator.alloc(19 * MIB, "temporary", stack))
        allocator.alloc(MIB, "activations", stack)
    allocator.free(*rest)
    allocator.refuse(40 * MIB, MIB, made.forward(1))
    return allocator


@pytest.mark.parametrize(
    ("settings", "cures"),
    [("", 1), ("max_split_size_mb:128", 1), ("expandable_segments:True", 0)],
)
def test_fragmentation_is_told_from_a_shortage(settings: str, cures: int, tmp_path: Path) -> None:
    device = analyzed(fragmented().write(tmp_path / "s.pickle", settings=settings))
    out = device.out_of_memory
    assert out is not None
    assert (out.cause, out.missing_bytes) == ("fragmentation", 0)
    assert sum("expandable_segments:True" in line for line in out.advice) == cures
    assert device.moments[0].largest_free_bytes == 19 * MIB
    assert device.moments[0].free_bytes == 8 * 19 * MIB


def test_what_was_freed_after_a_refusal_counts_as_held_at_it(tmp_path: Path) -> None:
    """A program that catches the error dumps the snapshot when its tensors are gone."""
    allocator = Allocator()
    made.train(allocator, steps=1, refused_in="forward")
    before = analyzed(allocator.write(tmp_path / "a.pickle"))
    held = [
        event["addr"]
        for event in allocator.events
        if event["action"] == "alloc" and event["frames"] == made.forward(2)
    ]
    allocator.free(held[-1])
    after = analyzed(allocator.write(tmp_path / "b.pickle"))
    assert after.moments[0] == before.moments[0]
    assert after.out_of_memory == before.out_of_memory
    assert after.kinds == before.kinds


def test_a_snapshot_without_a_history_is_of_the_end(tmp_path: Path) -> None:
    allocator = Allocator()
    made.train(allocator)
    held = sum(made.WEIGHTS)
    device = analyzed(allocator.write(tmp_path / "s.pickle", forget=len(allocator.events)))
    assert [each.moment for each in device.moments] == ["end"]
    assert device.message == "107 MB are held at the end: unknown 100.0%"
    assert by_kind(device) == {"unknown": 3 * held}


def test_segments_that_grow_are_as_large_as_they_were_then(tmp_path: Path) -> None:
    """Of an expandable segment, 40 MiB are mapped, then 20 more, of which 10 stay free."""
    start, events = 1 << 40, []
    for number, (action, at, size) in enumerate(
        [
            *(
                ("segment_map", 0, 40),
                ("alloc", 0, 15),
                ("alloc", 15, 15),
                ("free_completed", 0, 15),
            ),
            *(("segment_map", 40, 20), ("alloc", 30, 20)),
        ]
    ):
        values = {"addr": start + at * MIB, "size": size * MIB, "time_us": number}
        events.append({"action": action, **values, "frames": made.forward(0)})
    events.append({"action": "oom", "device_free": 0, "size": 20 * MIB, "frames": []})
    blocks = [
        {"address": start + at * MIB, "size": size * MIB, "state": state, "frames": []}
        for at, size, state in (
            *((0, 15, "inactive"), (15, 15, "active_allocated")),
            *((30, 20, "active_allocated"), (50, 10, "inactive")),
        )
    ]
    segment = {"address": start, "total_size": 60 * MIB, "is_expandable": True, "blocks": blocks}
    content = {"segments": [segment], "device_traces": [events]}
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(content))
    moment = analyzed(path).moments[0]
    assert (moment.reserved_bytes, moment.free_bytes) == (60 * MIB, 25 * MIB)
    assert moment.largest_free_bytes == 15 * MIB
    content["device_traces"] = [events[:4] + events[-1:] + events[4:6]]
    path.write_bytes(pickle.dumps(content))
    moment = analyzed(path).moments[0]
    assert (moment.reserved_bytes, moment.free_bytes) == (40 * MIB, 25 * MIB)
    assert moment.largest_free_bytes == 15 * MIB


def test_without_stacks_nothing_is_known_but_the_amounts(tmp_path: Path) -> None:
    allocator = Allocator()
    made.train(allocator)
    for event in allocator.events:
        del event["frames"]
    content = allocator.content()
    for segment in content["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(content))
    assert by_kind(analyzed(path)) == {"unknown": allocator.peak.total()}
