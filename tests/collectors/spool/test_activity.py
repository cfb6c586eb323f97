"""Spools of programs that are killed or whose disk is full; reading what is left of a file."""

from __future__ import annotations

import random
import resource
import signal
import sqlite3
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gputrace.collectors.finalize import merge
from gputrace.collectors.spool.activity import Spool, read_spool
from gputrace.errors import InputError
from tests.helpers.examples import few
from tests.native.build import Machine

LIVES: Final = few(60)
AT_ONCE: Final = 6
SECOND: Final = 1_000_000_000


def missing(spool: Spool, killed: int) -> float:
    """Seconds before its end of which there are no kernels; before that all are there."""
    rows = spool.records[b"KERN"]
    for thread in range(2):
        numbers = rows["grid"][rows["stream"] == thread][:, 0].tolist()
        assert numbers == list(range(len(numbers)))
    newest = int(rows["end"][-1]) if len(rows) else spool.started
    return (killed - newest) / SECOND


def test_a_killed_program_leaves_all_but_its_last_second(machine: Machine, tmp_path: Path) -> None:
    """Programs that are ended by SIGKILL or SIGTERM at random moments."""
    choose = random.Random(4)
    lives = [
        (i, choose.choice([signal.SIGKILL, signal.SIGTERM]), choose.uniform(0, 2.4))
        for i in range(LIVES)
    ]

    def live(life: tuple[int, signal.Signals, float]) -> float:
        number, how, seconds = life
        folder = tmp_path / str(number)
        folder.mkdir()
        command = machine.command("inject run 60000 2 1")
        with subprocess.Popen(command, env=machine.environment(folder)) as program:
            path = wait_for_file(folder)
            time.sleep(seconds)
            killed = time.time_ns()
            program.send_signal(how)
        assert program.returncode == -how
        spool = read_spool(path)
        assert not spool.whole
        return missing(spool, killed)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        lost = sorted(pool.map(live, lives))
    assert lost[LIVES * 9 // 10] < 1.3, lost[-20:]
    # A machine that is busy wakes the writer late.
    assert lost[-1] < 3, lost[-20:]


def wait_for_file(folder: Path) -> Path:
    """The spool, once its header is there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for path in folder.iterdir():
            if path.stat().st_size >= 32:
                return path
        time.sleep(0.002)
    raise AssertionError("no spool")


def test_a_record_that_is_not_complete_does_not_hold_up_the_rest_for_ever(
    machine: Machine, tmp_path: Path
) -> None:
    done = machine.run(tmp_path, "inject unfinished 60000 storm 150 1 exit 0")
    assert done.returncode == 0
    (path,) = tmp_path.iterdir()
    assert len(read_spool(path).records[b"KERN"]) == 1 + 150


@pytest.mark.parametrize("kilobytes", [0, 1, 4, 70, 300])
def test_a_full_disk_ends_the_recording_and_not_the_program(
    machine: Machine, tmp_path: Path, kilobytes: int
) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes << 10, kilobytes << 10))

    script = "inject nvtx storm 20000 2 ranges capture 0 capture 1 storm 20000 2 fork exit exit 5"
    done = subprocess.run(
        machine.command(script),
        env=machine.environment(tmp_path, {"PYTHONWARNINGS": "ignore"}),
        preexec_fn=limit,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, b"", b"")
    for path in tmp_path.iterdir():
        assert path.stat().st_size <= kilobytes << 10
        if kilobytes:
            assert_ended_early(read_spool(path))


def assert_ended_early(spool: Spool) -> None:
    """Assert that the spool tells what is missing, in the place that was kept for it."""
    assert not spool.whole
    assert spool.stopped
    at, _, why = spool.losses[0]
    assert why == "nothing more could be written: File too large"
    newest = spool.records[b"KERN"]["end"].max(initial=spool.started)
    assert newest - 10_000 <= at <= time.time_ns()


def test_the_end_of_writing_is_in_the_trace_and_in_the_notes(
    machine: Machine, tmp_path: Path
) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (70 << 10, 70 << 10))

    env = machine.environment(tmp_path)
    command = machine.command("inject storm 20000 2")
    subprocess.run(command, env=env, preexec_fn=limit, check=True, timeout=60)
    merged = merge(tmp_path, tmp_path / "t.sqlite", {})
    (note,) = merged.notes
    assert "nothing more could be written: File too large" in note
    # It did not end without warning, with all but its last second.
    assert merged.cut == 0
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as database:
        ((at, count, why),) = database.execute("SELECT timeNs, records, reason FROM GPUTRACE_LOSS")
    assert (count, why) == (None, "nothing more could be written: File too large")
    assert f"all after {at / 1e9:.1f} s is missing" in note


def test_a_recording_takes_little_memory_once_the_disk_is_full(
    machine: Machine, tmp_path: Path
) -> None:
    """Records that can no longer be written are not kept: they are 43 MB a storm."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    storms = "storm 160000 2 sleep 20 capture 0 capture 1 " * 10
    with subprocess.Popen(
        machine.command(f"inject sample sleep 1200 {storms} say done wait"),
        env=machine.environment(tmp_path),
        preexec_fn=limit,
        stdout=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"done\n"
        status = Path(f"/proc/{program.pid}/status").read_text()
        program.kill()
    (peak,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak < 200_000


@pytest.mark.parametrize("kind", ["nowhere", "a file", "read-only"])
def test_a_folder_that_takes_no_file_leaves_the_program_alone(
    machine: Machine, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "spools"
    if kind == "a file":
        folder.write_text("")
    if kind == "read-only":
        folder = Path("/proc")
    done = machine.run(folder, "say hello inject nvtx sample ranges fork exit exit 6")
    assert (done.returncode, done.stdout, done.stderr) == (6, "hello\n", "")


@pytest.fixture(scope="module")
def whole(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A spool with chunks of all kinds."""
    folder = tmp_path_factory.mktemp("whole")
    done = machine.run(
        folder, "inject nvtx sample ranges storm 20 2", {"FAKE_CUPTI_DROPPED": "5", "RANK": "1"}
    )
    assert done.returncode == 0
    (path,) = folder.iterdir()
    return path.read_bytes()


LATITUDE: Final = settings(
    max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def assert_readable_or_refused(folder: Path, raw: bytes) -> None:
    path = folder / "host.1.spool"
    path.write_bytes(raw)
    try:
        spool = read_spool(path)
    except InputError:
        return
    assert spool.host == "host"
    assert all(len(rows) <= len(raw) for rows in spool.records.values())


@LATITUDE
@given(data=st.data())
def test_a_file_cut_anywhere_is_read_up_to_there(
    whole: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, len(whole)))
    assert_readable_or_refused(tmp_path, whole[:length])


@LATITUDE
@given(data=st.data())
def test_a_file_with_wrong_bytes_is_read_or_refused(
    whole: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(whole)
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), min_size=1)
    ):
        raw[at] = value
    assert_readable_or_refused(tmp_path, bytes(raw))


@LATITUDE
@given(data=st.data())
def test_chunks_of_anything_are_read_or_refused(
    whole: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    known = b"KERN COPY NVTX DEVI CLOK INFO NAME THRD LOSS".split()
    tags = st.sampled_from(known)
    chunks = data.draw(st.lists(st.tuples(tags | st.binary(min_size=4, max_size=4), st.binary())))
    body = b"".join(tag + len(text).to_bytes(4, "little") + text for tag, text in chunks)
    assert_readable_or_refused(tmp_path, whole[:32] + body)


def test_kernels_are_never_fewer_in_a_longer_part_of_a_file(whole: bytes, tmp_path: Path) -> None:
    def count(raw: bytes) -> int:
        path = tmp_path / "host.1.spool"
        path.write_bytes(raw)
        return len(read_spool(path).records[b"KERN"])

    counts = [count(whole[:length]) for length in range(32, len(whole), 8)]
    assert counts == sorted(counts)
    assert count(whole) == 21


def test_no_spool_of_another_kind_or_version_is_taken(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "host.1.spool"
    for raw, words in (
        (b"", "empty"),
        (b"SQLite format 3\0" + bytes(100), "not a spool"),
        (whole[:8] + (4).to_bytes(4, "little") + whole[12:], "version 4"),
    ):
        path.write_bytes(raw)
        with pytest.raises(InputError, match=words):
            read_spool(path)


def test_a_file_that_cannot_be_read_does_not_cost_the_others(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "host.1.spool").write_bytes(whole)
    (tmp_path / "host.2.spool").write_bytes(b"garbage")
    (tmp_path / "host.3.host").write_bytes(b"")
    merged: Any = merge(tmp_path, tmp_path / "t.sqlite", {})
    assert (merged.processes, merged.kernels) == (1, 21)
    told = (
        "host.2.spool: not a spool file of gputrace",
        "host.3.host: empty: its process was ended at once, or the disk was full",
    )
    assert merged.notes == told
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as database:
        rows = database.execute("SELECT reason FROM GPUTRACE_LOSS WHERE globalPid IS NULL")
        assert tuple(reason for (reason,) in rows) == told
