"""Runs one command and says what it took: `python -I -S launch.py LIMIT_S OUT ERR COMMAND…`.

A script that stands alone and imports next to nothing. Linux reports as a process's peak memory
at least what its parent held when it was started, so the parent has to be small.
Prints seconds by the clock, in the program and in the system, peak KiB, and the exit status (or
minus the signal).
"""

import os
import signal
import sys
import time

WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def main(limit_s: float, out: str, err: str, command: list[str]) -> None:
    """Ends the command, and all that it started, after `limit_s`."""
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, out, WRITE, 0o600),
        (os.POSIX_SPAWN_OPEN, 2, err, WRITE, 0o600),
    ]
    began = time.perf_counter()
    child = os.posix_spawnp(command[0], command, os.environ, file_actions=files, setsid=True)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    _, status, usage = os.wait4(child, 0)
    wall = time.perf_counter() - began
    code = os.waitstatus_to_exitcode(status)
    print(wall, usage.ru_utime, usage.ru_stime, usage.ru_maxrss, code)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
