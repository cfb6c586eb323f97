"""Names of kernels and ranges, wherever an nsys export keeps them."""

from __future__ import annotations

import numpy as np
import pytest

from gputrace.model.events import Kind
from tests.helpers.exports import (
    KERNEL,
    MARK,
    NVTX,
    PUSH_POP_RANGE,
    Export,
    Opened,
    Value,
    global_id,
)
from tests.helpers.memory_traces import rows


@pytest.mark.parametrize("column", ["demangledName", "shortName", "mangledName"])
def test_a_kernel_has_the_best_name_there_is(column: str, opened: Opened) -> None:
    export = Export()
    others = {"demangledName", "shortName"} - {column}
    export.add(KERNEL, start=0, end=10, **{column: export.string("gemm")}).strip(KERNEL, *others)
    if column == "mangledName":
        export.give(KERNEL, column)
    trace = opened(export)
    names = trace.events([Kind.KERNEL], ["name"]).name
    assert list(trace.names(names).values()) == ["gemm"]


def test_a_name_that_the_file_lacks_shows_its_number(opened: Opened) -> None:
    trace = opened(Export().kernel(0, 10).kernel(10, 20, demangledName=17))
    names = trace.names(trace.events([Kind.KERNEL], ["name"]).name)
    assert sorted(names.values()) == ["<name 17>", "gemm"]


def test_an_export_without_strings_is_read(opened: Opened) -> None:
    export = Export().kernel(0, 10, demangledName=17)
    del export.rows["StringIds"]
    assert opened(export).names([17]) == {17: "<name 17>"}


def test_a_name_that_is_not_utf_8_keeps_what_can_be_read(opened: Opened) -> None:
    trace = opened(Export().kernel(0, 10, b"gemm_\xff_fast"))
    names = trace.names(trace.events([Kind.KERNEL], ["name"]).name)
    assert list(names.values()) == ["gemm_�_fast"]


def test_nvtx_texts_are_found_in_the_row_or_among_the_strings(opened: Opened) -> None:
    export = Export().kernel(0, 10)
    thread = global_id(100, thread=100)
    export.add(NVTX, start=0, end=9, eventType=PUSH_POP_RANGE, globalTid=thread, text="step 1")
    step = export.string("step 2")
    export.add(NVTX, start=10, end=19, eventType=PUSH_POP_RANGE, globalTid=thread, textId=step)
    export.add(NVTX, start=20, end=None, eventType=MARK, globalTid=thread, text="end")
    export.add(NVTX, start=0, end=None, eventType=75, globalTid=thread, text="NCCL")  # a domain
    trace = opened(export)
    events = trace.events([Kind.RANGE, Kind.MARK], ["start", "end", "kind", "name"])
    names = trace.names(events.name)
    assert [(*row[:3], names[row[3]]) for row in rows(events)] == [
        (0, 9, Kind.RANGE, "step 1"),
        (10, 19, Kind.RANGE, "step 2"),
        (20, 20, Kind.MARK, "end"),
    ]
    marks = trace.events([Kind.MARK], ["start"])
    assert rows(marks) == [(20,)]


def test_equal_nvtx_texts_have_one_name_id_among_any_number_of_others(opened: Opened) -> None:
    """Names are so many that Arrow needs several batches and threads for them."""
    export = Export().kernel(0, 10)
    for row in range(140_000):
        export.add(
            NVTX,
            start=row,
            end=row + 1,
            eventType=PUSH_POP_RANGE,
            globalTid=global_id(100, thread=100),
            text="forward" if row % 2 else f"seq = {row}",
        )
    trace = opened(export)
    events = trace.events([Kind.RANGE], ["start", "name"])
    ids = dict(zip(events.start.tolist(), events.name.tolist(), strict=True))
    assert len(set(ids.values())) == 70_001
    assert trace.names([ids[1], ids[139_999]]) == {ids[1]: "forward"}
    chosen = [0, 70_000, 139_998]
    assert [trace.names([ids[row]])[ids[row]] for row in chosen] == [f"seq = {r}" for r in chosen]
    assert trace.search(events.name, "ward") == {ids[1]: "forward"}


def test_names_are_searched_wherever_they_are_kept(opened: Opened) -> None:
    export = Export().kernel(0, 10, "gemm step")
    thread = global_id(100, thread=100)
    texts: list[str | bytes] = ["step 1", "step 22", "idle", "", "st\u00e9p 3", b"step \xff"]
    for start, text in enumerate(texts):
        values: dict[str, Value] = {"eventType": PUSH_POP_RANGE, "globalTid": thread, "text": text}
        export.add(NVTX, start=start, end=start + 1, **values)
    registered = export.string("step 4")
    export.add(NVTX, start=9, end=9, eventType=PUSH_POP_RANGE, globalTid=thread, textId=registered)
    trace = opened(export)
    names = [*trace.events([Kind.KERNEL, Kind.RANGE], ["name"]).name.tolist(), 17]
    found = trace.search(names, r"step|<name")
    assert sorted(found.values()) == [
        "<name 17>",
        "gemm step",
        "step 1",
        "step 22",
        "step 4",
        "step \ufffd",
    ]
    assert trace.search([], "step") == {}
    assert trace.search(names, "nothing") == {}
    matching = np.array(names)[trace.matches(np.array(names), r"step|<name")]
    assert set(matching.tolist()) == found.keys()


def test_a_range_without_any_text_is_of_unknown_name(opened: Opened) -> None:
    export = Export().kernel(0, 10)
    for start, text in enumerate(["step", None]):
        thread = global_id(100, thread=100)
        values = {"eventType": PUSH_POP_RANGE, "globalTid": thread, "text": text}
        export.add(NVTX, start=start, end=start + 1, **values)
    trace = opened(export)
    events = trace.events([Kind.RANGE], ["start", "name"])
    assert [trace.names([name])[name] for _, name in rows(events)] == ["step", "<name -1>"]
