"""Traces that a reader has taken in whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gputrace.errors import InputError
from gputrace.model.events import UNKNOWN, Events, Kind
from gputrace.model.options import Window
from gputrace.model.trace import Device, Process
from gputrace.readers.in_memory import MemoryTrace, Names

PATH = Path("made up")


def made(*rows: tuple[int, int, Kind], **more: list[int]) -> Events:
    start, end, kind = (np.array(column) for column in zip(*rows, strict=True))
    return Events(
        {"start": start, "end": end, "kind": kind} | {k: np.array(v) for k, v in more.items()}
    )


def trace(*parts: Events) -> MemoryTrace:
    names, device = ["gemm", "step"], Device(0, 1, 5, "H200")
    return MemoryTrace(PATH, "kineto", parts, names, [Process(7, rank=3)], [device])


KERNELS = made((10, 20, Kind.KERNEL), (30, 40, Kind.MEMSET), name=[0, 1], device=[1, 1])
STEPS = made((0, 50, Kind.STEP), name=[1])


def test_rows_come_by_kind_from_all_parts() -> None:
    found = trace(KERNELS, STEPS).events([Kind.MEMSET, Kind.STEP], ["start", "name"])
    assert sorted(zip(found.start.tolist(), found.name.tolist(), strict=True)) == [(0, 1), (30, 1)]


def test_columns_that_a_part_lacks_are_unknown_and_its_process_is_the_first() -> None:
    found = trace(KERNELS, STEPS).events([Kind.STEP], ["process", "stream", "rank"])
    assert (found.process[0], found.stream[0], found.rank[0]) == (0, UNKNOWN, 3)


def test_a_window_takes_what_touches_it_whole() -> None:
    found = trace(KERNELS).events([Kind.KERNEL, Kind.MEMSET], ["start", "end"], Window(20, 31))
    assert (found.start.tolist(), found.end.tolist()) == ([30], [40])


def test_names_and_devices_are_those_told_and_others_are_said_to_be_unknown() -> None:
    opened = trace(KERNELS)
    assert opened.names([0, 1, 9]) == {0: "gemm", 1: "step", 9: "<name 9>"}
    assert (opened.device(0, 1).gpu, opened.device(0, 2).gpu) == (5, UNKNOWN)
    assert opened.events([Kind.KERNEL], ["gpu"]).gpu.tolist() == [5]


def test_times_that_make_no_sense_are_counted_and_left_out() -> None:
    opened = trace(made((10, 20, Kind.KERNEL), (30, 5, Kind.KERNEL)))
    assert opened.events([Kind.KERNEL], ["start"]).start.tolist() == [10]
    assert sum(opened.quality.dropped.values()) == 1


def test_without_gpu_activity_it_says_so() -> None:
    with pytest.raises(InputError, match="no GPU activity in this kineto trace"):
        trace(STEPS)


def test_halves_of_letters_are_replaced_so_that_all_can_be_written() -> None:
    opened = MemoryTrace(PATH, "kineto", [KERNELS], ["a\ud800b", "c"], [Process(7)])
    assert opened.names([0, 1]) == {0: "a?b", 1: "c"}


def test_equal_texts_share_a_number() -> None:
    names = Names()
    assert [names.number(text) for text in ("a", "b", "a")] == [0, 1, 0]
    assert names.texts == ["a", "b"]
