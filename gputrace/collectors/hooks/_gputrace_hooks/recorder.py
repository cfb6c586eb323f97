"""Events of this process: kept in a list, written to GPUTRACE_DIR/HOST.PID.host.

The file is a header of 32 bytes (magic, version, pid, CLOCK_REALTIME, CLOCK_MONOTONIC), then chunks
as in spool files: a tag of four letters, the length of what follows in bytes, and that; all of it
little-endian, times in nanoseconds of CLOCK_REALTIME.

EVNT  records of 32 bytes: u64 start, u64 end, u32 thread, u32 name, u16 kind, u16 rank, u32 number
NAME  u32 id, text          INFO  "key=value"          CLOK  u64 realtime, monotonic, monotonic_raw

gputrace/collectors/host_events.py reads it; keep the two alike.

No thread of ours writes: a second thread would make ``os.fork`` warn. An event is written at once
while there are less than ten a second, and otherwise waits for a tenth of a second at most.
"""

import _thread
import atexit
import os
import sys
import time
from array import array
from struct import pack

VERSION = 1
DATA_WAIT, STEP, ANNOTATION, NOTE = 1, 2, 3, 4

_BETWEEN_WRITES = 100000000
_WRITES_IN_A_ROW = 8
_SECOND = 1000000000
_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE "
    "OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK PMI_SIZE SLURM_PROCID SLURM_NTASKS SLURM_LOCALID "
    "HOROVOD_RANK HOROVOD_SIZE CUDA_VISIBLE_DEVICES"
).split()

on_write = []  # type: list[Callable[[], None]]
"""Called after events were written, at most ten times a second."""
on_fork = []  # type: list[Callable[[], None]]
"""Called in a forked child."""

if sys.version_info >= (3, 7):
    time_ns = time.time_ns
else:

    def time_ns():
        # type: () -> int
        return int(time.time() * 1e9)


# Four numbers an event. Only ever extended, and cut at its front, so that threads need no lock.
_events = []  # type: list[int]
_names = {}  # type: dict[str, int]
_names_lock = _thread.allocate_lock()
_local = _thread._local()
