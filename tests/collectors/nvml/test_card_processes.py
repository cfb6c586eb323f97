"""Processes that use the cards of a recording, through a libnvidia-ml.so.1 of our own."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from gputrace.collectors.finalize import write_nvml
from gputrace.collectors.neighbours import PROCESS, CardProcesses, RunProcesses
from gputrace.collectors.nvml.log import NvmlLog, read_nvml
from gputrace.store.writer import TraceWriter
from tests.collectors.nvml.test_sampling import RECORD, Scripted, calls, library, scripted, written
from tests.helpers.command import python

__all__ = ["library", "scripted"]

OWN: Final = """
import os, subprocess, sys
from pathlib import Path
script, child = Path(os.environ["FAKE_NVML"]), subprocess.Popen(["sleep", "60"])
text = script.read_text().replace("OWN", str(os.getpid())).replace("CHILD", str(child.pid))
script.write_text(text)
"""
"""What a recorder does first: it puts its id, and its program's, into the library's script."""

Record = Callable[..., NvmlLog]
WRONG: Final[tuple[Any, ...]] = ("x", None, [], 2**70)


@pytest.fixture
def neighbour() -> Iterator[int]:
    """Return the id of a process that is none of the recording's."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def record(tmp_path: Path, scripted: Scripted) -> Record:
    def run(text: str, ticks: int = 2, hz: float = 2) -> NvmlLog:
        code = OWN + RECORD + "\nchild.kill()\n"
        ran = python("-c", code, str(tmp_path), str(ticks), str(hz), "9", env=scripted(text))
        assert (ran.code, ran.out, ran.err) == (0, "", "")
        return read_nvml(written(tmp_path))

    return run


def rows(log: NvmlLog) -> list[dict[str, Any]]:
    return [dict(zip(PROCESS, row, strict=True)) for row in log.processes]


def test_a_process_that_the_recorder_did_not_start_is_a_neighbour(
    record: Record, neighbour: int
) -> None:
    text = f"gpus 2\nprocess 1 CHILD 500 compute\nprocess 1 {neighbour} 700 compute\n"
    log = record(text + f"use 1 CHILD 35\nuse 1 {neighbour} 60\n")
    looks = [row for row in rows(log) if row["gpu"] == 1]
    ours, theirs = ([r for r in looks if r["isRecorded"] == own] for own in (1, 0))
    assert {(row["use"], row["memoryUsed"]) for row in ours} == {(0.35, 500)}
    assert {(row["pid"], row["name"], row["use"], row["memoryUsed"]) for row in theirs} == {
        (neighbour, Path(f"/proc/{neighbour}/comm").read_text().strip(), 0.6, 700)
    }
    assert all(row["durationNs"] > 0 for row in theirs)
    assert {row["pid"] for row in rows(log) if row["gpu"] == 0} == {None}, "none is listed"


def test_without_a_neighbour_the_use_is_not_asked_and_a_row_is_written_once(
    record: Record, tmp_path: Path
) -> None:
    log = record("gpus 1\nprocess 0 CHILD 500 compute\nprocess 0 OWN 5 compute\n", ticks=6)
    assert [(row["isRecorded"], row["use"]) for row in rows(log)] == [(1, None)] * 2
    assert calls(tmp_path, "DeviceGetProcessUtilization") == 0
    assert calls(tmp_path, "DeviceGetMPSComputeRunningProcesses") <= 5


def test_names_of_other_users_processes_are_not_kept(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 12345)
    from gputrace.collectors.processes import name_of

    assert name_of(1) is None
    log = record("gpus 1\nprocess 0 4000000 700 compute\n")
    assert {(row["pid"], row["name"], row["use"]) for row in rows(log)} == {(4000000, None, 0.0)}


def test_how_processes_share_a_card_is_kept(record: Record, neighbour: int) -> None:
    text = f"gpus 2\nprocess 0 OWN 1 mps\nprocess 0 {neighbour} 2 mps\nprocess 1 CHILD 3 mig\n"
    sharing = {(row["gpu"], row["isRecorded"], row["sharing"]) for row in rows(record(text))}
    assert sharing == {(0, 1, "MPS"), (0, 0, "MPS"), (1, 1, "MIG 3/3")}


@pytest.mark.parametrize("code", [3, 4, 13, 999])
def test_a_driver_that_does_not_answer_gives_no_process(record: Record, code: int) -> None:
    refused = f"gpus 1\nprocess 0 OWN 1 compute\nfail DeviceGetComputeRunningProcesses 0 {code}\n"
    log = record(refused + f"fail DeviceGetMPSComputeRunningProcesses 0 {code}\n")
    assert {(row["pid"], row["isRecorded"]) for row in rows(log)} == {(None, 0)}


def test_an_unknown_use_is_null(record: Record, neighbour: int) -> None:
    text = f"gpus 1\nprocess 0 OWN 1 compute\nprocess 0 {neighbour} 2 compute\n"
    log = record(text + "fail DeviceGetProcessUtilization 0 3\n")
    assert {(row["isRecorded"], row["use"]) for row in rows(log)} == {(1, None), (0, None)}


def test_processes_are_in_the_trace_and_are_read(
    record: Record, tmp_path: Path, neighbour: int
) -> None:
    text = f"gpus 1\nprocess 0 OWN 1 compute\nprocess 0 {neighbour} 2 compute\n"
    log = record(text + f"use 0 {neighbour} 80\n")
    with TraceWriter(tmp_path / "t.sqlite") as writer:
        write_nvml(writer, [written(tmp_path)], log.clocks[0][0])
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as database:
        found = database.execute("SELECT count(*) FROM GPUTRACE_PROCESS_USE").fetchone()
    assert found == (len(log.processes),)


@pytest.mark.parametrize(
    "line",
    [
        *('{"processes": 3}', '{"processes": [3]}', '{"processes": [[]]}', '{"processes": [null]}'),
        *(json.dumps({"processes": [[value] * len(PROCESS)]}) for value in WRONG),
    ],
)
def test_rows_that_are_none_are_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "h.nvml.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    assert read_nvml(path).processes == []


class Card:
    """A driver with one card, as pynvml shows it."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.uses: dict[int, int] = {}
        self.asked: list[int] = []

    def nvmlDeviceGetComputeRunningProcesses(self, _: object) -> list[object]:
        none = 0xFFFF_FFFF
        how = {"usedGpuMemory": 1, "gpuInstanceId": none, "computeInstanceId": none}
        return [SimpleNamespace(pid=pid, **how) for pid in self.pids]

    def nvmlDeviceGetProcessUtilization(self, _: object, since_us: int) -> list[object]:
        self.asked.append(since_us)
        return [SimpleNamespace(pid=pid, smUtil=use) for pid, use in self.uses.items()]


def looked(card: Card, processes: CardProcesses) -> list[tuple[int, float | None]]:
    """Return the processes and uses of a look a moment later, which is due."""
    time.sleep(0.01)
    processes._pace._due = 0
    return [(row[3], row[6]) for row in processes.look()]


def test_a_neighbour_that_has_ended_is_asked_for_once_more(tmp_path: Path) -> None:
    card = Card()
    processes = CardProcesses(card, [0], RunProcesses(tmp_path, os.getpid()))
    card.pids = [os.getpid()]
    assert looked(card, processes) == [(os.getpid(), None)]
    before = time.time_ns() // 1000
    card.pids, card.uses = [os.getpid(), 4_000_000], {4_000_000: 70}
    assert looked(card, processes) == [(os.getpid(), 0.0), (4_000_000, 0.7)]
    assert looked(card, processes) == [], "it is asked less often than listed"
    card.pids, card.uses = [os.getpid()], {4_000_000: 40}
    assert looked(card, processes) == [(os.getpid(), 0.0), (4_000_000, 0.4)]
    assert looked(card, processes) == []
    assert len(card.asked) == 2
    assert card.asked[1] >= before > card.asked[0] - 10**6


def test_the_use_of_a_neighbour_that_has_ended_is_null_where_the_driver_forgot_it(
    tmp_path: Path,
) -> None:
    card = Card()
    processes = CardProcesses(card, [0], RunProcesses(tmp_path, os.getpid()))
    card.pids = [os.getpid(), 4_000_000]
    looked(card, processes)
    card.pids = [os.getpid()]
    assert looked(card, processes) == [(os.getpid(), 0.0), (4_000_000, None)]


def test_the_use_of_a_neighbour_that_comes_late_begins_when_it_was_not_there(
    tmp_path: Path,
) -> None:
    card = Card()
    processes = CardProcesses(card, [0], RunProcesses(tmp_path, os.getpid()))
    looked(card, processes)
    time.sleep(0.2)
    looked(card, processes)
    card.pids = [4_000_000]
    time.sleep(0.01)
    processes._pace._due = 0
    (row,) = processes.look()
    assert row[1] < 100_000_000


def test_looks_are_rarer_the_longer_they_take(tmp_path: Path) -> None:
    class Slow(Card):
        def nvmlDeviceGetComputeRunningProcesses(self, _: object) -> list[object]:
            sum(range(200_000))
            return []

    processes = CardProcesses(Slow(), [object()], RunProcesses(tmp_path, 1))
    assert processes.look()
    processes._pace._start -= 5 * 10**9
    processes._pace._due = 0
    processes.look(anew=True)
    wait = processes._pace._due - processes._pace._start
    assert wait > 4_000 * 2 * 10**6, "at least 4,000 times a millisecond for each"
    assert processes.look() == []
