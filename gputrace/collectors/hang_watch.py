"""Watch of a recording for hangs: no step ends, no collective is entered or left, nothing is read.

Processes show their progress in mappings (`hooks/_gputrace_hooks/hangs.py`), which are read here
from outside. At a hang a report is written beside the trace: the last collectives of each rank, the
stacks of its threads, and which dumps of NCCL's flight recorder there are. The program is left as
it is.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from gputrace.collectors.processes import has_ended
from gputrace.units import format_ns

MOST: Final = 3
"""Reports of hangs that a recording makes."""
_HEADER: Final = struct.Struct("<8sIIiiQQQQQi")
_SLOT: Final = struct.Struct("<QQQqqH")
_SLOT_BYTES: Final = 512
_FIRST: Final = 128
SIGNAL: Final = signal.SIGRTMIN + 21
_ENDING: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_TOGETHER_S: Final = 0.005
_STACKS_S: Final = 3.0
"""Longest wait for the stacks of a process."""
_DUMPS_S: Final = 5.0
"""Longest wait for dumps of the flight recorder."""
_DUMPS: Final = "/tmp/nccl_trace_rank_"
"""Where NCCL's flight recorder is dumped to unless a variable says otherwise."""
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_SPY_FRAME: Final = re.compile(r"    (?P<name>.*) \((?P<file>.*):(?P<line>\d+)\)$")


@dataclass(slots=True)
class Ring:
    """Progress of one process, as its mapping shows it."""

    path: Path
    pid: int = 0
    rank: int = -1
    ranks: int = 0
    began_ns: int = 0
    ended_ns: int = 0
    steps: int = 0
    entered: int = 0
    left: int = 0
    stacks: int = -1
    collectives: list[dict[str, Any]] = field(default_factory=list)


def read_ring(path: Path, whole: bool = False) -> Ring | None:
    """Read a mapping, with the collectives where ``whole``; None where it is not one."""
    try:
        with path.open("rb") as file:
            data = file.read() if whole else file.read(_FIRST)
    except OSError:
        return None
    if len(data) < _FIRST or data[:8] != b"GPTRHANG":
        return None
    ring = Ring(path, *_HEADER.unpack_from(data)[2:])
    slots = range(_FIRST, len(data) - _SLOT_BYTES + 1, _SLOT_BYTES) if ring.entered else ()
    for at in slots:
        serial, number, step, start, end, length = _SLOT.unpack_from(data, at)
        if not start:
            continue
        text = data[at + _SLOT.size : at + _SLOT.size + length].decode("utf-8", "replace")
        group, name, line, members = (*text.split("\0"), "", "", "", "")[:4]
        entry = {"group": group, "members": members, "operation": name, "line": line}
        times = {"start_ns": start, "end_ns": end or None}
        ring.collectives.append({"serial": serial, "number": number, "step": step} | entry | times)
    ring.collectives.sort(key=lambda entry: entry["serial"])
    return ring


class Hangs:
    """Look for a hang, now and then, and write what is known of it.

    ``explain`` makes lines for a person of a report.
    """

    def __init__(
        self,
        folder: Path,
        output: Path,
        after_ns: int,
        tell: Callable[[str], object],
        explain: Callable[[Path], list[str]],
    ) -> None:
        self._folder, self._output, self._after_s = folder, output, after_ns / 1e9
        self._tell, self._explain, self._since = tell, explain, time.monotonic()
        self._seen: dict[str, Any] = {}
        self._began = time.time()
        self._gone: dict[int, float] = {}
        self._watched: set[int] = set()
        self._told_at: float | None = None
        self._made = 0

    def look(self) -> None:
        """Compare with the last look; report a hang once, and that it is over."""
        now, rings = time.monotonic(), list(self._rings())
        seen: dict[str, Any] = {}
        for ring in rings:
            seen[ring.path.name] = ring.steps, ring.entered, ring.left
            self._note_end(ring.pid)
        # The hooks' files grow as batches are read and functions compiled.
        for path in self._folder.glob("*.host"):
            with suppress(FileNotFoundError):  # A ring removes its older files.
                seen[path.name] = path.stat().st_size
        if seen != self._seen:
            if self._told_at is not None:
                self._tell(f"it continued after {now - self._since:,.0f} s")
            self._since, self._seen, self._told_at = now, seen, None
            return
        waits = any(ring.entered > ring.left for ring in rings)
        has_begun = waits or any(ring.steps for ring in rings)
        # Who has come to the end of its program may take its time to leave.
        alive = [ring for ring in rings if not (ring.ended_ns or has_ended(ring.pid))]
        late = now - self._since >= self._after_s
        if late and has_begun and alive and self._told_at is None and self._made < MOST:
            self._told_at = now
            length = format_ns(int((now - self._since) * 1e9))
            self._report(f"no step has ended for {length}")

    def _note_end(self, pid: int) -> None:
        """Note when a process ends, to the millisecond: a launcher soon ends the others, too.

        Where the system has no pidfd (before Linux 5.3), it is not known.
        """
        if pid in self._watched:
            return
        self._watched.add(pid)
        with suppress(OSError, AttributeError):
            descriptor = os.pidfd_open(pid)

            def wait() -> None:
                waiting = select.poll()
                waiting.register(descriptor, select.POLLIN)
                waiting.poll()
                self._gone[pid] = time.monotonic()
                os.close(descriptor)

            # The signals that the recorder waits for are blocked here, and stay so in the thread.
            threading.Thread(target=wait, daemon=True).start()

    def finish(self, code: int) -> None:
        """Report a process that ended without warning, where the program failed with this code.

        What ends all of them, a signal to the program, tells of none.
        """
        self.look()
        rings = list(self._rings())
        cut = [ring for ring in rings if not ring.ended_ns and ring.pid in self._gone]
        signalled = {sign for number in _ENDING for sign in (-number, 128 + number)}
        if code and code not in signalled and cut and len(rings) > 1 and self._told_at is None:
            self._report("a process has ended without warning", is_over=True)

    def _rings(self) -> Iterator[Ring]:
        for path in sorted(self._folder.glob("*.hang")):
            if (ring := read_ring(path)) is not None and ring.pid:
                yield ring

    def _report(self, what: str, is_over: bool = False) -> None:
        self._made += 1
        rings = [read_ring(path, whole=True) for path in sorted(self._folder.glob("*.hang"))]
        now = time.time_ns()
        rows = [self._row(ring) for ring in rings if ring is not None and ring.pid]
        if not is_over:
            # After the stacks: the program may go on while this waits.
            self._have_dumps()
        report = {
            "gputrace_hang": 1,
            "what": what,
            "host": socket.gethostname(),
            "at_ns": now,
            "is_over": is_over,
            "ranks": rows,
            "flight_recorder": sorted(map(str, self._dumps())),
        }
        stem = self._output.stem
        paths = (self._output.with_name(f"{stem}.hang{number}.json") for number in count(1))
        path = next(path for path in paths if not path.exists())
        try:
            path.write_text(json.dumps(report, indent=1))
        except OSError as error:
            self._tell(f"{what}, but {path} cannot be written ({error.strerror})")
            return
        self._tell(f"{what}; where each rank is: {path}")
        for line in self._explain(path):
            self._tell(line)
        dumps = " ".join(report["flight_recorder"])  # type: ignore[arg-type]
        if dumps:
            self._tell(f"NCCL's flight recorder has more: gputrace analyze {dumps}")
        if not is_over:
            self._tell(f"what was recorded so far: gputrace recover --keep {self._folder}")

    def _row(self, ring: Ring) -> dict[str, Any]:
        names = ("pid", "rank", "ranks", "began_ns", "ended_ns", "steps")
        alive = not has_ended(ring.pid)
        first = min(self._gone.values(), default=0.0) + _TOGETHER_S
        return {name: getattr(ring, name) for name in names} | {
            "alive": alive,
            "ended_first": self._gone.get(ring.pid, math.inf) <= first,
            "collectives": ring.collectives,
            "threads": _stacks(ring) if alive else [],
        }

    def _have_dumps(self) -> None:
        """Have PyTorch dump what NCCL was given, where it made pipes for that, and wait a little.

        It looks at its pipes once a second.
        """
        asked, began = 0, time.time()
        for path in self._folder.glob("*.nccl-*.pipe"):
            with suppress(OSError):
                pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                asked += os.write(pipe, b"1")
                os.close(pipe)
        until, sizes = time.monotonic() + _DUMPS_S * bool(asked), [-1]
        while time.monotonic() < until:
            time.sleep(0.2)
            before, sizes = sizes, []
            with suppress(OSError):
                stats = [path.stat() for path in self._dumps()]
                sizes = [stat.st_size for stat in stats if stat.st_mtime >= began]
            if len(sizes) >= asked and sizes == before:
                break

    def _dumps(self) -> Iterator[Path]:
        """Dumps of NCCL's flight recorder that were written since the recording began."""
        variables = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
        prefix = Path(next(filter(None, map(os.environ.get, variables)), _DUMPS))
        with suppress(OSError):
            for path in prefix.parent.glob(f"{prefix.name}*"):
                if path.is_file() and path.stat().st_mtime >= self._began:
                    yield path


def _stacks(ring: Ring) -> list[list[str]]:
    """Return the stacks of a process's threads, its main thread's first, the innermost line first.

    By py-spy where it is there and may; else by the faulthandler that the hooks have put in place.
    """
    if (spy := shutil.which("py-spy")) is not None:
        words = [spy, "dump", "--nonblocking", "--pid", str(ring.pid)]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(words, capture_output=True, timeout=10, check=False)
            text = done.stdout.decode("utf-8", "replace")
            if done.returncode == 0 and (threads := _threads(text, _SPY_FRAME)):
                return threads
    path = ring.path.with_suffix(".stacks")
    descriptor = Path(f"/proc/{ring.pid}/fd/{ring.stacks}")
    try:
        # The program may have closed the descriptor, and have another file there.
        if ring.stacks < 0 or not descriptor.samefile(path):
            return []
        # Without a handler, our signal would end it.
        status = Path(f"/proc/{ring.pid}/status").read_text()
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        if caught is None or not int(caught[1], 16) >> (SIGNAL - 1) & 1:
            return []
        before = path.stat().st_size
        os.kill(ring.pid, SIGNAL)
        until = time.monotonic() + _STACKS_S
        size = before
        while time.monotonic() < until:
            time.sleep(0.1)
            previous, size = size, path.stat().st_size
            if size == previous > before:
                break
        with path.open("rb") as file:
            file.seek(before)
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return _threads(text, _FRAME)[::-1]


def _threads(text: str, frame: re.Pattern[str]) -> list[list[str]]:
    """Return the frames of each thread; py-spy's main thread, which it names, comes first."""
    threads: list[list[str]] = []
    main: list[str] = []
    for line in text.splitlines():
        if match := frame.match(line):
            if threads and "/_gputrace_hooks/" not in match["file"]:
                threads[-1].append("{file}:{line} {name}".format(**match.groupdict()))
        elif line.startswith(("Thread ", "Current thread ")):
            threads.append([])
            main = threads[-1] if "MainThread" in line else main
    return sorted(filter(None, threads), key=lambda thread: bool(main) and thread is not main)
