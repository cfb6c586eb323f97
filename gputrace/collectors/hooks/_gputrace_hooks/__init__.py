"""Hooks that run inside the recorded program, on the standard library alone, from Python 3.6 on.

imports          notices that the program imports a framework
frameworks       what is wrapped in each, a file for each
pipelines        parts of batches, and settings of input pipelines
wrappers         time a wait or a compilation, mark a step, make way for a profiler
steps            counts the steps, opens and closes the window of ``--steps A:B``
load             records how threads spend their time, what else wants cores, and collections
hangs            shows steps and collectives to a recorder that looks for hangs
control          reaches the collector's library in this process, leaves steps unrecorded
remote           opens and closes windows for `gputrace on` in a program under `gputrace arm`
cures            change the program as `gputrace try` asks, and measure its steps
recorder         keeps the events and writes them now and then
host_file        the file that they are written to
sampler          looks where the program is, if asked to

Only ``imports`` is loaded at the start of each process; the rest when a framework is.
"""

import os
import time


def enter() -> str:
    """Return the folder that an armed process writes to; raises OSError where it cannot be made.

    It is that of the process that started this one, also where that was on another machine, or a
    new one below GPUTRACE_ARM.
    """
    folder, user = os.environ.get("GPUTRACE_DIR", ""), os.getuid()
    if os.path.isdir(folder):
        return folder
    above = os.environ["GPUTRACE_ARM"]
    if not os.path.isabs(above):
        above = f"/tmp/gputrace-{user}"
    try:
        os.mkdir(above, 0o700)
    except FileExistsError:
        pass
    status = os.lstat(above)
    # A folder of this user's that nobody else may enter: /tmp is everybody's.
    if (status.st_mode, status.st_uid) != (0o40700, user):
        raise PermissionError(f"{above}: not a folder of mode 0700 that belongs to you")
    if os.path.dirname(folder) != above:
        folder = os.path.join(above, f"{os.getpid()}-{os.urandom(4).hex()}")
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    return folder


if os.environ.get("GPUTRACE_ARM"):
    os.environ["GPUTRACE_DIR"] = enter()
FOLDER = os.environ.get("GPUTRACE_DIR", "")
"""Folder to write into; a program may clear its environment later."""
BEGAN = os.getpid(), *(int(time.clock_gettime(c) * 1e9) for c in (0, 1))
"""The process that began, and when: CLOCK_REALTIME and CLOCK_MONOTONIC, in nanoseconds."""
