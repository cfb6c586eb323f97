"""Exceptions of the program's signal handlers in the midst of our writing cost no event."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Final

import pytest

from gputrace.collectors.spool import ChunkFile
from tests import command

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


RAISING: Final = """
import itertools, os, resource, signal, sys, tempfile, types
sys.path.insert(0, sys.argv[1])
import _signal
from _gputrace_hooks import host_file

signal.signal(signal.SIGXFSZ, lambda *_: print("the program got the signal"))
file = tempfile.TemporaryFile(buffering=0)
file.write(b"1" * 4096)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

class Handler(BaseException):
    pass

def interrupted(call):
    "Python calls handlers when a call has returned."
    def wrapper(*arguments):
        try:
            return call(*arguments)
        finally:
            if next(turns):
                raise Handler
    return wrapper

names = "getsignal", "pthread_sigmask", "sigtimedwait"
calls = {name: interrupted(getattr(_signal, name)) for name in names}
sys.modules["_signal"] = types.SimpleNamespace(**vars(_signal) | calls)
raised = 0
for chosen in itertools.product([False, True], repeat=6):
    turns = itertools.chain(chosen, itertools.repeat(False))
    try:
        host_file.quietly(interrupted(os.write), file.fileno(), b"2")
    except (Handler, OSError) as error:
        raised += isinstance(error, Handler)
    assert not _signal.pthread_sigmask(_signal.SIG_BLOCK, []), chosen
    assert not _signal.sigpending(), chosen
print(raised)
"""


def test_the_signal_of_large_files_is_the_programs_again_whenever_handlers_raise() -> None:
    """After any of the six calls, however many of them."""
    ran = command.python("-c", RAISING, str(HOOKS))
    assert (ran.code, ran.out, ran.err) == (0, "63\n", "")
