"""Exceptions of the program's signal handlers in the midst of our writing cost no event."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Final

import pytest

from gputrace.collectors.spool import ChunkFile
from tests.helpers import command

HOOKS: Final = command.ROOT / "gputrace" / "collectors" / "hooks"
EVENTS: Final = 7
MAGIC: Final = b"GPUTRHST"
INTERRUPTED: Final = """
import dis, os, sys
from functools import lru_cache
from itertools import count
hooks, folder, where = sys.argv[1:]
sys.path.insert(0, hooks)
os.environ["GPUTRACE_DIR"] = folder
from _gputrace_hooks import recorder

@lru_cache(maxsize=None)
def ends(code):
    "Where Python calls handlers: after calls, and where functions and turns of loops begin."
    found = list(dis.get_instructions(code))
    names = ("CALL", "RESUME", "JUMP_BACKWARD")
    pairs = zip(found, found[1:])
    return {after.offset for before, after in pairs if before.opname.startswith(names)}

def interrupt(at):
    left = [at]
    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(hooks):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in ends(frame.f_code):
            left[0] -= 1
            if not left[0]:
                sys.settrace(None)
                raise SystemExit
        return trace
    return trace

def mark():
    now = recorder.time_ns()
    recorder.record(now, now, what, recorder.STEP)

for at in count(1):
    os.environ["GPUTRACE_DIR"] = os.path.join(folder, str(at))
    os.mkdir(os.environ["GPUTRACE_DIR"])
    recorder._state, recorder._written, recorder._due = recorder._State(), 0, 0
    recorder._segment_ns = 0
    what = recorder.word("step")
    recorder._due = 1 << 62 if where == "first" else 0
    mark()
    recorder._due = 1 << 62
    for _ in range(%d): mark()
    recorder._due = 0
    if where == "ring":
        recorder._segment_ns, recorder._segments, recorder._state.segment_began = 1, 100, 1
    sys.settrace(interrupt(at))
    try:
        mark()
        sys.settrace(None)
        break
    except SystemExit:
        recorder._segment_ns = 0
    recorder.finish()
print(at)
"""


def steps_of(folder: Path) -> list[int]:
    """The start of each event of the files of a folder that are read, in order of writing."""
    files = [ChunkFile(0, "", 0, path.read_bytes()) for path in sorted(folder.glob("*.host"))]
    parts = [part for file in files for part in file.chunks()]
    bodies = [bytes(body) for tag, body, whole in parts if whole and tag == b"EVNT"]
    return [start for body in bodies for start, *_ in struct.iter_unpack("<QQQQ", body)]


@pytest.mark.parametrize("where", ["first", "later", "ring"])
@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 does not trace these")
def test_each_event_is_written_once_wherever_a_handler_ends_the_program(
    tmp_path: Path, where: str
) -> None:
    """As the file is opened, as it goes on, and as a ring begins a new one."""
    ran = command.python("-c", INTERRUPTED % (EVENTS - 2), str(HOOKS), str(tmp_path), where)
    assert (ran.code, ran.err) == (0, "")
    places = int(ran.out)
    assert places > 30
    for at in range(1, places + 1):
        folder = tmp_path / str(at)
        assert {path.suffix for path in folder.iterdir()} == {".host"}, at
        assert all(path.read_bytes()[:8] == MAGIC for path in folder.iterdir()), at
        starts = steps_of(folder)
        assert len(set(starts)) == len(starts), at
        # The last one may be interrupted before it is anything.
        assert EVENTS - 1 <= len(starts) <= EVENTS, at
    assert len(starts) == EVENTS


LIMITED: Final = """
import os, resource, signal, sys, tempfile
sys.path.insert(0, sys.argv[1])
from _gputrace_hooks import host_file

folder = os.environ["GPUTRACE_DIR"] = tempfile.mkdtemp()
signal.signal(signal.SIGXFSZ, lambda *_: print("the program got the signal"))
file = host_file.HostFile(os.getpid(), host_file.both_clocks())
file.open()
[path] = (os.path.join(folder, name) for name in os.listdir(folder))
size = os.path.getsize(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8, resource.RLIM_INFINITY))
file.append(b"1" * 8)
for data in (b"2", b"3" * 9):
    try:
        file.append(data)
    except OSError as error:
        print(error.strerror, os.path.getsize(path) - size)
file.write_stop(1, 2, 3)
print("ours")
try:
    with open(path, "ab", buffering=0) as own:
        own.write(b"4")
except OSError:
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_the_signal_of_large_files_is_for_those_of_the_program_alone() -> None:
    """Nothing is blocked for it, so that no handler that raises can leave it blocked."""
    ran = command.python("-c", LIMITED, str(HOOKS))
    said = "File too large 8\nFile too large 8\nours\nthe program got the signal\nset()\n"
    assert (ran.code, ran.out, ran.err) == (0, said, "")
