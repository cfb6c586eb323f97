"""Recordings of hours: windows that come again, a ring of files, a limit; and what a kill leaves.

Rings here have files of a second, the shortest, and keep a few.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from gputrace.collectors.backend import Limits, ring
from gputrace.collectors.finalize import merge
from gputrace.collectors.session import LimitWatch, prune
from gputrace.collectors.slow_steps import MOST, SlowSteps, StepLengths
from gputrace.collectors.spool import in_order, read_all
from gputrace.collectors.spool.activity import Spool, join_spools, read_spool, windows_of
from gputrace.collectors.spool.host_events import HostEvents, join_hosts, read_host_file
from gputrace.errors import InputError
from tests.helpers import command
from tests.native.build import Machine

SECOND: Final = 1_000_000_000
RING: Final = {"GPUTRACE_SEGMENT_NS": str(SECOND), "GPUTRACE_SEGMENTS": "2"}
WINDOWS: Final = {
    "GPUTRACE_EVERY_NS": str(100_000_000),
    "GPUTRACE_FOR_NS": str(10_000_000),
    "GPUTRACE_HOLD_NS": str(10 * SECOND),
}


def only(folder: Path) -> Spool:
    """Read the spool of the only process, all of whose files can be read."""
    problems: list[InputError] = []
    (spool,) = read_all(folder, "*.spool", read_spool, join_spools, problems)
    assert not problems
    return spool


@contextmanager
def running(
    machine: Machine, folder: Path, script: str, env: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The program, which is killed at the end."""
    program = subprocess.Popen(machine.command(script), env=machine.environment(folder, env))
    with program:
        yield program
        program.kill()


def size(folder: Path) -> int:
    total = 0
    for entry in os.scandir(folder):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total


# ---- windows that come again ----


def test_windows_by_time_come_again_and_hold_cupti_between(
    machine: Machine, tmp_path: Path
) -> None:
    script = "inject run 1500 1 1 finalized"
    done = machine.run(tmp_path, script, WINDOWS)
    assert (done.stdout, done.stderr) == ("0\n", "")
    spool = only(tmp_path)
    windows = windows_of(spool)
    # The first at once, the others when the wall clock is at a multiple of 100 ms; a busy machine
    # comes late to some, and not in time for a few.
    assert windows[0][0] == 0
    beats = [(start + 1_000_000) // 100_000_000 for start, _ in windows[1:]]
    assert beats == sorted(set(beats))
    assert len(beats) > (beats[-1] - beats[0]) / 2 > 3
    assert np.median([start % 100_000_000 for start, _ in windows[1:]]) < 30_000_000
    assert 9_000_000 <= np.median([end - start for start, end in windows[1:]]) < 40_000_000
    # Kernels are numbered: those of a window follow each other, and then many are left out.
    rows = np.sort(spool.records[b"KERN"], order="start")
    numbers, of = rows["grid"][:, 0], np.searchsorted([end for _, end in windows], rows["start"])
    assert len(set(of)) > len(windows) / 2
    for window in set(of):
        # Time may pass between a kernel's own time and its being handed over: the last of these
        # may be the first that the next window has.
        assert set(np.diff(numbers[of == window][:-1])) <= {1}
    assert numbers[-1] - numbers[0] + 1 > 3 * len(numbers)
    starts = np.array([start for start, _ in windows] + [np.iinfo(np.int64).max])
    assert np.mean(rows["start"] >= starts[of]) > 0.7


def test_cupti_is_let_go_of_where_the_next_window_is_far(machine: Machine, tmp_path: Path) -> None:
    env = {"GPUTRACE_CAPTURE": "manual", "GPUTRACE_HOLD_NS": str(SECOND)}
    window = "capture 1 sleep 5 plain capture 0 "
    script = f"inject plain {window}sleep 200 plain finalized {window}released 1 0 plain finalized"
    done = machine.run(tmp_path, script, env)
    assert done.stdout.split() == ["0", "1"]
    assert len(only(tmp_path).records[b"KERN"]) == 2


def test_a_duration_ends_windows_too(machine: Machine, tmp_path: Path) -> None:
    env = WINDOWS | {"GPUTRACE_DURATION_NS": str(400_000_000)}
    machine.run(tmp_path, "inject run 1500 1 1", env)
    spool = only(tmp_path)
    assert 2 <= len(windows_of(spool)) <= 5
    assert spool.records[b"KERN"]["end"].max() - spool.started < SECOND


# ---- a ring ----


def is_kept(time_ns: int) -> bool:
    """Return true for a time that a ring of two seconds, in files of one, keeps: at most four.

    The first event comes after the beginning of its file, and a file may begin late.
    """
    return 1.8 * SECOND < time_ns < 5.5 * SECOND


def test_each_file_of_a_ring_can_be_read_by_itself(machine: Machine, tmp_path: Path) -> None:
    """Names, domains, threads, cards and what the process said of itself are in all."""
    turns = "ranges run 300 2 1 " * 12
    env = {"RANK": "3", "GPUTRACE_SEGMENT_NS": str(SECOND), "GPUTRACE_SEGMENTS": "20"}
    assert machine.run(tmp_path, f"inject nvtx {turns}", env).returncode == 0
    paths = in_order(tmp_path.glob("*.spool"))
    assert len(paths) >= 4
    parts = [read_spool(path) for path in paths]
    for part in parts:
        used = {tag: set(part.records[tag]["name"].tolist()) - {0} for tag in (b"KERN", b"API ")}
        ranges = part.records[b"NVTX"]
        used[b"NVTX"] = set(ranges["name"].tolist()) | set(ranges["domain"].tolist()) - {0}
        for ids in used.values():
            assert ids - {0} <= part.names.keys()
        created = set(ranges["domain"][ranges["kind"] == 3].tolist())
        assert set(ranges["domain"].tolist()) - {0} <= created
        assert part.info["RANK"] == "3"
        assert "cupti" in part.info
        assert len(part.records[b"DEVI"]) >= 2
        assert len(part.records[b"CLOK"])
    assert [part.whole for part in parts] == [False] * (len(parts) - 1) + [True]
    # Of the last one the threads had ended before their names were asked for.
    assert all(part.threads for part in parts[:-1])
    spool = join_spools(parts)
    # All kernels of both threads, each once.
    rows = spool.records[b"KERN"]
    for thread in range(2):
        numbers = rows["grid"][rows["stream"] == thread][:, 0].tolist()
        assert numbers == list(range(len(numbers)))
    assert windows_of(spool)[0][0] == 0
    assert len(windows_of(spool)) == 1
    # A domain is told once in the trace.
    assert merge(tmp_path, tmp_path / "t.sqlite", {}).kernels == len(rows)
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as trace:
        sql = "SELECT count(*) FROM NVTX_EVENTS WHERE eventType = 75"
        assert trace.execute(sql).fetchone() == (1,)


def test_a_ring_keeps_what_it_says_and_its_disk_is_bounded(
    machine: Machine, tmp_path: Path
) -> None:
    """The file at hand and the two before it; a listing may also have the one just removed."""
    most, end = 0, time.monotonic() + 60
    with running(machine, tmp_path, "inject run 60000 1 20", RING):
        while not list(tmp_path.glob("*~000006.spool")):
            assert time.monotonic() < end
            most = max(most, len(list(tmp_path.glob("*.spool"))))
            time.sleep(0.01)
        last = time.time_ns()
    assert most in (3, 4)
    spool = only(tmp_path)
    rows = spool.records[b"KERN"]
    # More than 6 seconds were recorded.
    assert is_kept(last - int(rows["start"].min()))
    numbers = rows["grid"][:, 0].tolist()
    assert numbers[0] > 0
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    # Nothing is known of what came before: it is not the process's beginning any more.
    ((start, _),) = windows_of(spool)
    assert spool.started - SECOND < start <= spool.started + SECOND


def test_a_kill_at_any_moment_leaves_files_that_all_can_be_read(
    machine: Machine, tmp_path: Path
) -> None:
    choose = random.Random(11)
    lives = [(i, choose.uniform(0.9, 3.4)) for i in range(24)]

    def live(life: tuple[int, float]) -> float:
        number, seconds = life
        folder = tmp_path / str(number)
        folder.mkdir()
        with running(machine, folder, "inject nvtx run 60000 1 1", RING) as program:
            time.sleep(seconds)
            killed = time.time_ns()
            program.send_signal(signal.SIGKILL)
        spool = only(folder)
        rows = spool.records[b"KERN"]
        numbers = rows["grid"][:, 0].tolist()
        assert not numbers or numbers == list(range(numbers[0], numbers[-1] + 1))
        assert {spool.name(int(id)) for id in np.unique(rows["name"])} <= {"sgemm_128x64"}
        newest = int(rows["end"][-1]) if len(rows) else spool.started
        return (killed - newest) / SECOND

    with ThreadPoolExecutor(8) as pool:
        lost = sorted(pool.map(live, lives))
    assert lost[len(lost) * 3 // 4] < 1.3, lost
    # A machine that is busy wakes the writer late.
    assert lost[-1] < 3, lost


def test_a_recording_stops_at_its_size_and_lets_go_of_the_program(
    machine: Machine, tmp_path: Path
) -> None:
    env = {"GPUTRACE_MAX_BYTES": str(4_000_000)}
    script = "inject released 1 20 finalized calls run 300 1 20 calls"
    done = machine.run(tmp_path, script, env)
    finalized, *calls = map(int, done.stdout.split())
    assert (done.returncode, done.stderr, finalized) == (0, "", 1)
    assert calls[0] == calls[1], "calls are recorded no more"
    assert 1_000_000 < size(tmp_path) < 4_000_000
    spool = only(tmp_path)
    ((at, _, why),) = spool.losses
    assert why == "the recording had become as large as --max-size lets it"
    assert at - int(spool.records[b"KERN"]["end"].max()) < SECOND
    (note,) = merge(tmp_path, tmp_path / "t.sqlite", {}).notes
    assert why in note
    assert note.endswith("s is missing")


def test_a_burst_does_not_cross_the_limit(machine: Machine, tmp_path: Path) -> None:
    """Two processes that write 10 times as much in a second as there may be."""
    env = {"GPUTRACE_MAX_BYTES": str(4_000_000)}
    script = "inject run 1200 1 2 storm 150000 1 sleep 1200 finalized exit 0"
    with ThreadPoolExecutor(2) as pool:
        ran = list(pool.map(lambda _: machine.run(tmp_path, script, env), range(2)))
    assert [(done.returncode, done.stderr) for done in ran] == [(0, "")] * 2
    assert 1_000_000 < size(tmp_path) <= 4_000_000
    for path in tmp_path.iterdir():
        ((_, _, why),) = read_spool(path).losses
        assert why == "the recording had become as large as --max-size lets it"


# ---- the hooks, the recorder ----

STEPS: Final = """
import gputrace, sys, time
count, slow = int(sys.argv[1]), int(sys.argv[2])
for i in range(count):
    with gputrace.annotate("load batch"): time.sleep(1.6 if i == slow else 0.01)
    gputrace.step()
"""


LOOKING: Final = """
import sys
from gputrace import cli
from gputrace.collectors import launch as child
child.run.__defaults__ = (*child.run.__defaults__[:-1], 0.1)
sys.exit(cli.run(sys.argv[1:]))
"""
"""The command, whose recorder looks ten times a second at what there is."""


def record(*options: str, program: str = STEPS, words: tuple[str, ...] = ()) -> command.Ran:
    return command.python(
        *("-c", LOOKING, "record", "--no-nvml", "--backend", "host", *options, "--"),
        *(sys.executable, "-c", program, *words),
    )


TRAINING: Final = """
import ctypes, os, struct, sys, time
import gputrace
os.environ["GPUTRACE_LIBRARY"] = os.environ["COLLECTOR"]
folder = os.path.dirname(os.environ["COLLECTOR"])
ctypes.CDLL(folder + "/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(os.environ["COLLECTOR"]).InitializeInjection()
emit = ctypes.CDLL(os.environ["GPUTRACE_CUPTI"]).fake_emit
name, issued = ctypes.create_string_buffer(b"sgemm"), 0

def send(kind, start_at, start, end, *fields):
    record = bytearray(256)
    struct.pack_into("<I", record, 0, kind)
    struct.pack_into("<QQ", record, start_at, start, end)
    for at, form, value in fields:
        struct.pack_into("<" + form, record, at, value)
    emit(bytes(record), ctypes.c_uint64(end))

for step in range(int(sys.argv[1])):
    for _ in range(5):
        now, issued = time.time_ns(), issued + 1
        send(5, 8, now, now + 500, (4, "I", 211), (28, "I", os.getpid()), (32, "I", issued))
        send(10, 16, now + 500, now + 9000, (40, "I", 1), (44, "I", 7), (52, "I", step),
             (92, "I", issued), (104, "Q", ctypes.addressof(name)))
        time.sleep(0.0002)
    gputrace.step()
"""


@pytest.mark.parametrize("steps", ["0:60", "20:60"])
def test_windows_of_steps_hold_those_steps_and_the_report_counts_them(
    machine: Machine, tmp_path: Path, steps: str
) -> None:
    first, end = map(int, steps.split(":"))
    env = {"COLLECTOR": str(machine.folder / "collector.so")}
    env |= {name: machine.environment(tmp_path)[name] for name in ("GPUTRACE_CUPTI",)}
    env["LD_LIBRARY_PATH"] = str(machine.folder)
    output = tmp_path / "t.sqlite"
    ran = command.gputrace(
        *("record", "--no-nvml", "--backend", "cupti", "--every", "10:3", "--steps", steps),
        *("-o", str(output), "--", sys.executable, "-c", TRAINING, "75"),
        env=env,
    )
    assert ran.code == 0, ran.err
    wanted = {n for n in range(first, end) if (n - first) % 10 < 3}
    before = {n - 1 for n in wanted if n > first} | wanted
    with closing(sqlite3.connect(output)) as trace:
        counted = dict(
            trace.execute("SELECT gridX, count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL GROUP BY gridX")
        )
        (windows,) = trace.execute("SELECT count(*) FROM GPUTRACE_WINDOW").fetchone()
    assert counted == dict.fromkeys(sorted(before), 5)
    assert windows == len(wanted) // 3
    ran = command.gputrace("analyze", output)
    assert f"Recorded in {windows} windows of 3 steps" in " ".join(ran.out.split())


def hosts(folder: Path) -> HostEvents:
    problems: list[InputError] = []
    (host,) = read_all(folder, "*.host", read_host_file, join_hosts, problems)
    assert not problems
    return host


def test_the_hooks_keep_a_ring_of_files_with_names_and_notes_in_each(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    program = "from _gputrace_hooks.recorder import note; note('remember')\n" + STEPS
    program = "import gputrace; gputrace.step()\n" + program
    hooks = str(command.ROOT / "gputrace" / "collectors" / "hooks")
    env = {"GPUTRACE_DIR": str(folder), **RING, "PYTHONPATH": hooks}
    ran = command.python("-c", program, "450", "-1", env=env)
    assert (ran.code, ran.err) == (0, "")
    paths = in_order(folder.glob("*.host"))
    assert len(paths) == 3
    assert "~" in paths[0].name
    for path in paths:
        part = read_host_file(path)
        assert set(part.events["name"].tolist()) <= part.names.keys()
        assert part.info["host"] == os.uname().nodename
    host = hosts(folder)
    assert [host.names[int(note["name"])] for note in host.records["note"]] == ["remember"]
    numbers = host.records["step"]["number"].tolist()
    assert numbers == list(range(numbers[0], 451))
    kept = int(host.records["step"]["end"][-1] - host.records["step"]["end"][0])
    assert is_kept(kept)


def kept_steps(trace: Path) -> tuple[int, int, int]:
    """The first and the last step of a trace that lacks none between, and its time in ns."""
    sql = "SELECT min(step), max(step), max(end) - min(end), count(*) FROM GPUTRACE_STEP"
    with closing(sqlite3.connect(trace)) as database:
        first, last, time_ns, count = database.execute(sql).fetchone()
    assert count == last - first + 1
    return first, last, time_ns


def test_a_ring_becomes_a_trace_at_the_end_and_says_what_it_keeps(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    ran = record("-o", str(output), "--keep", "2s", words=("420", "-1"))
    assert ran.code == 0, ran.err
    first = ran.err.splitlines()[0]
    assert (
        first == "gputrace: keeps the last 2.00 s: at most 4.00 s are on disk (at 10 MB/s, 40 MB)"
    )
    first_step, last_step, kept_ns = kept_steps(output)
    assert first_step > 0
    assert last_step == 419
    assert is_kept(kept_ns)
    assert [path.name for path in tmp_path.iterdir()] == ["t.sqlite"]


def test_a_slow_step_gets_a_trace_of_its_own(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    # So slow that no other step is, however busy the machine.
    ran = record("-o", str(output), "--keep", "4s", "--when-slow", "80x", words=("400", "60"))
    assert ran.code == 0, ran.err
    told = next(line for line in ran.err.splitlines() if "slow1" in line)
    assert "t.slow1.sqlite: step 60 took " in told
    assert told.endswith(f"times the usual (1 of at most {MOST})")
    slow = tmp_path / "t.slow1.sqlite"
    assert sorted(path.name for path in tmp_path.iterdir()) == [slow.name, "t.sqlite"]
    with closing(sqlite3.connect(slow)) as trace:
        longest = trace.execute(
            "SELECT step FROM GPUTRACE_STEP ORDER BY end - start DESC LIMIT 1"
        ).fetchone()
    assert longest == (60,)
    ran = command.gputrace("analyze", slow)
    assert "The stretch around a slow step: step 60 took" in " ".join(ran.out.split())


def test_a_ring_under_way_is_made_a_trace_and_goes_on(tmp_path: Path) -> None:
    output, folder, over = tmp_path / "t.sqlite", tmp_path / "t.sqlite.spool", tmp_path / "over"
    words = ["record", "--no-nvml", "--backend", "host", "--keep", "2s", "-o", str(output), "--"]
    program = "import gputrace, os, sys, time\nwhile not os.path.exists(sys.argv[1]):\n"
    program += "    time.sleep(0.01); gputrace.step()"
    with subprocess.Popen(
        [sys.executable, "-m", "gputrace", *words, sys.executable, "-c", program, str(over)],
        env=command.environment(),
        stderr=subprocess.PIPE,
    ) as running:
        while not has_let_go(folder):
            assert running.poll() is None
            time.sleep(0.05)
        ran = command.gputrace("recover", folder)
        command.assert_refused(ran, 2, "still being recorded", "--keep makes a trace")
        ran = command.gputrace("recover", folder, "--keep", "-o", tmp_path / "now.sqlite")
        assert ran.code == 0, ran.err
        over.touch()
        assert running.wait() == 0
    first, last, kept_ns = kept_steps(tmp_path / "now.sqlite")
    assert first > 0
    assert is_kept(kept_ns)
    assert kept_steps(output)[1] > last


def has_let_go(folder: Path) -> bool:
    """Return true once the first file of a process's ring is gone."""
    names = [path.name for path in folder.glob("*.host")]
    return bool(names) and all("~" in name for name in names)


def test_the_recorder_tells_that_the_size_is_reached(tmp_path: Path) -> None:
    program = "import gputrace, time\nfor i in range(60000):\n    gputrace.step()\n"
    program += "    if i % 1000 == 0: time.sleep(0.03)\ntime.sleep(2)"
    ran = record("-o", str(tmp_path / "t.sqlite"), "--max-size", "1MB", program=program)
    assert ran.code == 0
    lines = ran.err.splitlines()
    assert lines[0] == ("gputrace: records 1 MB at most, then the program continues unrecorded")
    assert "reached --max-size after" in lines[1]
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as trace:
        ((records, reason),) = trace.execute("SELECT records, reason FROM GPUTRACE_LOSS").fetchall()
        (kept,) = trace.execute("SELECT count(*) FROM GPUTRACE_STEP").fetchone()
    assert reason == "the recording had become as large as --max-size lets it"
    assert 59_999 <= records + kept < 62_000  # of steps, and of counters beside them
    assert kept * 32 < 1_000_000


def test_files_of_processes_that_ended_leave_the_ring_too(tmp_path: Path) -> None:
    now = time.time_ns()
    alive = os.getpid()

    def leave(name: str, age_s: float) -> Path:
        path = tmp_path / name
        path.touch()
        os.utime(path, ns=(now - int(age_s * SECOND),) * 2)
        return path

    old = [leave("h.4194400.host", 100), leave(f"h.{alive}.spool", 99)]
    kept = [
        leave("h.4194401.host", 5),
        leave(f"h.{alive}~000001.spool", 98),  # It may go on.
        leave("meta.json", 1000),
        leave("h.nvml.jsonl", 1000),
    ]
    prune(tmp_path, 10 * SECOND, now)
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize(("age_s", "stays"), [(9, True), (11, False)])
def test_what_ended_processes_left_is_no_longer_on_disk_than_it_is_to_be_kept(
    tmp_path: Path, age_s: int, stays: bool
) -> None:
    path = tmp_path / "h.4194400~000003.spool"
    path.touch()
    os.utime(path, ns=(time.time_ns() - age_s * SECOND,) * 2)
    LimitWatch(tmp_path, ring(10 * SECOND, 0), print).look()
    assert path.exists() == stays


def test_a_step_is_slow_beside_the_median_of_those_before_it() -> None:
    lengths, at = StepLengths(2.0), 10**9
    for number in range(30):
        length = 1000 + number % 3
        assert lengths.take(2, number, at, at + length) is None
        at += length
    assert lengths.take(1, 0, at, at + 10**6) is None, "an optimizer's step within a loop's is none"
    slow = lengths.take(2, 30, at, at + 2500)
    assert slow is not None
    assert (slow.number, slow.length_ns, slow.usual_ns) == (30, 2500, 1001)
    assert lengths.take(2, 31, at, at + 2000) is None


def test_after_a_slow_step_the_recorder_looks_away_for_as_long_as_the_ring_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[int] = []
    clock = [0.0]
    steps = SlowSteps(tmp_path, tmp_path / "t", 2.0, 10 * SECOND, print, lambda: clock[0])
    made = iter(range(100))

    def put_aside(slow: object) -> None:
        put.append(next(made))
        steps._due = None
        steps._quiet_until = clock[0] + steps._ring_s

    monkeypatch.setattr(steps, "_save", put_aside)
    monkeypatch.setattr(steps, "_new", lambda: iter(["slow"]))
    for second in range(40):
        clock[0] = float(second)
        steps.look()
    # Seconds 2, 14 (12 and the two that it settles for), 26, 38.
    assert put == [0, 1, 2, 3]


# ---- the options ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--every", "1000"], "--every 1000: write steps, e.g. 1000:10"),
        (["--every", "10:1000"], "the second number must be above 0 and below the first"),
        (["--every", "10:0"], "the second number must be above 0 and below the first"),
        (["--every", "10min:5"], "write steps"),
        (["--every", "a:b"], "write steps"),
        (["--every", "10:1", "--delay", "5s"], "--every in steps cannot be combined with --delay"),
        (
            ["--every", "10s:1s", "--steps", "1:5"],
            "--every in times cannot be combined with --steps",
        ),
        (["--every", "10s:1s", "--profiler-api"], "--profiler-api"),
        (["--keep", "soon"], "--keep: 'soon' is not a time"),
        (["--keep", "1s"], "2s is the minimum"),
        (["--max-size", "much"], "'much' is not a size; write 500MB or 2GB"),
        (["--max-size", "1kB"], "1MB is the minimum"),
        (["--max-size", "1GB", "--keep", "5min"], "exclude each other"),
        (["--when-slow", "2x"], "needs --keep"),
        (["--when-slow", "1x", "--keep", "5min"], "not a factor above 1"),
        (["--when-slow", "slow", "--keep", "5min"], "write 2x"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    options: list[str], words: str, tmp_path: Path
) -> None:
    ran = command.gputrace("record", "-o", tmp_path / "t", *options, "--", "true")
    command.assert_refused(ran, 125, words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("keep_ns", "max_bytes", "expected"),
    [
        (0, 0, Limits()),
        (300 * SECOND, 0, Limits(30 * SECOND, 10)),
        (2 * SECOND, 0, Limits(SECOND, 2)),
        (0, 10**9, Limits(max_bytes=10**9)),
    ],
)
def test_a_ring_has_ten_files_or_such_of_a_second(
    keep_ns: int, max_bytes: int, expected: Limits
) -> None:
    assert ring(keep_ns, max_bytes) == expected
