"""Work that the GPU is still at when a window ends, or the program."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from gputrace.collectors.finalize import merge, session_time, write_all
from gputrace.collectors.spool.activity import Spool, read_spool, windows_of
from gputrace.store.writer import TraceWriter
from tests.native.build import Machine

MANUAL: Final = {"GPUTRACE_CAPTURE": "manual"}
WINDOW: Final = "capture 1 sleep 5 sample unfinished 300 sleep 5 capture 0 "
"""A kernel that has ended as the window ends, and one that runs for 300 ms."""
ENDLESS: Final = WINDOW.replace("300", "600000")


def left_by(
    machine: Machine, folder: Path, script: str, code: int = 0, env: Mapping[str, str] = MANUAL
) -> Spool:
    done = machine.run(folder, script, dict(env))
    assert (done.returncode, done.stderr) == (code, "")
    (spool,) = (read_spool(path) for path in folder.glob("*.spool"))
    return spool


def timed(spool: Spool) -> list[bool]:
    """Return for each kernel if it has its times."""
    rows = spool.records[b"KERN"]
    found: list[bool] = ((rows["start"] > 0) & (rows["end"] > rows["start"])).tolist()
    return found


@pytest.mark.parametrize("windows", [1, 2])
def test_it_comes_with_its_times_when_it_is_done(
    machine: Machine, tmp_path: Path, windows: int
) -> None:
    spool = left_by(machine, tmp_path, f"inject {WINDOW * windows}sleep 2500 exit 0")
    assert timed(spool) == [True] * 2 * windows
    assert len(spool.records[b"API "]) == 2 * windows


def test_calls_after_the_window_are_left_out_though_they_are_watched_until_the_gpu_is_done(
    machine: Machine, tmp_path: Path
) -> None:
    script = f"inject {WINDOW}sleep 20 sample sleep 2500 sample exit 0"
    assert len(left_by(machine, tmp_path, script).records[b"API "]) == 2


def test_calls_made_while_a_window_is_closed_are_left_out_and_none_lacks_its_kernel(
    machine: Machine, tmp_path: Path
) -> None:
    script = f"inject meanwhile 100000000 {'capture 1 sleep 5 capture 0 sleep 5 ' * 3}exit 0"
    done = machine.run(tmp_path, script, MANUAL | {"FAKE_CUPTI_FLUSH_MS": "20"})
    assert (done.returncode, done.stderr) == (0, "")
    (spool,) = (read_spool(path) for path in tmp_path.glob("*.spool"))
    calls = spool.records[b"API "]
    assert len(windows_of(spool)) == 3
    assert len(calls) > 100
    assert set(calls["correlation"]) <= set(spool.records[b"KERN"]["correlation"])


@pytest.mark.parametrize("window", [ENDLESS, ENDLESS.replace("capture 0 ", "")])
def test_what_is_not_done_at_the_programs_end_is_there_without_its_times(
    machine: Machine, tmp_path: Path, window: str
) -> None:
    spool = left_by(machine, tmp_path, f"inject {window}exit 0")
    assert timed(spool) == [True, False]
    assert spool.whole


def test_another_profiler_is_handed_nothing_of_ours(machine: Machine, tmp_path: Path) -> None:
    # Killed, so that nothing comes at the end.
    script = f"inject {ENDLESS}pause 1 sleep 1500 raise {signal.SIGKILL.value}"
    spool = left_by(machine, tmp_path, script, -signal.SIGKILL)
    assert timed(spool) == [True, False]


# ---- in the trace ----


@pytest.mark.parametrize("field", ["start", "end"])
@pytest.mark.parametrize("tag", [b"KERN", b"COPY", b"MSET", b"GRPH"])
def test_half_of_its_times_is_none(
    machine: Machine, tmp_path: Path, tag: bytes, field: str
) -> None:
    # From the start, as replays of graphs are left out of later windows.
    spool = left_by(machine, tmp_path, "inject sample capture 0", env={})
    spool.records[tag] = spool.records[tag].copy()
    spool.records[tag][field][0] = 0
    start = spool.started - 1000
    with TraceWriter(tmp_path / "t.sqlite") as writer:
        write_all(writer, [spool], [], start, {})
    kinds = {b"KERN": "KERNEL", b"COPY": "MEMCPY", b"MSET": "MEMSET", b"GRPH": "GRAPH_TRACE"}
    for other, kind in kinds.items():
        with closing(sqlite3.connect(tmp_path / "t.sqlite")) as trace:
            sql = f"SELECT start, end FROM CUPTI_ACTIVITY_KIND_{kind}"
            spans: list[Any] = trace.execute(sql).fetchall()
        whole = [row for row in spans if row != (0, 0)]
        expected = session_time(spool.records[other]["start"], start)[int(other == tag) :]
        assert [first for first, _ in whole] == expected.tolist()


def test_names_are_written_at_once_however_many_there_are(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    add_rows = TraceWriter.add_rows

    def counted(self: TraceWriter, table: str, names: Any, rows: Any) -> None:
        written.append(table)
        add_rows(self, table, names, rows)

    monkeypatch.setattr(TraceWriter, "add_rows", counted)
    done = machine.run(tmp_path, "inject nvtx train 1000 0 1", {})
    assert done.returncode == 0
    merge(tmp_path, tmp_path / "t.sqlite", {})
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as trace:
        texts = {text for (text,) in trace.execute("SELECT value FROM StringIds")}
    assert texts >= {f"step {number}" for number in range(1000)}
    assert written.count("StringIds") < 10
