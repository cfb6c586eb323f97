"""Inputs that fuzzing found (docs/fuzzing.md), each as small as it could be made."""

from __future__ import annotations

import ctypes.util
import sqlite3
from contextlib import closing, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import gputrace
from gputrace.analyzers import neighbours
from gputrace.analyzers.timeline_model import Scene
from gputrace.collectors.finalize import merge
from gputrace.collectors.spool import CHUNK, HEADER
from gputrace.collectors.spool.activity import SPOOL, read_spool, windows_of
from gputrace.collectors.spool.host_events import CLOCKS
from gputrace.errors import GputraceError, InputError, MissingError, UsageError
from gputrace.model import names
from gputrace.model.trace import Trace
from gputrace.store.cache import Kept, load_columns
from gputrace.store.sqlite_reader import Database as TraceDatabase
from gputrace.studies.database import Database
from gputrace.studies.measures import read_results
from gputrace.studies.plan import read_study
from tests.fuzz.others import results
from tests.helpers import kineto
from tests.helpers.exports import KERNEL, NVTX, Export, global_id
from tests.helpers.nvprof import EPOCH, Nvvp

ESCAPES: Final = "\x1b]0;title\x07\x9b31m"


def compute_ns(path: Path) -> int:
    with gputrace.open(path) as trace:
        (gpu,) = trace.analyze().gpus
    return int(gpu.compute_ns)


def change(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as database, database:
        for sql in statements:
            database.execute(sql)
    return path


@pytest.fixture
def export() -> Export:
    return Export().kernel(0, 40).kernel(60, 100)


@pytest.mark.parametrize("kind", [GputraceError, UsageError, MissingError])
def test_an_error_has_no_control_characters(kind: type[GputraceError]) -> None:
    assert str(kind(f"a\nb{ESCAPES}")) == "a b\ufffd]0;title\ufffd\ufffd31m"
    assert str(InputError("trace", f"no {ESCAPES}")) == "trace: no \ufffd]0;title\ufffd\ufffd31m"


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_what_a_trace_says_of_itself_makes_no_terminal_do_things(
    form: str, export: Export, tmp_path: Path
) -> None:
    path = export.write(tmp_path / "trace.sqlite")
    with gputrace.open(path) as trace:
        report = replace(trace.analyze(), warnings=(f"lost{ESCAPES}",))
    text = report.render(form)
    assert "lost\ufffd" in text
    assert not set(ESCAPES) & {c for c in text if not c.isprintable() and c != "\n"}


@pytest.mark.parametrize("value", ["three", b"\0\xff", 1.5])
@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("TARGET_INFO_GPU", "id"),
        ("TARGET_INFO_CUDA_DEVICE", "gpuId"),
        ("TARGET_INFO_CUDA_DEVICE", "cudaId"),
        ("TARGET_INFO_CUDA_DEVICE", "pid"),
    ],
)
def test_a_card_whose_number_is_none_is_not_known(
    table: str, column: str, value: Any, export: Export, tmp_path: Path
) -> None:
    export.card(0, "0000:06:00.0").ordinal(100, 0, 0)
    export.rows[table][0][column] = value
    assert compute_ns(export.write(tmp_path / "trace.sqlite")) == 80


def test_a_long_number_among_the_visible_devices_is_none(export: Export, tmp_path: Path) -> None:
    export.add("META_DATA_CAPTURE", name="CUDA_VISIBLE_DEVICES", value="9" * 5000)
    assert compute_ns(export.write(tmp_path / "trace.sqlite")) == 80


@pytest.mark.parametrize("value", [b"x", "text", 5])
def test_a_column_called_rowid_is_a_column(value: Any, export: Export, tmp_path: Path) -> None:
    export.give(KERNEL, "rowid")
    for row in export.rows[KERNEL]:
        row["rowid"] = value
    assert compute_ns(export.write(tmp_path / "trace.sqlite")) == 80


@pytest.mark.parametrize("value", ["text", 7, None])
def test_texts_of_a_table_with_a_column_called_rowid(
    value: Any, export: Export, tmp_path: Path
) -> None:
    export.give(NVTX, "rowid").add(NVTX, start=1, end=5, eventType=59, text="a", rowid=value)
    path = export.write(tmp_path / "trace.sqlite")
    if value == 7:
        assert compute_ns(path) == 80
    else:
        with suppress(InputError):
            assert compute_ns(path) == 80


def test_a_name_far_below_nothing_is_no_text_of_an_nvtx_row(export: Export, tmp_path: Path) -> None:
    table = "CUPTI_ACTIVITY_KIND_OVERHEAD"
    export.give(table, "start", "end", "globalTid", "nameId")
    export.add(table, start=41, end=50, globalTid=global_id(100, thread=100), nameId=-146)
    assert compute_ns(export.write(tmp_path / "trace.sqlite")) == 80


def test_a_table_whose_name_is_no_text_is_none(export: Export, tmp_path: Path) -> None:
    blob = "UPDATE sqlite_master SET name = CAST(name AS BLOB) WHERE name = 'MORE'"
    path = change(export.write(tmp_path / "trace.sqlite"), "CREATE TABLE MORE (x INT)")
    change(path, "PRAGMA writable_schema = ON", blob)
    assert compute_ns(path) == 80


def test_rows_that_are_not_in_their_order_are_read(export: Export, tmp_path: Path) -> None:
    """The first row of the table's page is made the 100th; SQLite finds the second one last."""
    path = export.write(tmp_path / "trace.sqlite")
    with closing(sqlite3.connect(path)) as database:
        (size,) = database.execute("PRAGMA page_size").fetchone()
        sql = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (page,) = database.execute(sql, (KERNEL,)).fetchone()
    raw, start = bytearray(path.read_bytes()), (page - 1) * size
    cell = start + int.from_bytes(raw[start + 8 : start + 10], "big")
    assert raw[cell + 1] == 1
    raw[cell + 1] = 100
    path.write_bytes(raw)
    with closing(TraceDatabase(path)) as trace:
        assert trace.row_bounds(KERNEL) is None
    assert compute_ns(path) == 80


@pytest.mark.parametrize("device", [1 << 31, 65538, -1, "one"])
def test_a_context_of_nvprof_on_no_device_is_on_none(device: Any, tmp_path: Path) -> None:
    file = Nvvp(tmp_path / "train.nvvp")
    file.call(10, 20)
    file.kernel(30, 70)
    file.row("CONTEXT", contextId=1, deviceId=device)
    file.row("SYNCHRONIZATION", start=40, end=80, contextId=1)
    assert compute_ns(file.save()) == 40


@pytest.mark.parametrize("start", [(1 << 63) - 100 - EPOCH, (1 << 62) - EPOCH])
def test_times_that_no_clock_shows_move_no_others(start: int, tmp_path: Path) -> None:
    file = Nvvp(tmp_path / "train.nvvp")
    file.call(10, 20)
    file.kernel(30, 70)
    file.call(80, 90)
    file.kernel(start, start + 50)
    assert compute_ns(file.save()) == 40


@pytest.mark.filterwarnings("error")
def test_rows_of_nvprof_may_have_any_number(tmp_path: Path) -> None:
    file = Nvvp(tmp_path / "train.nvvp")
    file.call(10, 20)
    file.kernel(30, 50)
    file.kernel(60, 80)
    number = (
        f"UPDATE CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL SET _id_ = {{}} WHERE end {{}} {EPOCH + 50}"
    )
    path = change(file.save(), number.format(-(1 << 63), "<="), number.format((1 << 63) - 1, ">"))
    assert compute_ns(path) == 40


def test_what_sqlite_says_of_a_column_of_nvprof_need_not_be_utf_8(tmp_path: Path) -> None:
    file = Nvvp(tmp_path / "train.nvvp")
    file.call(10, 20)
    file.kernel(30, 70)
    column = "ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME ADD COLUMN odd! AS (lower(cbid))"
    path = change(file.save(), column.replace("odd!", '"odd!"'))
    path.write_bytes(path.read_bytes().replace(b"odd!", b"odd\xff"))
    with suppress(InputError):
        compute_ns(path)


def test_a_name_of_nvprof_below_nothing_is_told_by_its_number(tmp_path: Path) -> None:
    file = Nvvp(tmp_path / "train.nvvp")
    file.call(10, 20)
    file.kernel(30, 70)
    path = change(file.save(), "UPDATE CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL SET name = -5")
    assert compute_ns(path) == 40


def test_names_are_told_without_looking_for_libraries_by_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless the usual one is not there, ldconfig and gcc need not be started."""

    def find(name: str) -> str:
        raise AssertionError(f"looked for {name}")

    monkeypatch.setattr(ctypes.util, "find_library", find)
    names._library.cache_clear()
    try:
        assert names.demangle("_Z4gemmPf") == "gemm(float*)"
    finally:
        names._library.cache_clear()


def test_a_mangled_name_may_tell_of_more_letters_than_there_are_numbers() -> None:
    assert names.short("_Z" + "9" * 5000)


def spool(path: Path, started: int, *info: str, began: int = 1) -> Path:
    head = HEADER.pack(SPOOL.magic, SPOOL.version, 7, started, began)
    parts = (text.encode() for text in info)
    path.write_bytes(head + b"".join(CHUNK.pack(b"INFO", len(p)) + p for p in parts))
    return path


@pytest.mark.parametrize(("started", "began"), [(1 << 63, 1), (1, 1 << 63)])
def test_a_spool_that_began_when_no_clock_shows_is_broken(
    started: int, began: int, tmp_path: Path
) -> None:
    spool(tmp_path / "a.7.spool", started, began=began)
    with pytest.raises(InputError, match="began at a time that no clock shows"):
        merge(tmp_path, tmp_path / "t.sqlite", {})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("started", [1, 1000, 1 << 61, 1 << 62])
def test_clocks_that_say_anything_do_no_harm(started: int, tmp_path: Path) -> None:
    path = spool(tmp_path / "a.7.spool", started, "capture_on=1500")
    begun, off = path.read_bytes(), b"capture_off=2000"
    odd = (1, 1000, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
    for realtime, monotonic in product(odd, odd):
        looks = np.array([(1100, 100, 100), (realtime, monotonic, 1)], CLOCKS).tobytes()
        clocks = CHUNK.pack(b"CLOK", len(looks)) + looks
        path.write_bytes(begun + clocks + CHUNK.pack(b"INFO", len(off)) + off)
        merge(tmp_path, tmp_path / "t.sqlite", {})
        (tmp_path / "t.sqlite").unlink()


@pytest.mark.parametrize("moment", ["9" * 30, "9" * 5000, "²", str(1 << 63)])
def test_a_window_that_no_clock_shows_is_none(moment: str, tmp_path: Path) -> None:
    path = spool(tmp_path / "a.7.spool", 1000, f"capture_on={moment}", "capture_off=2000")
    assert windows_of(read_spool(path)) == []
    merge(tmp_path, tmp_path / "t.sqlite", {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = " + "[" * 100_000, "nested too deep"),
        ("repeats = " + "9" * 5000, "a number too long"),
        ("repeats = 1000000000000", "repeats"),
        ("[options]\nbatch = 100000000000000000000", "batch"),
        (f"[matrix]\nbatch = {[1] * 100}\nepoch = {[1] * 100}", "10,000 combinations"),
        ('[matrix]\nframework = ["torch"]\ndata = ["' + "long" * 200 + '"]', "is not a folder"),
    ],
)
def test_a_study_of_anything_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(GputraceError, match=problem):
        read_study(path)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE plans SET plan = '{'",
        "UPDATE plans SET plan = '[1]'",
        "UPDATE plans SET plan = json_set(plan, '$.configurations[0].settings', 'x')",
        "UPDATE plans SET plan = json_set(plan, '$.study.repeats', 'many')",
        "UPDATE plans SET plan = json_remove(plan, '$.study.title')",
        "UPDATE runs SET result = '1 2'",
        "UPDATE runs SET state = 'gone'",
        "UPDATE runs SET result = replace(hex(zeroblob(50000)), '0', '[')",
        "UPDATE runs SET measure = 'x'",
        "UPDATE runs SET measure = json_set(measure, '$.steady', 'x')",
        "UPDATE runs SET measure = json_remove(measure, '$.classes.compute')",
        "ALTER TABLE runs DROP COLUMN measure",
        "ALTER TABLE plans DROP COLUMN plan",
        "ALTER TABLE plans RENAME TO others",
    ],
)
def test_results_that_no_study_leaves_are_refused(statement: str, tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    path.write_bytes(results()[0])
    change(path, statement)
    with pytest.raises(InputError, match=str(path)), Database(tmp_path) as database:
        read_results(database)


def test_results_whose_schema_is_not_utf_8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    path.write_bytes(results()[0].replace(b'CREATE TABLE "plans', b'CREATE TABLE "\xf4lans'))
    with pytest.raises(InputError, match="cannot be used as results"):
        Database(tmp_path)


def test_results_whose_table_is_a_view_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    path.write_bytes(results()[0])
    endless = "WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) SELECT id FROM c"
    change(path, "ALTER TABLE plans RENAME TO old", f"CREATE VIEW plans AS {endless}")
    with pytest.raises(InputError, match="has no table plans"):
        Database(tmp_path)


def test_an_entry_of_the_cache_that_is_nested_too_deep_is_none() -> None:
    assert load_columns(Kept(b"[" * 100_000 + b"]" * 100_000, []), Scene) is None


ROW: Final = "2026/02/03 04:05:06.000, {}, 93 %, 510.2 W\n"


@pytest.mark.parametrize(
    "text",
    [
        f"timestamp, index, utilization.gpu [%], {'[' * 100_000}\n" + ROW.format(0),
        ROW.format("9" * 5000) + ROW.format(1),
        "timestamp, index, clocks_event_reasons.active\n"
        f"2026/02/03 04:05:06.000, 0, 0x{'f' * 300}\n",
    ],
    ids=["brackets", "a long index", "long bits"],
)
def test_a_log_of_anything_takes_no_time(text: str, export: Export, tmp_path: Path) -> None:
    """Brackets took a minute, a time that grew with their square."""
    log = tmp_path / "smi.csv"
    log.write_text(text)
    with suppress(InputError), gputrace.open(export.write(tmp_path / "t.sqlite"), log) as trace:
        assert trace.analyze().gpus[0].compute_ns == 80


def test_a_run_that_takes_no_time_has_no_curve_of_it(tmp_path: Path) -> None:
    with gputrace.open(Export().kernel(5, 5).write(tmp_path / "trace.sqlite")) as trace:
        assert trace.analyze().span_ns == 0


def test_rows_that_lie_years_apart_are_not_drawn(tmp_path: Path) -> None:
    export = Export().kernel(1_000, 2_000).kernel(1 << 60, (1 << 60) + 1_000)
    with gputrace.open(export.write(tmp_path / "far.sqlite")) as trace:
        assert len(trace.analyze().gpus) == 1
        with pytest.raises(InputError, match="13,344 days apart, too far to be drawn"):
            trace.material()
        assert trace.material(time=(0, 5_000)).scene.span.start == 1_000


def test_ranks_in_one_file_are_known_beside_a_process_of_none(tmp_path: Path) -> None:
    rows = [kineto.kernel(10, 40) | {"pid": f"[TP0{rank}] {rank}"} for rank in (0, 1)]
    call = kineto.event("cuda_runtime", "cudaLaunchKernel", 1, 2)
    path = kineto.write(tmp_path / "merged.pt.trace.json", *rows, call)
    with gputrace.open(path) as trace:
        assert {gpu.rank for gpu in trace.analyze().gpus} == {0, 1}


def test_the_processes_of_a_run_are_not_looked_through_for_each_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Trace] = []
    of_run = neighbours._of_run

    def look_through(trace: Trace) -> neighbours._OfRun:
        calls.append(trace)
        return of_run(trace)

    monkeypatch.setattr(neighbours, "_of_run", look_through)
    export = Export()
    for number in range(3):
        export.kernel(number, number + 10, deviceId=number, globalPid=global_id(100 + number))
    with gputrace.open(export.write(tmp_path / "many.sqlite")) as trace:
        assert len(trace.analyze().gpus) == 3
    assert len(calls) <= 1
