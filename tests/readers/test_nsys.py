"""nsys exports become the event columns of gputrace/model/events.py."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import gputrace
from gputrace.model.events import COLUMN_TYPES, UNKNOWN, Kind, Memory
from gputrace.model.options import Window
from gputrace.readers.registry import open_trace
from tests.helpers.exports import D2D, D2H, DEVICE, H2D, PAGEABLE, PEER, Export, Opened, global_id
from tests.helpers.memory_traces import rows


@pytest.mark.parametrize(
    ("written", "memory"),
    [
        (0, Memory.PAGEABLE),
        (1, Memory.PINNED),
        (2, Memory.DEVICE),
        (3, Memory.ARRAY),
        (4, Memory.MANAGED),
        (5, Memory.DEVICE_STATIC),
        (6, Memory.MANAGED_STATIC),
        (7, Memory.UNKNOWN),
        (99, Memory.UNKNOWN),
        (-3, Memory.UNKNOWN),
        (None, Memory.UNKNOWN),
    ],
)
def test_memory_kinds_count_from_pageable(
    written: int | None, memory: Memory, opened: Opened
) -> None:
    trace = opened(Export().copy(0, 10, srcKind=written, dstKind=DEVICE))
    events = trace.events([Kind.COPY_H2D], ["source_memory", "destination_memory"])
    assert rows(events) == [(memory, Memory.DEVICE)]


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        (H2D, Kind.COPY_H2D),
        (D2H, Kind.COPY_D2H),
        (3, Kind.COPY_H2D),  # host to array
        (4, Kind.COPY_D2H),  # array to host
        (5, Kind.COPY_D2D),  # among arrays and device memory
        (6, Kind.COPY_D2D),
        (7, Kind.COPY_D2D),
        (D2D, Kind.COPY_D2D),
        (9, Kind.COPY_OTHER),  # host to host
        (PEER, Kind.COPY_PEER),
        (11, Kind.COPY_H2D),  # unified memory
        (12, Kind.COPY_D2H),
        (13, Kind.COPY_D2D),
        (0, Kind.COPY_OTHER),
        (99, Kind.COPY_OTHER),
        (None, Kind.COPY_OTHER),
    ],
)
def test_copy_kinds_tell_the_direction(written: int | None, kind: Kind, opened: Opened) -> None:
    trace = opened(Export().copy(0, 10, copyKind=written))
    assert rows(trace.events(Kind, ["start", "kind"])) == [(0, kind)]


def test_a_copy_between_two_devices_is_a_peer_copy_whatever_it_is_called(opened: Opened) -> None:
    trace = opened(
        Export()
        .copy(0, 10, D2D, srcDeviceId=0, dstDeviceId=1)
        .copy(20, 30, D2D, srcDeviceId=1, dstDeviceId=1)
        .copy(40, 50, D2D, srcDeviceId=None, dstDeviceId=None)
    )
    assert rows(trace.events(Kind, ["start", "kind"])) == [
        (0, Kind.COPY_PEER),
        (20, Kind.COPY_D2D),
        (40, Kind.COPY_D2D),
    ]


@pytest.mark.parametrize("kind", [PEER, D2D])
@pytest.mark.parametrize("device", [0, 1])
def test_a_peer_copy_occupies_both_its_gpus(kind: int, device: int, tmp_path: Path) -> None:
    export = Export().kernel(0, 10, deviceId=0).kernel(0, 10, deviceId=1)
    export.copy(20, 25, kind, deviceId=device, srcDeviceId=0, dstDeviceId=1)
    with gputrace.open(export.write(tmp_path / "trace.sqlite")) as trace:
        gpus = trace.analyze().gpus
    assert [(gpu.gpu, gpu.communication_ns, gpu.copies) for gpu in gpus] == [(0, 5, 1), (1, 5, 1)]


def test_a_gpu_that_only_receives_peer_copies_is_there(tmp_path: Path) -> None:
    export = Export().kernel(0, 10).copy(10, 15, PEER, srcDeviceId=0, dstDeviceId=3)
    with gputrace.open(export.write(tmp_path / "trace.sqlite")) as trace:
        gpus = trace.analyze().gpus
    assert [(gpu.gpu, gpu.span_ns, gpu.communication_ns) for gpu in gpus] == [(0, 15, 5), (3, 5, 5)]


def test_equal_correlation_ids_of_two_processes_are_told_apart(opened: Opened) -> None:
    export = Export().kernel(10, 20, pid=7, correlationId=1).kernel(30, 40, pid=8, correlationId=1)
    export.call(0, 5, "cudaLaunchKernel", pid=7, correlation=1)
    export.call(20, 25, "cudaLaunchKernel", pid=8, correlation=1)
    trace = opened(export)
    columns = ["start", "process", "correlation"]
    kernels = rows(trace.events([Kind.KERNEL], columns))
    calls = rows(trace.events([Kind.API], columns))
    assert [trace.processes[process].pid for _, process, _ in kernels] == [7, 8]
    assert [row[1:] for row in kernels] == [row[1:] for row in calls]


def test_processes_of_two_machines_may_share_a_pid(opened: Opened) -> None:
    export = Export()
    for host in (1, 2):
        export.kernel(host, 10, globalPid=global_id(7, host=host))
    trace = opened(export)
    trace.events([Kind.KERNEL], ["process"])
    assert [(process.host, process.pid) for process in trace.processes] == [(1, 7), (2, 7)]


def test_a_graph_recorded_as_a_whole_is_busy_time(tmp_path: Path) -> None:
    export = Export().graph(0, 70).copy(70, 100)
    with gputrace.open(export.write(tmp_path / "trace.sqlite")) as trace:
        (gpu,) = trace.analyze().gpus
    assert (gpu.kernels, gpu.copies, gpu.compute_ns, gpu.h2d_ns) == (0, 1, 70, 30)


def test_threads_lose_the_bits_of_their_process(opened: Opened) -> None:
    trace = opened(Export().kernel(0, 10).call(0, 1, "cudaMalloc_v3020", pid=4321))
    events = trace.events([Kind.API], ["thread", "name"])
    assert events.thread.tolist() == [4321]
    assert list(trace.names(events.name).values()) == ["cudaMalloc_v3020"]


def test_what_is_null_is_unknown(opened: Opened) -> None:
    trace = opened(Export().kernel(0, 10, correlationId=None, streamId=None, demangledName=None))
    events = trace.events([Kind.KERNEL], ["stream", "correlation", "name"])
    assert rows(events) == [(UNKNOWN, UNKNOWN, UNKNOWN)]


def test_only_the_columns_asked_for_are_there(opened: Opened) -> None:
    trace = opened(Export().kernel(0, 10))
    for name in COLUMN_TYPES:
        events = trace.events([Kind.KERNEL], [name])
        assert events.columns == (name,)
        assert getattr(events, name).dtype == COLUMN_TYPES[name]
    with pytest.raises(LookupError, match="was not asked for"):
        _ = events.start


def test_columns_that_nobody_asks_for_are_not_read(tmp_path: Path) -> None:
    path = Export().kernel(0, 10, streamId="seven").write(tmp_path / "trace.sqlite")
    statements: list[str] = []
    with open_trace(path) as trace:
        database = trace._database._connection  # type: ignore[attr-defined]
        database.set_trace_callback(statements.append)
        assert rows(trace.events([Kind.KERNEL], ["start", "end"])) == [(0, 10)]
    assert not any("streamId" in statement for statement in statements)


def test_a_window_gives_the_rows_that_touch_it_whole(opened: Opened) -> None:
    export = Export().kernel(0, 10).kernel(10, 20).kernel(15, 40).kernel(30, 35).kernel(50, 60)
    events = opened(export).events([Kind.KERNEL], ["start", "end"], Window(20, 50))
    assert {(15, 40), (30, 35)} <= set(rows(events)) <= {(10, 20), (15, 40), (30, 35)}


MS, US = 1_000_000, 1_000
BEGIN = 10**9


def _loop(skews: tuple[int, ...], queue: int = 0) -> Export:
    """Twenty kernels and copies to the host on each GPU, whose clock is ahead by so much; the
    kernels wait in a queue.
    """
    export = Export()
    for number in range(20):
        at = BEGIN + number * 10 * MS
        for device, skew in enumerate(skews):
            id, moved = 100 * number + 2 * device + 1, at + skew
            on_gpu: dict[str, Any] = {"deviceId": device, "correlationId": id}
            export.call(at - queue, at - queue + 5 * US, "cudaLaunchKernel", correlation=id)
            export.kernel(moved + 20 * US, moved + 100 * US, **on_gpu)
            export.call(at + 10 * US, at + 200 * US, "cudaMemcpyAsync", correlation=id + 1)
            on_gpu["correlationId"] = id + 1
            export.copy(moved + 150 * US, moved + 190 * US, D2H, dstKind=PAGEABLE, **on_gpu)
    return export


@pytest.mark.parametrize("source", ["nsys", "gputrace"])
@pytest.mark.parametrize("skew", [325 * MS, -156 * MS])
def test_a_gpu_whose_clock_is_wrong_is_moved_and_told(
    skew: int, source: str, opened: Opened, tmp_path: Path
) -> None:
    """Of an export, and of one that `record --backend nsys` has added ranks to."""
    export = _loop((skew,))
    if source == "gputrace":
        export.give("GPUTRACE_META", "name", "value")
        export.add("GPUTRACE_META", name="nsys", value="2021.3.1")
    trace = opened(export)
    assert trace.source == source
    told = f"clock was {abs(skew) // MS} ms {'ahead of' if skew > 0 else 'behind'} its host's"
    assert any(told in note for note in trace.quality.notes)
    launches = trace.events([Kind.API], ["start"]).start[::2]
    kernels = trace.events([Kind.KERNEL], ["start", "end"])
    assert ((kernels.start >= launches) & (kernels.start <= launches + 30 * US)).all()
    assert (kernels.end - kernels.start == 80 * US).all()
    for until, count in (75, 3), (55, 1):
        window = Window(BEGIN + 45 * MS, BEGIN + until * MS)
        kernels = trace.events([Kind.KERNEL], ["start"], window)
        assert len(kernels) == count
        cut = tmp_path / f"{count}.sqlite"
        with gputrace.open(trace.path) as whole:
            whole.export("trace", cut, time=f"1045ms:{1000 + until}ms")
        with closing(open_trace(cut)) as part:
            assert rows(part.events([Kind.KERNEL], ["start"], window)) == rows(kernels)
            assert [note for note in part.quality.notes if told in note]


def test_the_clock_of_our_own_recorder_is_right(opened: Opened) -> None:
    export = _loop((325 * MS,)).give("GPUTRACE_META", "name", "value")
    trace = opened(export.add("GPUTRACE_META", name="backend", value="cupti"))
    assert trace.source == "gputrace"
    assert not any("shifted" in note for note in trace.quality.notes)


@pytest.mark.parametrize("skew", [325 * MS, -156 * MS])
def test_a_gpu_that_waits_in_a_queue_or_for_no_copy_is_moved_with_the_others(
    skew: int, opened: Opened
) -> None:
    export = _loop((skew,))
    for number in range(20):
        at, id = BEGIN + number * 10 * MS, 5000 + number
        export.call(at, at + 5 * US, "cudaLaunchKernel", correlation=id)
        begin = at + skew + 5 * MS
        export.kernel(begin, begin + MS, deviceId=1, correlationId=id)
    trace = opened(export)
    assert any("shifted" in note for note in trace.quality.notes)
    kernels = trace.events([Kind.KERNEL], ["start", "device"])
    assert kernels.start[kernels.device == 1].tolist() == pytest.approx(
        [BEGIN + number * 10 * MS + 5 * MS for number in range(20)], abs=MS
    )


def test_a_few_wrong_times_do_not_move_what_copies_show_to_be_right(opened: Opened) -> None:
    export = _loop((0,))
    for number in range(5):
        at = BEGIN + number * 10 * MS
        export.call(at, at + 5 * US, "cudaLaunchKernel", correlation=5000 + number)
        export.kernel(at - 300 * MS, at - 299 * MS, correlationId=5000 + number)
    trace = opened(export)
    assert not any("shifted" in note for note in trace.quality.notes)


@pytest.mark.parametrize(
    ("skews", "queue"),
    [
        *[((0,), 0), ((0,), 300 * MS), ((0, 325 * MS), 0), ((-156 * MS, 0), 0)],
        *[((3 << 60,), 0), ((-156 * MS, 325 * MS), 0)],
    ],
)
def test_a_clock_that_is_right_or_not_that_of_all_gpus_is_left_alone(
    skews: tuple[int, ...], queue: int, opened: Opened
) -> None:
    trace = opened(_loop(skews, queue))
    assert not any("shifted" in note for note in trace.quality.notes)
    assert trace.events([Kind.KERNEL], ["start"]).start[0] == BEGIN + 20 * US + skews[0]


def test_only_the_kinds_asked_for_are_there(opened: Opened) -> None:
    trace = opened(Export().kernel(0, 10).copy(10, 20, H2D).copy(20, 30, D2H).memset(30, 40))
    assert rows(trace.events([Kind.COPY_D2H], ["start"])) == [(20,)]
    assert rows(trace.events([Kind.COPY_H2D, Kind.MEMSET], ["start"])) == [(10,), (30,)]
    assert rows(trace.events([Kind.OS_RUNTIME], ["start"])) == []


@pytest.mark.parametrize("name", ["nsys-ai-mfu_2gpu_before.sqlite", "pipit-cloverleaf.sqlite"])
def test_the_order_of_rows_means_nothing(
    name: str, recording: Callable[[str], Path], tmp_path: Path
) -> None:
    shuffled = tmp_path / name
    shuffled.write_bytes(recording(name).read_bytes())
    with closing(sqlite3.connect(shuffled)) as database, database:
        tables = database.execute("SELECT name FROM sqlite_master WHERE name GLOB 'CUPTI*'")
        for (table,) in tables.fetchall():
            order = f"SELECT * FROM {table} ORDER BY rowid * 7919 % 10007"
            database.execute(f"CREATE TABLE shuffled AS {order}")
            database.execute(f"DROP TABLE {table}")
            database.execute(f"ALTER TABLE shuffled RENAME TO {table}")
    assert _analysis(shuffled) == _analysis(recording(name))


def _analysis(path: Path) -> dict[str, Any]:
    with gputrace.open(path) as trace:
        found: dict[str, Any] = json.loads(trace.analyze().render("json"))
    del found["path"], found["paths"]
    return found
