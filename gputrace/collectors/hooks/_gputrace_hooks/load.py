"""Load of the host: time of the thread that trains on a core or queued for one; collections.

Counters of the kernel are read at the end of a step, but at most every 10 ms, and less often where
that takes more than 30 µs, as in a sandbox that emulates /proc. The file that they are in stays
open: to open it takes longer than all the rest, and lets others have Python's lock three times.
Each count is recorded as the difference since the last read, when events are written. Once a second
or later, such that it takes 0.3 % of the time, the counters of the other threads of the process are
read, and the limits of its cores and its cgroup, and the clock of the thread's core where the
kernel has cpufreq; and what a process may hold ever more of: resident memory, open files and the
blocks of Python's allocator, which are about its objects (0.2 ms a million; to count them takes
gc.get_objects() 100 ms). Once, with the second of these, whether a library of OpenMP is loaded.
Each thread costs a file to open; hundreds that stay open might be more than the program may have.
So those that sleep are left out where the time of the process shows that they still do.

Garbage collections of a fifth of a millisecond or more are recorded by ``gc.callbacks``, with the
line where the program called them, if it did: no sample is taken in one. A program that empties
that list is left alone.
"""

import gc
import os
import sys
from resource import RUSAGE_THREAD, getrusage
from time import process_time

from . import recorder
from .host_file import Suppress, is_handlers, move_high, time_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_LEAST_COLLECTION_NS = 200000
_BETWEEN_LOOKS = 10000000
_BETWEEN_SCANS = 1000000000
_PATIENCE = 300
"""Between two looks, and between two scans, so many times what one takes."""
_USUAL_LOOK = 30000
_WORTH_NS = 1000000
_MOST_THREADS = 1000
_UNSEEN_NS = 10000000
_SLEEP_SCANS = 8
"""Threads that slept are read where the process was so much longer on cores than the others, and
each at one of so many scans."""
_NEW = 0, (0, 0), False
_OF_THIS_THREAD = "/proc/thread-self/schedstat"
_MOST_BYTES = 80
_LONG_READ_NS = 5000000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OPEN_FILES = "/proc/self/fd"

_OPENMP = b"libgomp", b"libiomp5", b"libomp"

_OF_THREAD = "on core", "queued", "process on core", "minor faults", "major faults", "preemptions"


class _Schedule:
    """The kernel's file of how long a thread was on a core and queued for one; it stays open."""

    def __init__(self) -> None:
        self._thread, self._file = 0, -1
        self._identity = 0, 0

    def read(self, thread: int) -> "tuple[int, int]":
        """Return the nanoseconds of this thread, of the system's id ``thread``; raises OSError."""
        if thread == self._thread:
            # The program may have closed all descriptors and opened its own.
            with Suppress(OSError, ValueError):
                return _times(os.pread(self._file, _MOST_BYTES, 0))
        self.close()
        self._file = move_high(os.open(_OF_THIS_THREAD, os.O_RDONLY | os.O_CLOEXEC))
        self._identity, self._thread = self._opened(), thread
        return _times(os.pread(self._file, _MOST_BYTES, 0))

    def close(self) -> None:
        """Close the file, if the descriptor is still ours."""
        try:
            if self._thread and self._opened() == self._identity:
                os.close(self._file)
        except OSError as error:
            if is_handlers(error):
                raise
        self._thread = 0

    def _opened(self) -> "tuple[int, int]":
        status = os.fstat(self._file)
        return status.st_dev, status.st_ino


class _Looks:
    """Counts at the last look, of one process and thread."""

    def __init__(self) -> None:
        self.schedule = _Schedule()
        # Those to record: thread, the last look, this one, and what was counted at each.
        self.taken: list[tuple[int, int, int, tuple[int, ...], tuple[int, ...]]] = []
        self.due = self.scan_due = 0
        self.took = _USUAL_LOOK
        self.at, self.scanned = 0, 0
        self.thread = 0
        self.counts: tuple[int, ...] = ()
        # Threads by id: when they were read, their times, and whether they slept before.
        self.threads: dict[int, tuple[int, tuple[int, int], bool]] = {}
        self.scans = self.spent = 0
        self.throttled = self.pressure = -1
        self.is_blind = self.knows_openmp = False
        self.has_clock = True
        self.collection_began = 0
        self.called = ""


_looks = _Looks()


def step_ended(now: int) -> None:
    """Record what the thread that marks steps has used since the last read."""
    looks = _looks
    if looks.at <= now < looks.due or looks.is_blind:
        return
    # From the first step on: a process that trains nothing should leave no file.
    if not looks.at and _watch_collection not in gc.callbacks:
        gc.callbacks.append(_watch_collection)
    looks.due = now + _BETWEEN_LOOKS
    begun = time_ns()
    try:
        thread = recorder.thread_id()
        used = getrusage(RUSAGE_THREAD)
        counts = (
            *looks.schedule.read(thread),
            int(process_time() * 1e9),
            used.ru_minflt,
            used.ru_majflt,
            used.ru_nivcsw,
        )
    except (OSError, ValueError) as error:
        if is_handlers(error):
            raise
        # A kernel without schedstat, or no descriptor is left.
        looks.is_blind = True
        return
    if thread == looks.thread and looks.counts:
        looks.taken.append((thread, looks.at, now, looks.counts, counts))
    looks.at, looks.thread, looks.counts = now, thread, counts
    # One that lost its core to others says nothing of the next.
    looks.took = max(0, min(time_ns() - begun, 2 * looks.took))
    looks.due = now + max(_BETWEEN_LOOKS, _PATIENCE * looks.took)


def _record_taken() -> None:
    taken = _looks.taken
    while taken:
        thread, since, now, before, counts = taken.pop(0)
        for name, then, count in zip(_OF_THREAD, before, counts):
            if count > then:
                recorder.record_of(thread, since, now, recorder.word(name), counter(count - then))


def _watch_collection(phase: str, info: "dict[str, Any]") -> None:
    """Record a collection; raise nothing, which Python would print."""
    looks = _looks
    try:
        now = time_ns()
        start, looks.collection_began = looks.collection_began, now if phase == "start" else 0
        if phase == "start":
            looks.called = _caller(sys._getframe(1)) if _is_called() else ""
        elif 0 < start <= now - _LEAST_COLLECTION_NS:
            text = "generation {}".format(info.get("generation"))
            what = recorder.word(text + looks.called)
            recorder.record_of(recorder.thread_id(), start, now, what, recorder.GC)
    except Exception:
        looks.collection_began = 0


def _caller(frame: "Any") -> str:
    """Return where the program called for a collection, or, if none of its own code did, where a
    library's outermost call stands.
    """
    while frame.f_back is not None and "/site-packages/" in frame.f_code.co_filename:
        frame = frame.f_back
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    return f", called at {code.co_filename}:{frame.f_lineno} {name}"


def _is_called() -> bool:
    """Return True if the program asked for the collection that begins: one by itself comes when
    Python has counted more new objects than its threshold (devguide, "Garbage collector design").
    """
    # Some of the counted may be gone by the time that it begins.
    return not gc.isenabled() or 10 * gc.get_count()[0] < 9 * gc.get_threshold()[0]


def scheduled(path: str) -> "tuple[int, int]":
    """Return the nanoseconds that a thread was on a core, and queued for one."""
    return _times(_read(path))


def _times(text: bytes) -> "tuple[int, int]":
    on_core, queued, _ = text.split()
    return int(on_core), int(queued)


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def record_counts(counts: "dict[str, float]") -> None:
    """Record the counts above 0, at this moment; it raises nothing of ours."""
    try:
        now, thread = time_ns(), recorder.thread_id()
        for name, value in counts.items():
            if value > 0:
                recorder.record_of(thread, now, now, recorder.word(name), counter(int(value)))
    except Exception:
        recorder.note_ours("counting samples and tokens")


def counter(value: int) -> int:
    """Return the kind of an event with a count of 48 bits in place of its rank and number."""
    return recorder.COUNTER | (value >> 32 & 0xFFFF) << 16 | (value & 0xFFFFFFFF) << 32


def scan() -> None:
    """Record what else wants cores, when it is due; called at the end of a step only."""
    looks, now = _looks, time_ns()
    if not looks.at or looks.is_blind or looks.scanned <= now < looks.scan_due:
        return
    # Should it fail, in a second again.
    looks.scan_due = now + _BETWEEN_SCANS
    try:
        since, looks.scanned = looks.scanned, now
        for name, value in _of_machine(looks):
            recorder.record_of(looks.thread, since or now, now, recorder.word(name), counter(value))
        _scan_threads(looks, now)
        if since and not looks.knows_openmp:
            looks.knows_openmp = True
            with open("/proc/self/maps", "rb") as maps:
                text = maps.read()
            for library in (each for each in _OPENMP if b"/" + each in text):
                what = recorder.word(library.decode())
                recorder.record_of(looks.thread, now, now, what, counter(1))
    except Exception as error:
        if is_handlers(error):
            raise
        if not isinstance(error, (OSError, ValueError, IndexError)):
            recorder.note_failure("looking at threads")
    took = time_ns() - now
    looks.scan_due = now + max(_BETWEEN_SCANS, _PATIENCE * took)


def _scan_threads(looks: _Looks, now: int) -> None:
    """Record the times of the other threads, of sleepers only where these can have run."""
    threads = [int(name) for name in os.listdir("/proc/self/task")[:_MOST_THREADS]]
    before, looks.threads = looks.threads, {}
    spent, looks.spent = looks.spent, int(process_time() * 1e9)
    looks.scans += 1
    unseen, sleepers = looks.spent - spent, []
    for thread in threads:
        if before.get(thread, _NEW)[2]:
            sleepers.append(thread)
        else:
            unseen -= _scan_thread(looks, thread, before.get(thread, _NEW), now)
    for thread in sleepers:
        if unseen >= _UNSEEN_NS or not (looks.scans + thread) % _SLEEP_SCANS:
            _scan_thread(looks, thread, before[thread], now)
        else:
            looks.threads[thread] = before[thread]


def _scan_thread(
    looks: _Looks, thread: int, before: "tuple[int, tuple[int, int], bool]", now: int
) -> int:
    """Record what a thread has used since it was read before; return its nanoseconds on a core."""
    then, old, _ = before
    with Suppress(OSError):
        times = scheduled(f"/proc/self/task/{thread}/schedstat")
        used = [new - count for new, count in zip(times, old)]
        looks.threads[thread] = now, times, then > 0 and max(used) < _WORTH_NS
        if then:
            for name, time in zip(("on core", "queued"), used):
                if time >= _WORTH_NS and thread != looks.thread:
                    recorder.record_of(thread, then, now, recorder.word(name), counter(time))
            return used[0]
    return 0


def _of_machine(looks: _Looks) -> "Iterator[tuple[str, int]]":
    """Yield counts since the last scan, and the present values of what is not counted."""
    yield "cores", len(os.sched_getaffinity(0))
    yield "runnable", int(_read("/proc/loadavg").split()[3].split(b"/")[0])
    if looks.has_clock:
        begun, clock = time_ns(), _core_kilohertz()
        # Linux 4.15 to 5.17 on x86 sleep for 10 ms to measure it: in one step, for which all wait.
        looks.has_clock = clock > 0 and time_ns() - begun < _LONG_READ_NS
        if clock:
            yield "core kHz", clock
    quota = _quota()
    if quota:
        yield "quota", quota
    for name, value in (("throttled", _throttled()), ("pressure", _pressure())):
        before = getattr(looks, name)
        setattr(looks, name, value)
        if value > before >= 0:
            yield name, value - before
    yield "resident memory", int(_read("/proc/self/statm").split()[1]) * _PAGE_BYTES
    # From Linux 6.2 on, the number is the folder's size: to list thousands takes milliseconds.
    yield "open files", os.stat(_OPEN_FILES).st_size or len(os.listdir(_OPEN_FILES)) - 1
    if hasattr(sys, "getallocatedblocks"):
        yield "Python blocks", sys.getallocatedblocks()


_CLOCK_OF = "/sys/devices/system/cpu/cpu{}/cpufreq/scaling_cur_freq"
_PROCESSOR = 36
"""Field of /proc/*/stat, counted from the one after the thread's name (proc(5): the 39th)."""


def _core_kilohertz() -> int:
    """Return the clock of the core that this thread is on; 0 where the kernel does not say."""
    with Suppress(OSError, ValueError, IndexError):
        fields = _read("/proc/thread-self/stat").rpartition(b")")[2].split()
        return int(_read(_CLOCK_OF.format(int(fields[_PROCESSOR]))))
    return 0


_cgroups: "list[str]" = []


def _groups() -> "list[str]":
    """Return the folders of the control groups that may limit its cores, innermost first."""
    if not _cgroups:
        for line in _read("/proc/self/cgroup").decode().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                root = "/sys/fs/cgroup" + ("/cpu" if controllers else "")
                while True:
                    _cgroups.append(root + path)
                    if path in ("/", ""):
                        break
                    path = os.path.dirname(path)
        _cgroups[:] = [path for path in _cgroups if os.path.exists(path + "/cpu.stat")] or [""]
    return _cgroups


def _quota() -> int:
    """Return the maximum thousandths of a core that the groups allow; 0 without a limit."""
    limits = []
    for folder in _groups():
        with Suppress(OSError):
            if os.path.exists(folder + "/cpu.max"):
                most, period = _read(folder + "/cpu.max").split()
            else:
                most = _read(folder + "/cpu.cfs_quota_us").strip()
                period = _read(folder + "/cpu.cfs_period_us").strip()
            if most not in (b"max", b"-1"):
                limits.append(1000 * int(most) // int(period))
    return min(limits) if limits else 0


def _throttled() -> int:
    """Return the nanoseconds for which a group's quota has stopped a core's worth of threads."""
    most = 0
    for folder in _groups():
        if folder:
            for line in _read(folder + "/cpu.stat").splitlines():
                name, _, value = line.partition(b" ")
                scale = {b"throttled_usec": 1000, b"throttled_time": 1}.get(name, 0)
                most = max(most, scale * int(value))
    return most


def _pressure() -> int:
    """Return the nanoseconds for which some thread of the machine was queued; 0 if unknown."""
    with Suppress(OSError):
        return 1000 * int(_read("/proc/pressure/cpu").split()[4].partition(b"=")[2])
    return 0


def _in_forked_child() -> None:
    global _looks
    _looks.schedule.close()
    _looks = _Looks()


recorder.before_write.append(_record_taken)
recorder.on_write.append(scan)
recorder.on_fork.append(_in_forked_child)
