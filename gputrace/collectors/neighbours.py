"""Other processes on the cards and the cores of a recording.

A process belongs to the recording if its recorder started it, if it inherited the recording's
folder in its environment, or if it is a task of the same job. All others are neighbours. Their
commands' names are kept only for the user's own processes. What a container hides is not guessed:
a process that cannot be seen has no pid.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, Final

from gputrace.collectors.job_tasks import find_task
from gputrace.collectors.processes import PARENT, name_of, pids, read_environment, read_stat
from gputrace.units import format_ranges

PROCESS: Final = {
    "timeNs": "ns of CLOCK_REALTIME at the end of the look",
    "durationNs": "ns that the look covers",
    "gpu": "index of the card; NULL: the cores that the recording's processes may use",
    "pid": "as seen by the recorder; NULL: none is listed for the card; of the cores: programs "
    "that cannot be seen here",
    "name": "of the command, if the process is of the same user",
    "isRecorded": "1 if it belongs to the recording",
    "use": "part of the time in which its kernels ran, 0 to 1; of the cores: how many it used",
    "memoryUsed": "bytes of the card",
    "sharing": "MPS: at the same time as others, else in turns; MIG 1/0: the instances of GPU and "
    "computation that it runs in; SMT: it runs only on other threads of the recording's cores",
    "cpus": "cores that both may use, of other processes: 0-3",
    "numaNode": "node of these cores, if there is one",
}
"""Columns of the use of a card or of the cores by one process."""

Row = list[Any]
"""Values of `PROCESS`."""

_PERIOD_NS: Final = 1_000_000_000
_OF_CARDS, _OF_USE, _OF_CORES = 4000, 5000, 4000
"""Minimum time since the start until a look, as a multiple of the processor time that those before
it have taken, by what is looked at. All looks take 0.07 % of a core."""
_LATEST: Final = 2
"""Maximum time until the next look, as a multiple of the time since the start: a look while a
program starts CUDA takes 70 ms, and would otherwise be the last one for minutes."""
_KEPT_NS: Final = 60_000_000_000
"""Time after which the processes of a card are written again although no other one is there."""
_NO_INSTANCE: Final = 0xFFFF_FFFF
_NOTHING: Final = (0, 6)
"""Codes that say that no process has computed; the binding raises an error for success, too."""
_KERNEL_THREAD: Final = 0x0020_0000
_FLAGS, _START = 6, 19
_OWN, _USER, _USER_OF_CHILDREN = slice(11, 13), slice(11, 12), slice(13, 14)
_USER_OF_ALL, _ALL = slice(11, 15, 2), slice(11, 15)
"""Fields of `read_stat`, as proc(5) counts, less 3."""
_OURS_CORES: Final = 0.05
_NAMED_CORES: Final = 0.1
_HIDDEN_CORES: Final = 0.5
"""Minimum cores that a process of the recording uses for its cores to count, that another one uses
to be written, and that ones which cannot be seen use together."""
_IS_RECORDED, _USE = 2, 3
_NOBODY: Final[Row] = [None, None, 0, *[None] * 5]
"""Columns of a process from `pid` on, and those of none."""
_MOST_NAMED: Final = 8
_SYSTEM: Final = Path("/sys/devices/system")


class Pace:
    """Time of the next look, by the processor time that all looks have taken.

    A look may also be made before it is due; its end counts it.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._due = self._begun = self._taken = 0
        self._start = time.monotonic_ns()

    def is_due(self) -> bool:
        """Begin a look; return True if it is time for one."""
        self._begun = time.process_time_ns()
        return time.monotonic_ns() >= self._due

    def end(self) -> None:
        """End a look."""
        self._taken += time.process_time_ns() - self._begun
        now = time.monotonic_ns()
        due = self._start + self._patience * self._taken
        self._due = max(now + _PERIOD_NS, min(due, now + _LATEST * (now - self._start)))


class RunProcesses:
    """Processes of a recording into a folder by the process ``recorder``."""

    def __init__(self, folder: Path, recorder: int) -> None:
        self._folder, self._recorder = os.path.realpath(folder), recorder
        self._known: dict[tuple[int, bytes], bool] = {}
        task = find_task(os.environ)
        self._job = "" if task is None else task.job

    def has(self, pid: int, status: Sequence[bytes] | None = None) -> bool:
        """Return whether a process belongs to the recording; ``status``: its fields, if read."""
        status = status or read_stat(pid)
        if pid == self._recorder or status is None:
            return status is not None
        # Ids of ended processes are given to others.
        key = pid, status[_START]
        if key not in self._known:
            self._known[key] = self.has(int(status[PARENT])) or self._inherits(pid)
        return self._known[key]

    def _inherits(self, pid: int) -> bool:
        """Return whether the environment of a process names the folder, or the job."""
        variables = read_environment(pid) or {}
        if os.path.realpath(variables.get("GPUTRACE_DIR", "/")) == self._folder:
            return True
        task = find_task(variables) if self._job else None
        return task is not None and task.job == self._job


class CardProcesses:
    """Processes with a CUDA context on each card, as the driver lists them.

    How much they compute is asked only where one of them is a neighbour, and less often, since that
    takes 2 ms a card; and once a neighbour has ended.
    """

    def __init__(self, nv: Any, cards: Sequence[Any], run: RunProcesses, ago_ns: int = 0) -> None:
        """``ago_ns``: how long before now the first look begins."""
        self._nv, self._cards, self._run = nv, cards, run
        self._pace, self._pace_of_use = Pace(_OF_CARDS), Pace(_OF_USE)
        self._asked = [time.time_ns() - ago_ns] * len(cards)
        self._written: dict[int, tuple[int, set[int]]] = {}
        self._others: list[dict[int, Row]] = [{} for _ in cards]

    def look(self, *, anew: bool = False, last: bool = False) -> list[Row]:
        """Return the rows of a look if one is due; ``anew``: repeat those that are unchanged."""
        self._written = {} if anew else self._written
        if not self._pace.is_due() and not last:
            return []
        running = [self._running(card) for card in self._cards]
        self._pace.end()
        met = [
            {pid: row for pid, row in listed.items() if not row[_IS_RECORDED]} for listed in running
        ]
        is_due, asked = self._pace_of_use.is_due() or last, False
        rows = []
        for gpu, (listed, others) in enumerate(zip(running, met, strict=True)):
            ended = self._others[gpu].keys() - others.keys()
            ask = bool(ended or (is_due and others))
            rows += self._look_at(gpu, listed, others, ask=ask)
            asked |= ask
        if asked:
            self._pace_of_use.end()
        return rows

    def _running(self, card: Any) -> dict[int, Row]:
        """Return what the driver says of each process of a card: columns from `pid` on."""
        running = {}
        for kind in ("Compute", "MPSCompute"):
            for each in self._list(kind, card):
                if (name_of(each.pid, any_user=True) or "").startswith("nvidia-cuda-mps"):
                    continue  # It computes for its clients, which are listed too.
                instances = each.gpuInstanceId, each.computeInstanceId
                sharing = None if _NO_INSTANCE in instances else "MIG {}/{}".format(*instances)
                sharing = "MPS" if kind == "MPSCompute" else sharing
                is_ours = int(self._run.has(each.pid))
                row = [each.pid, name_of(each.pid), is_ours, None, each.usedGpuMemory, sharing]
                running[each.pid] = [*row, None, None]
        return running

    def _look_at(
        self, gpu: int, running: dict[int, Row], others: dict[int, Row], *, ask: bool
    ) -> list[Row]:
        now, since = time.time_ns(), self._asked[gpu]
        written, before = self._written.get(gpu, (0, None))
        is_kept = before == running.keys() and now - written < _KEPT_NS
        present = self._others[gpu] | others
        if (present and not ask) or (not present and is_kept):
            self._asked[gpu], self._others[gpu] = since if present else now, present
            return []
        self._asked[gpu], self._others[gpu] = now, others
        self._written[gpu] = now, set(running)
        uses = self._uses(self._cards[gpu], since) if present else None
        listed = running | present
        for pid, row in listed.items():
            # One that has ended may have computed without the driver saying so.
            unlisted = 0.0 if pid in running else None
            row[_USE] = None if uses is None else uses.get(pid, unlisted)
        # That none is listed is written too: so it may be in a container.
        return [[now, now - since, gpu, *row] for row in listed.values() or [_NOBODY]]

    def _list(self, kind: str, card: Any) -> Sequence[Any]:
        """Return the processes of a kind that the driver lists; none if it refuses."""
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        for function in (name, f"{name}_v2"):  # The second before driver 510.
            # The binding also raises an exception of its own, for a driver older than itself.
            with suppress(Exception):
                return [] if card is None else list(getattr(self._nv, function)(card))
        return []

    def _uses(self, card: Any, since: int) -> dict[int, float] | None:
        """Return the mean use since a moment by process; None where the driver does not say."""
        try:
            answers = self._nv.nvmlDeviceGetProcessUtilization(card, since // 1000)
        except AttributeError:
            return None
        except self._nv.NVMLError as error:
            return {} if error.value in _NOTHING else None
        used: dict[int, list[int]] = {}
        for answer in answers:
            used.setdefault(answer.pid, []).append(min(answer.smUtil, 100))
        return {pid: sum(each) / len(each) / 100 for pid, each in used.items()}


@dataclass(slots=True)
class _Moment:
    """Status of all processes but the kernel's, and the ticks of each core in user mode."""

    at: int
    cores: dict[int, int]
    processes: dict[int, list[bytes]]

    @classmethod
    def now(cls, of_kernel: set[int]) -> _Moment:
        """Read them, and add to the known threads of the kernel, which are not read again."""
        read = {pid: each for pid in {*pids()} - of_kernel if (each := read_stat(pid))}
        of_kernel |= {pid for pid, each in read.items() if int(each[_FLAGS]) & _KERNEL_THREAD}
        lines = re.findall(rb"(?m)^cpu(\d+) (\d+) (\d+)", Path("/proc/stat").read_bytes())
        cores = {int(cpu): sum(map(int, ticks)) for cpu, *ticks in lines}
        processes = {pid: each for pid, each in read.items() if pid not in of_kernel}
        return cls(time.monotonic_ns(), cores, processes)

    def ticks(self, pid: int, fields: slice = _OWN) -> int:
        """Return the processor time of a process; 0 of one that is not there."""
        return sum(map(int, self.processes.get(pid, ())[fields]))


class CoreNeighbours:
    """Watch of the cores that the recording's processes use, for other programs on them."""

    def __init__(self, folder: Path) -> None:
        self._run, self._pace = RunProcesses(folder, os.getpid()), Pace(_OF_CORES)
        self._path = folder / f"{socket.gethostname()}.{os.getpid()}.cores.jsonl"
        self._before: _Moment | None = None
        self._ours: set[int] = set()
        self._of_kernel: set[int] = set()

    def look(self) -> None:
        """Write what others have used since the last look, if a look is due."""
        if not self._pace.is_due():
            return
        with suppress(OSError, ValueError, IndexError):
            before, self._before = self._before, _Moment.now(self._of_kernel)
            if before is not None and (rows := list(self._compare(before, self._before))):
                with FileIO(self._path, "a") as file:
                    file.write(json.dumps({"processes": rows}).encode() + b"\n")
        self._pace.end()

    def _compare(self, before: _Moment, after: _Moment) -> Iterator[Row]:
        """Yield a row for each program that has used the recording's cores between two moments."""
        length, processes = after.at - before.at, after.processes
        ticks = length / 1e9 * os.sysconf("SC_CLK_TCK")

        def grown(pid: int, fields: slice = _OWN) -> int:
            return after.ticks(pid, fields) - before.ticks(pid, fields)

        used = {pid: grown(pid) / ticks for pid in processes}
        ended = self._ours - processes.keys()
        new = {p for p in processes if grown(p, _ALL) and self._run.has(p, processes[p])}
        self._ours = ours = (self._ours - ended) | new
        busy = (pid for pid in ours if used[pid] >= _OURS_CORES and pid != os.getpid())
        cpus = set[int]().union(*map(_affinity, busy))
        # Children that were waited for are in the time of their parent, from their start on.
        waited = sum(grown(pid, _USER_OF_CHILDREN) for pid in ours)
        waited -= sum(before.ticks(pid, _USER_OF_ALL) for pid in ended)
        own = sum(grown(pid, _USER) for pid in ours) + max(waited, 0)
        left = sum(after.cores.get(cpu, 0) - before.cores.get(cpu, 0) for cpu in cpus) - own
        twins = set[int]().union(*map(_siblings, cpus)) - cpus
        others = [pid for pid in used.keys() - ours if used[pid] >= _NAMED_CORES]
        now = time.time_ns()
        for pid in sorted(others, key=lambda pid: -used[pid])[:_MOST_NAMED]:
            allowed = _affinity(pid)
            shared, sharing = allowed & cpus, None
            if not shared:
                shared, sharing = allowed & twins, "SMT"
            # One that may use other cores too has used these for at most what was left of them.
            use = used[pid] if allowed <= shared else min(used[pid], left / ticks)
            if shared and use >= _NAMED_CORES:
                left -= 0 if sharing else min(grown(pid, _USER), round(use * ticks))
                row = [now, length, None, pid, name_of(pid), 0, round(use, 3), None, sharing]
                yield [*row, *_where(shared)]
        if cpus and left >= _HIDDEN_CORES * ticks:
            row = [now, length, None, None, None, 0, round(left / ticks, 3), None, None]
            yield [*row, *_where(cpus)]


def _affinity(pid: int) -> set[int]:
    try:
        return os.sched_getaffinity(pid)
    except OSError:
        return set()


def _siblings(cpu: int) -> frozenset[int]:
    """Return the hardware threads of a core's unit, with its own; empty if unknown."""
    return _cpus_in(_SYSTEM / f"cpu/cpu{cpu}/topology/thread_siblings_list")


@cache
def _cpus_in(path: Path) -> frozenset[int]:
    try:
        runs = [run.partition("-") for run in path.read_text("ascii").strip().split(",") if run]
        return frozenset(
            cpu for first, _, last in runs for cpu in range(int(first), int(last or first) + 1)
        )
    except (OSError, ValueError):
        return frozenset()


def _where(cpus: Collection[int]) -> tuple[str, int | None]:
    """Return cores as `0-3`, and their NUMA node, if there is one."""
    nodes = [
        int(path.name.removeprefix("node"))
        for path in _SYSTEM.glob("node/node[0-9]*")
        if not _cpus_in(path / "cpulist").isdisjoint(cpus)
    ]
    return format_ranges(sorted(cpus)), nodes[0] if len(nodes) == 1 else None
