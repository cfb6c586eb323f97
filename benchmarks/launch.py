"""Runs one command and says what it took: `python -I -S launch.py LIMIT_S OUT ERR COMMAND…`.

A script that stands alone and imports next to nothing. Linux reports as a process's peak memory
at least what its parent held when it was started, so the parent has to be small.
Prints seconds by the clock, in the program and in the system, peak KiB, peak KiB of anonymous
memory, which no file backs, the exit status (or minus the signal), and the processor's seconds of
each process, the command's own first. The peak is that of all processes together, where the command
starts others; then it is looked at every 20 ms, as anonymous memory always is, and pages that they
share count for each.
"""

import os
import signal
import sys
import threading
import time

WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


EVERY_S = 0.02
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


class Tree(threading.Thread):
    """Looks at the memory of a process and of all that it starts.

    Attributes:
        peak_kib: the most that two or more had together.
        anonymous_kib: the most memory beside what is mapped from files.
        cpu_s: processor time of each process, when it was last looked at.
    """

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.peak_kib = self.anonymous_kib = 0
        self.cpu_s: dict[int, float] = {}
        self._root = root

    def run(self) -> None:
        while True:
            time.sleep(EVERY_S)
            pids = [self._root]
            for pid in pids:
                pids += children(pid)
            self.cpu_s.update((pid, cpu_s(pid) or self.cpu_s.get(pid, 0.0)) for pid in pids)
            resident, mapped = map(sum, zip(*map(memory_kib, pids), strict=True))
            self.anonymous_kib = max(self.anonymous_kib, resident - mapped)
            if len(pids) > 1:
                self.peak_kib = max(self.peak_kib, resident)


def children(pid: int) -> list[int]:
    try:
        texts = []
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - pathlib is a heavy import
            with open(f"/proc/{pid}/task/{task}/children") as file:  # noqa: PTH123
                texts.append(file.read())
    except OSError:
        return []  # It has ended, or this system does not tell.
    return [int(child) for child in " ".join(texts).split()]


def memory_kib(pid: int) -> tuple[int, int]:
    """Return what a process has in memory, and how much of that is mapped from files."""
    try:
        with open(f"/proc/{pid}/statm") as file:  # noqa: PTH123
            _, resident, mapped, *_ = file.read().split()
    except (OSError, ValueError):
        return 0, 0
    return int(resident) * PAGE_KIB, int(mapped) * PAGE_KIB


def cpu_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return TICK_S * (int(fields[11]) + int(fields[12]))


def main(limit_s: float, out: str, err: str, command: list[str]) -> None:
    """Ends the command, and all that it started, after `limit_s`."""
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, out, WRITE, 0o600),
        (os.POSIX_SPAWN_OPEN, 2, err, WRITE, 0o600),
    ]
    began = time.perf_counter()
    child = os.posix_spawnp(command[0], command, os.environ, file_actions=files, setsid=True)
    tree = Tree(child)
    tree.start()
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    _, status, usage = os.wait4(child, 0)
    wall = time.perf_counter() - began
    code = os.waitstatus_to_exitcode(status)
    peak = max(usage.ru_maxrss, tree.peak_kib)
    print(
        wall, usage.ru_utime, usage.ru_stime, peak, tree.anonymous_kib, code, *tree.cpu_s.values()
    )


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
