"""Files that recorded processes leave, and how the program gets along with their writing."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from gputrace.collectors.finalize import merge
from gputrace.collectors.spool.host_events import join_hosts, read_host_file
from gputrace.errors import InputError
from tests.helpers.programs import LOOP, SECOND, Program, event_names, numbers

AUTOGRAD: Final = {"torch/autograd/__init__.py": "def backward(tensors): pass"}


def test_waits_and_steps_are_recorded_with_their_times_threads_and_names(torch: Program) -> None:
    out = torch.quietly(
        LOOP + "import os, time, _thread\n"
        "optimizer = Optimizer()\n"
        "print(os.getpid(), _thread.get_native_id(), time.time_ns())\n"
        "for item in _BaseDataLoaderIter('abc', 0.02): time.sleep(0.01); optimizer.step()\n"
        "print(time.time_ns())\n"
    )
    pid, thread, begin, end = map(int, out.split())
    events = torch.events()
    waits, steps = events.records["data_wait"], events.records["step"]
    assert torch.files()[0].name == f"{os.uname().nodename}.{pid}.host"
    assert (events.pid, events.host, events.whole) == (pid, os.uname().nodename, True)
    assert numbers(events, "data_wait") == [0, 0, 0, 1]
    assert numbers(events, "step") == [0, 1, 2]
    assert set(event_names(events, "data_wait")) == {
        "torch.utils.data.dataloader._BaseDataLoaderIter"
    }
    assert set(event_names(events, "step")) == {"torch.optim.Optimizer.step"}
    assert {*waits["thread"], *steps["thread"]} == {thread}
    assert begin <= waits["start"][0] < steps["end"][-1] <= end
    assert (waits["end"] - waits["start"] >= 20_000_000).all()
    assert steps["start"].tolist() == [waits["start"][0], *steps["end"][:-1]]
    assert (np.diff(steps["end"]) >= 30_000_000).all()
    assert abs(int(events.clocks["realtime"][0]) - begin) < 10 * SECOND


def test_only_the_owner_can_read_a_file_which_holds_nothing_secret(
    torch: Program,
) -> None:
    torch.quietly(LOOP + "Optimizer().step()", API_TOKEN="planted-secret", RANK="3")
    path = torch.files()[0]
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"planted" not in path.read_bytes()
    assert torch.events().info["RANK"] == "3"


def test_files_have_high_descriptors_which_other_programs_do_not_inherit(torch: Program) -> None:
    out = torch.quietly(
        LOOP + "import os, fcntl\n"
        "Optimizer().step()\n"
        "ours = [int(f) for f in os.listdir('/proc/self/fd') if int(f) > 2]\n"
        "ours = [f for f in ours if os.path.exists(f'/proc/self/fd/{f}')]\n"
        "print(*[(f, fcntl.fcntl(f, fcntl.F_GETFD)) for f in sorted(ours)])\n"
    )
    # The second one is the kernel's, of the thread's times.
    assert out == "(200, 1) (201, 1)\n"


def test_pthread_ids_are_recorded_once_if_asked_for(torch: Program) -> None:
    script = LOOP + "import threading; optimizer = Optimizer()\n"
    script += "for i in range(3): optimizer.step()\n"
    script += "print(threading.get_native_id(), threading.get_ident())"
    out = torch.quietly(script, GPUTRACE_PTHREADS="1")
    thread, pthread = out.split()
    told = {key: value for key, value in torch.events().info.items() if "pthread" in key}
    assert told == {f"pthread.{thread}": pthread}


def test_a_wait_within_a_wait_is_recorded_once(torch: Program) -> None:
    torch.quietly(
        LOOP + "inner = _BaseDataLoaderIter('abc')\n"
        "class Outer(_BaseDataLoaderIter):\n    pass\n"
        "print(list(Outer(inner)))\n"
    )
    assert numbers(torch.events(), "data_wait") == [0, 0, 0, 1]


def test_threads_record_under_their_own_ids(torch: Program) -> None:
    out = torch.quietly(
        LOOP + "import threading\n"
        "def read():\n"
        "    print(threading.get_native_id(), flush=True)\n"
        "    for _ in _BaseDataLoaderIter(range(2000)): pass\n"
        "threads = [threading.Thread(target=read) for _ in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
    )
    waits = torch.events().records["data_wait"]
    ids, counts = np.unique(waits["thread"], return_counts=True)
    assert set(ids) <= set(map(int, out.split()))
    assert counts.sum() == 4 * 2001


def test_a_wait_leaves_writing_to_the_end_of_its_step(torch: Program) -> None:
    """Writing gives Python's lock away: within a wait that the program clocks it would count."""
    out = torch.quietly(
        LOOP + "import os, time\nwritten, at = [], ['step']\n"
        "write, stat = os.write, os.fstat\n"
        "def noted(function): return lambda *a: (written.append(at[0]), function(*a))[1]\n"
        "optimizer, items = Optimizer(), iter(_BaseDataLoaderIter(range(12)))\n"
        "os.write, os.fstat = noted(write), noted(stat)\n"
        "for _ in range(12):\n"
        "    at[0] = 'wait'; next(items); at[0] = 'step'; time.sleep(0.15); optimizer.step()\n"
        "os.write, os.fstat = write, stat\n"
        "print(written.count('wait'), written.count('step') > 4)\n"
    )
    assert out.split() == ["0", "True"]


def test_phases_of_short_steps_are_written_with_the_steps(torch: Program) -> None:
    """Not at the end of a backward pass, after which a GPU may wait for the next launch."""
    torch.write(AUTOGRAD)
    torch.quietly(
        LOOP + "import sys, time\nfrom torch.autograd import backward\noptimizer = Optimizer()\n"
        "from _gputrace_hooks.host_file import HostFile\n"
        "append, found, start = HostFile.append, set(), time.time()\n"
        "def watched(*args):\n"
        "    frame, places = sys._getframe(), set()\n"
        "    while frame and 'step_ended' not in places:\n"
        "        places.add(frame.f_code.co_name); frame = frame.f_back\n"
        "    found.update(places)\n"
        "    return append(*args)\n"
        "HostFile.append = watched\n"
        "while time.time() < start + 0.8: backward([]); optimizer.step()\n"
        "assert 'step_ended' in found and 'inside' not in found, found\n"
    )
    events = torch.events()
    assert len(events.records["phase"]) == len(events.records["step"])


@pytest.mark.parametrize("pause", [0, 0.003, 0.3])
def test_sigkill_loses_a_second_at_most(torch: Program, pause: float) -> None:
    process = torch.start(
        LOOP + "import time\noptimizer = Optimizer()\n"
        "optimizer.step(); print('ready', flush=True)\n"
        f"for item in _BaseDataLoaderIter(iter(int, 1), {pause}): optimizer.step()\n"
    )
    with process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(1.2)
        killed = time.time_ns()
        process.send_signal(signal.SIGKILL)
        process.communicate()
    events = torch.events()
    assert killed - SECOND < events.records["step"]["end"].max() < killed + SECOND
    assert numbers(events, "step") == list(range(len(events.records["step"])))


def test_events_before_a_long_silence_survive_sigkill(torch: Program) -> None:
    with torch.start(
        LOOP + "import time\noptimizer = Optimizer()\n"
        "for item in _BaseDataLoaderIter('ab'): optimizer.step()\n"
        "print('now', flush=True)\ntime.sleep(60)\n"
    ) as process:
        assert process.stdout.readline() == b"now\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert numbers(torch.events(), "step") == [0, 1]
    assert numbers(torch.events(), "data_wait") == [0, 0, 1]


def test_a_full_disk_ends_the_recording_but_not_the_program(torch: Program) -> None:
    out = torch.quietly(
        LOOP + "import resource, sys, time\nsys.dont_write_bytecode = True\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "optimizer = Optimizer()\n"
        "for _ in range(4000): optimizer.step(); time.sleep(0.0002)\n"
        "print('done')\n"
    )
    assert out == "done\n"
    events = torch.events()
    assert events.whole
    assert 0 < len(events.records["step"]) < 100
    # All that could not be written is counted, in the place that was kept for it.
    assert events.stopped is not None
    at, lost, why = events.stopped
    assert lost + len(events.records["step"]) >= 4000  # with counters
    assert why == "nothing more could be written: File too large"
    assert events.records["step"]["end"][-1] < at < time.time_ns()
    assert events.info["python"]
    merged = merge(torch.spool, torch.folder / "t.sqlite", {"backend": "host"})
    assert merged.notes == (
        f"process {events.pid}, {why}; all after {(at - events.started) / 1e9:.1f} s is missing",
    )
    with closing(sqlite3.connect(torch.folder / "t.sqlite")) as database:
        found = database.execute("SELECT records, reason FROM GPUTRACE_LOSS").fetchall()
    assert found == [(lost, why)]


def test_a_disk_that_is_full_from_the_start_leaves_an_empty_file(torch: Program) -> None:
    out = torch.quietly(
        "import resource, sys\nsys.dont_write_bytecode = True\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        + LOOP
        + "optimizer = Optimizer()\nfor _ in range(9): optimizer.step()\nprint('done')\n"
    )
    assert out == "done\n"
    (path,) = torch.spool.iterdir()
    assert path.read_bytes() == b""


def test_a_program_that_closes_all_files_may_use_our_descriptor(torch: Program) -> None:
    torch.quietly(
        LOOP + "import os\noptimizer = Optimizer(); optimizer.step()\n"
        "os.closerange(3, 300)\n"
        "fd = os.open('own', os.O_WRONLY | os.O_CREAT); os.dup2(fd, 200)\n"
        "for _ in range(20): optimizer.step()\n"
    )
    assert (torch.folder / "own").read_bytes() == b""
    assert numbers(torch.events(), "step") == list(range(21))


# ---- processes ----


def test_a_forked_process_that_records_nothing_leaves_the_file_to_its_parent(
    torch: Program,
) -> None:
    torch.quietly(
        LOOP + "import os, time\noptimizer = Optimizer()\n"
        "for _ in range(30): optimizer.step()\n"
        "pid = os.fork()\nif not pid: time.sleep(0.01); raise SystemExit\nos.waitpid(pid, 0)\n"
        "optimizer.step()\n"
    )
    assert numbers(torch.events(), "step") == list(range(31))


def test_a_forked_child_that_trains_writes_a_file_of_its_own(torch: Program) -> None:
    out = torch.quietly(
        LOOP + "import os, time, _thread\noptimizer = Optimizer()\n"
        "for _ in range(30): optimizer.step()\n"
        "pid = os.fork()\n"
        "for _ in range(10 if pid else 20): optimizer.step()\n"
        "if pid: os.waitpid(pid, 0)\n"
        "print(os.getpid(), flush=True)\n"
    )
    by_pid = {events.pid: events.records["step"] for events in torch.all_events()}
    child, parent = map(int, out.split())
    assert {pid: len(steps) for pid, steps in by_pid.items()} == {parent: 40, child: 20}
    assert by_pid[child]["number"].tolist() == list(range(20))
    assert set(by_pid[child]["thread"]) == {child}


# ---- signal handlers of the program ----


@pytest.mark.parametrize("called", ["os.fstat", "ctypes.CDLL"])
def test_an_exception_of_a_signal_handler_passes_through_the_hooks(
    program: Program, called: str
) -> None:
    """TimeoutError, which handlers of alarms raise, is an OSError, as are our own with files."""
    out = program.quietly(
        "import ctypes, os, signal, time, gputrace\n"
        "def handler(*_): raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, handler)\n"
        f"called = {called}\n"
        "def interrupted(*given, **named):\n"
        "    signal.raise_signal(signal.SIGALRM); return called(*given, **named)\n"
        "os.environ['GPUTRACE_LIBRARY'] = 'none.so'\n"
        f"gputrace.step(); {called} = interrupted\n"
        "try: time.sleep(0.3); gputrace.step()\n"
        "except TimeoutError: print('too late')\n"
        f"{called} = called; gputrace.step()\n"
    )
    assert out == "too late\n"
    assert numbers(program.events(), "step") == [0, 1, 2]


RAISERS: Final = """
import functools, os, signal
from _gputrace_hooks.host_file import is_handlers

def plain(number, frame): raise OSError
def rest(*_): raise OSError
def named(number, frame, *, hard=True, **more): raise OSError
def deep(number, frame): os.stat("/none/such")
def leading(what, number, frame): raise OSError
def gone(number, frame):
    del number, frame
    raise OSError
def passing(number, frame):
    signal.signal(number, signal.SIG_IGN)
    raise OSError

class Handler:
    def __call__(self, number, frame): raise OSError
    def method(self, number, frame): raise OSError
    @classmethod
    def of_class(cls, number, frame): raise OSError

def library(path, frame=None): return os.fsdecode(path)

def is_seen(handler, argument):
    signal.signal(signal.SIGUSR1, handler)
    try:
        # Python runs the handler within the library.
        before = os.fsdecode
        os.fsdecode = lambda path: os.kill(os.getpid(), signal.SIGUSR1) or before(path)
        try:
            library(argument)
        finally:
            os.fsdecode = before
    except Exception as error:
        return is_handlers(error)

handlers = [plain, rest, named, deep, functools.partial(leading, "x"), Handler(), Handler().method,
            Handler.of_class, lambda number, frame: plain(number, frame), gone, passing]
print(*(is_seen(handler, "x") for handler in handlers))
print(is_seen(signal.SIG_IGN, 1), is_seen(lambda *_: None, 1))
"""


def test_errors_of_signal_handlers_and_of_libraries_are_distinguished(program: Program) -> None:
    """A handler is a program's, however it is made; what a library raises in a hook is not."""
    handlers, libraries = program.quietly(RAISERS).splitlines()
    assert handlers.split() == ["True"] * 11
    assert libraries.split() == ["False"] * 2


def test_an_exception_of_a_signal_handler_passes_through_the_counting_of_steps(
    torch: Program,
) -> None:
    script = LOOP + "import signal\nfrom _gputrace_hooks import steps\n"
    script += "class Alarm(Exception): pass\n"
    script += "def handler(number, frame): raise Alarm\n"
    script += "signal.signal(signal.SIGALRM, handler)\n"
    script += "optimizer = Optimizer(); optimizer.step()\n"
    script += "steps.time_ns = lambda: signal.raise_signal(signal.SIGALRM)\n"
    script += "try: optimizer.step()\nexcept Alarm: print('rung')\n"
    assert torch.quietly(script) == "rung\n"


# ---- reading, and the cost ----


def test_a_truncated_file_gives_every_whole_record(torch: Program) -> None:
    torch.quietly(LOOP + "optimizer = Optimizer()\nfor _ in range(20): optimizer.step()")
    path = torch.files()[0]
    raw = path.read_bytes()
    counts = []
    for size in range(32, len(raw) + 1):
        path.write_bytes(raw[:size])
        events = join_hosts([read_host_file(path)])
        counts.append(len(events.records["step"]))
        assert numbers(events, "step") == list(range(counts[-1]))
    assert counts[-1] == 20
    assert sorted(counts) == counts
    assert set(counts) == set(range(21))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty"),
        (b"SQLite format 3\0" * 4, "not a file"),
        (b"GPUTRHST" + b"\x09" + b"\0" * 23, "version 9"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "node.1.host"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=words):
        join_hosts([read_host_file(path)])


COST: Final = """
import timeit
from _gputrace_hooks import recorder, steps, wrappers
from gputrace.marks import annotate

def cost(call, times=20000):
    return min(timeit.repeat(call, number=times, repeat=7)) / times * 1e9

def item(self): return self
timed, what = wrappers.timed(item, "item"), recorder.word("a")
def stretch():
    with annotate("a"): pass
owner = object
print("record", cost(lambda: recorder.record(1, recorder.time_ns(), what, 1)) - cost(lambda: None))
print("wait", cost(lambda: timed(0)) - cost(lambda: item(0)))
print("step", cost(lambda: steps.step_ended(what, 1, owner)) - cost(lambda: None))
print("annotation", cost(stretch) - cost(lambda: None))
"""


def test_a_call_costs_about_a_microsecond(
    program: Program, record_property: Callable[[str, object], None]
) -> None:
    costs = dict(line.split() for line in program.quietly(COST).splitlines())
    for name, nanoseconds in costs.items():
        record_property(f"{name} in ns", nanoseconds)
        # A machine under load is slower; this is to notice a mistake.
        assert float(nanoseconds) < 20_000
