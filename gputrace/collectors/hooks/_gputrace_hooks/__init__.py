"""Hooks that run inside the recorded program, on the standard library alone, from Python 3.6 on.

imports          notices that the program imports a framework
frameworks       what is wrapped in each, a file for each
pipelines        parts of batches, and settings of input pipelines
wrappers         time a wait or a compilation, mark a step, make way for a profiler
steps            counts the steps, opens and closes the window of ``--steps A:B``
load             records how threads spend their time, what else wants cores, and collections
hangs            shows steps and collectives to a recorder that looks for hangs
control          reaches the collector's library in this process, leaves steps unrecorded
cures            change the program as `gputrace try` asks, and measure its steps
recorder         keeps the events and writes them now and then
host_file        the file that they are written to
sampler          looks where the program is, if asked to

Only ``imports`` is loaded at the start of each process; the rest when a framework is.
"""

import os
import time

FOLDER = os.environ.get("GPUTRACE_DIR", "")
"""Folder to write into; a program may clear its environment later."""
BEGAN = os.getpid(), *(int(time.clock_gettime(c) * 1e9) for c in (0, 1))
"""The process that began, and when: CLOCK_REALTIME and CLOCK_MONOTONIC, in nanoseconds."""
