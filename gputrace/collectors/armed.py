"""Armed programs of this user on this machine, and windows recorded in them while they run.

``_gputrace_hooks/remote.py`` says what they listen to.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gputrace.collectors import job_tasks
from gputrace.collectors.backend import SECOND_NS, Merged, Plan, has_driver, ring
from gputrace.collectors.backends import HOST, choose
from gputrace.collectors.backends.cupti import CUPTI
from gputrace.collectors.masking import masked
from gputrace.collectors.nvml import Sampler
from gputrace.collectors.processes import has_ended, read_environment, read_stat
from gputrace.collectors.session import OF_A_PROCESS, finish, spool_of, with_hooks
from gputrace.collectors.slow_steps import copy_ring
from gputrace.collectors.spool import LATEST, copy_since
from gputrace.errors import UsageError

KEPT_NS: Final = 600 * SECOND_NS
"""Nanoseconds that an armed process keeps on disk, and the longest window."""
_SETTLES_S: Final = 0.5
_HELD_STEPS: Final = 5
"""Seconds and steps after a window until the collector has all of it: it holds CUPTI for a quarter
of a second and five steps at most (``_gputrace_hooks/control.py``)."""
_PATIENCE_S: Final = 3.0
_MOST_BYTES: Final = 4096
_ABANDONED_S: Final = 60.0
_POLL_S: Final = 0.25
_PACE_S: Final = 0.5
_TRIES: Final = 4
_CREDENTIALS: Final = struct.Struct("3i")
"""struct ucred: pid, user and group."""


@dataclass(frozen=True, slots=True)
class ArmedProcess:
    """Process that listens, and what it answered."""

    pid: int
    folder: Path
    job: str
    """Launcher's name of the job; without one, the pid of the first armed process."""
    rank: int | None
    step: int
    """Training steps that have ended."""
    state: str
    """``cold``, ``waiting`` for the first step of a window, ``recording``, or ``silent``: it did
    not answer."""
    gpu: str
    """``ready``, ``unstarted`` as long as it has not started CUDA, or ``none``: only steps and
    other signals of the host are recorded."""
    windows: int
    """Windows that have ended."""
    span: tuple[int, int]
    """When the last one began and ended, in nanoseconds of CLOCK_REALTIME; 0 for not yet."""
    command: str

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.folder / f"{self.pid}.socket"

    def to_json(self) -> dict[str, object]:
        """Return what `gputrace list --json` prints of it."""
        names = ("job", "pid", "rank", "step", "state", "gpu", "windows", "command")
        return {name: getattr(self, name) for name in names}


def arming(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which programs start armed.

    Raises MissingError if something else records here, UsageError if the folder of armed processes
    is not this user's alone.
    """
    if "GPUTRACE_DIR" in inherited and "GPUTRACE_ARM" not in inherited:
        raise UsageError("this program is recorded already: there is nothing to arm")
    plan = Plan(Path("armed"), python=None, limits=ring(KEPT_NS, 0))
    backend = choose(plan, inherited)
    above = _above(inherited)
    with suppress(FileExistsError):
        above.mkdir(mode=0o700)
    _assert_private(above)
    environment = with_hooks(plan, above, inherited)
    launch = backend.launch(plan, above, (), environment)
    changed = dict(launch.environment) | {"GPUTRACE_ARM": str(above)}
    del changed["GPUTRACE_DIR"]
    if backend is not HOST:
        changed["GPUTRACE_CAPTURE"] = "late"
    return changed


def _above(environment: Mapping[str, str]) -> Path:
    """Return the folder of this user's armed processes.

    Not $XDG_RUNTIME_DIR, which is memory, another one in a shell than in a job, and removed when
    the user logs out.
    """
    asked = environment.get("GPUTRACE_ARM", "")
    return Path(asked if os.path.isabs(asked) else f"/tmp/gputrace-{os.getuid()}")  # noqa: PTH117


def _assert_private(folder: Path) -> None:
    status = folder.lstat()
    if (status.st_mode, status.st_uid) != (stat.S_IFDIR | 0o700, os.getuid()):
        raise UsageError(
            f"{folder}: not a folder of mode 0700 that belongs to you; name another in GPUTRACE_ARM"
        )


def find() -> list[ArmedProcess]:
    """Return all armed processes of this user on this machine, by job, rank and pid.

    Removes what killed processes have left.
    """
    found: list[ArmedProcess] = []
    above = _above(os.environ)
    with suppress(FileNotFoundError):
        _assert_private(above)
        for folder in sorted(above.iterdir()):
            if not folder.is_symlink() and folder.is_dir():
                here = [*filter(None, map(meet, sorted(folder.glob("*.socket"))))]
                # A launcher does not have the name that it gives its workers.
                named = {process.job for process in here} - {_first_pid(folder)}
                if len(named) == 1:
                    here = [replace(process, job=max(named)) for process in here]
                found += here
                _remove_if_left(folder)
    return sorted(found, key=lambda p: (p.job, -1 if p.rank is None else p.rank, p.pid))


def meet(path: Path) -> ArmedProcess | None:
    """Ask a process; remove its socket and return None if it has ended.

    Where nobody listens, it has: a process of another container may not be seen here. One that
    does not answer may have left its socket to a child that knows nothing of it.
    """
    pid = int(path.stem) if path.stem.isdecimal() else 0
    try:
        said = ask(path, "status")
    except OSError as error:
        if isinstance(error, (ConnectionRefusedError, FileNotFoundError)) or has_ended(pid):
            path.unlink(missing_ok=True)
            path.with_suffix(".token").unlink(missing_ok=True)
            return None
        said = {"state": "silent"}
    environment = read_environment(pid) or {}
    task = job_tasks.find_task(environment)
    rank = int(said.get("rank", -1))
    if rank < 0 and task is not None:
        rank = task.rank
    words = ""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    return ArmedProcess(
        pid,
        path.parent,
        (task.job if task is not None else "") or _first_pid(path.parent),
        None if rank < 0 else rank,
        int(said.get("step", 0)),
        said["state"],
        said.get("gpu", "none"),
        int(said.get("windows", 0)),
        (int(said.get("began", 0)), int(said.get("ended", 0))),
        " ".join(masked(words.rstrip("\0").split("\0"))),
    )


def _first_pid(folder: Path) -> str:
    """Return the pid of the process that made a folder."""
    return folder.name.partition("-")[0]


def _remove_if_left(folder: Path, after_s: float = _ABANDONED_S) -> None:
    """Remove a folder without a socket, as SIGKILL leaves it, once nobody has written for long."""
    with suppress(OSError, ValueError):
        latest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        is_old = time.time() - latest >= after_s and has_ended(int(_first_pid(folder)))
        if is_old and not any(folder.glob("*.socket")):
            with locked(folder):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, which no process removes then; raises OSError where another has locked it."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def ask(path: Path, word: str, *numbers: int) -> dict[str, str]:
    """Make a request of a process; return its answer.

    Raises TimeoutError if it does not answer, ConnectionRefusedError if nobody listens, OSError
    for another reason, such as an answer of another user's process.
    """
    token = path.with_suffix(".token").read_text("ascii")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as peer:
        peer.settimeout(_PATIENCE_S)
        peer.connect(str(path))
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
            raise PermissionError(f"{path}: another user's process listens there")
        peer.sendall(" ".join([token, word, *map(str, numbers)]).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n") and len(line) < _MOST_BYTES:
            part = peer.recv(_MOST_BYTES)
            if not part:
                raise TimeoutError(f"{path}: no answer")
            line += part
    return dict(pair.split("=", 1) for pair in line.decode().split())


def select(target: str | None, among: Sequence[ArmedProcess]) -> list[ArmedProcess]:
    """Return the processes of the job that a pid or a name stands for.

    Without a target, of the only one. Those that neither train nor use a GPU, as launchers do, are
    left out if others do. Raises UsageError if there is no such job.
    """
    active = [p for p in among if p.step or p.gpu == "ready" or p.state != "cold"]
    chosen = {p.job for p in (among if target else active or among) if _is_meant(p, target)}
    if not chosen and target and target.isdecimal() and read_stat(int(target)) is not None:
        if "GPUTRACE_ARM" in (read_environment(int(target)) or {}):
            raise UsageError(f"process {target} is armed, but has not begun to train, or is ending")
        raise UsageError(
            f"process {target} was not armed: CUDA loads a recorder only as it starts; `py-spy "
            f"dump --pid {target}` shows the line that it is at, and after a restart with "
            "`gputrace arm --` it can be recorded at any time"
        )
    if not chosen:
        what = f"no armed process or job {target}" if target else "no armed process"
        raise UsageError(f"{what} on this machine; start one with `gputrace arm -- COMMAND`")
    if len(chosen) > 1:
        raise UsageError(f"several jobs are armed: name one of {', '.join(sorted(chosen))}")
    members = [process for process in among if process.job in chosen]
    return [process for process in members if process in active] or members


def _is_meant(process: ArmedProcess, target: str | None) -> bool:
    """Return whether a pid, its parent's, a job's name or id stands for a process; None for any."""
    last = process.job.rpartition(" ")[2]
    owner = _first_pid(process.folder)
    names = (str(process.pid), owner, process.job, last, last.partition(".")[0])
    return not target or target in names


@dataclass(frozen=True, slots=True)
class Window:
    """Window to record: of steps, or of a time if there are none."""

    steps: int = 0
    first: int | None = None
    """First step; None for the next one that all ranks can begin with."""
    duration_ns: int = 0


def record(
    members: Sequence[ArmedProcess],
    window: Window,
    output: Path,
    force: bool,
    log: Callable[[str], object],
) -> Merged:
    """Record a window in all processes of a job and make its trace; Ctrl+C ends the window early.

    Raises UsageError if the trace is in the way, or a process is recording or cannot begin in
    time, OSError if the trace cannot be written. Nothing stays open in the processes.
    """
    folders = sorted({member.folder for member in members})
    team = job_tasks.Team(spool_of(output, force), rank=members[0].rank or 0)
    try:
        with ExitStack() as held:
            for folder in folders:
                held.enter_context(locked(folder))
            _record_into(team.folder, members, folders, window, log)
    except BaseException as error:
        team.dissolve()
        if isinstance(error, BlockingIOError):
            raise UsageError("another `gputrace on` is recording there") from None
        raise
    for folder in folders:
        _remove_if_left(folder, 0)
    return finish(team.folder, output)


def keep_ring(members: Sequence[ArmedProcess], target: Path) -> None:
    """Copy what the last ten minutes left of a job into a folder, for `gputrace recover`: its
    steps, and the rows of each window that was opened in them.

    Raises OSError if that fails.
    """
    _ask_each(members, "write")
    for folder in {member.folder for member in members}:
        copy_ring(folder, target)
    _describe(members, target)


def _describe(members: Sequence[ArmedProcess], target: Path) -> dict[str, str]:
    """Write down what the processes in a folder are; return that."""
    task = job_tasks.find_task(read_environment(members[0].pid) or {})
    backend = HOST if all(member.gpu == "none" for member in members) else CUPTI
    meta = job_tasks.describe(members[0].command.split(), backend.name, task)
    for member in members if "job" in meta else ():
        (target / f"{member.rank or 0}.task").touch()
    job_tasks.write_meta(target, meta)
    return meta


def _record_into(
    target: Path,
    members: Sequence[ArmedProcess],
    folders: Sequence[Path],
    window: Window,
    log: Callable[[str], object],
) -> None:
    """Record a window into a folder of which a trace can be made."""
    meta = _describe(members, target)
    # With the folder locked, a window is of `gputrace watch`, or of a recorder that was killed.
    _ask_each(members, "end")
    if any(member.state == "recording" for member in members):
        time.sleep(_SETTLES_S)
    _ask_each(members, "write")
    sizes = {path: path.stat().st_size for path in _files(folders)}
    began = time.time_ns(), time.monotonic_ns()
    # Of several folders, it would take the processes of all but one for another program's.
    sampler = Sampler() if has_driver() and len(folders) == 1 else None
    if sampler is not None:
        sampler.start(folders[0])
    try:
        opened = _open(members, window, log)
        with suppress(KeyboardInterrupt):
            _await(opened, log)
    finally:
        _ask_each(members, "end")
        if sampler is not None:
            sampler.stop()
    spans = {}
    for pid, member in opened.items():
        begin, end = (meet(member.socket) or member).span
        spans[pid] = begin or LATEST, end or LATEST
    whole = min(begin for begin, _ in spans.values()), max(end for _, end in spans.values())
    uses_gpus = meta["backend"] != HOST.name
    time.sleep(settles_s(whole, window.steps) if uses_gpus else _POLL_S)
    _ask_each(members, "write")
    for path in _files(folders):
        # A ring may have removed it.
        with suppress(FileNotFoundError):
            if path.suffix == ".jsonl":
                shutil.move(path, target / path.name)
            elif path.stat().st_size > (offset := sizes.get(path, 0)):
                match = OF_A_PROCESS.search(path.name)
                span = spans.get(int(match[1]) if match else 0, whole)
                copy_since(path, target / path.name, offset, began if offset else None, span)


def settles_s(span: tuple[int, int], steps: int) -> float:
    """Return for how many seconds after a window the collector may lack some of it."""
    # Of a time, the steps are not known; of a window that a process did not end, nothing is.
    pace_s = min((span[1] - span[0]) / 1e9 / steps, 2.0) if steps else 0.2
    return _SETTLES_S + _HELD_STEPS * pace_s


def _files(folders: Iterable[Path]) -> list[Path]:
    kinds = ("*.spool", "*.host", "*.nvml.jsonl")
    return sorted(path for folder in folders for kind in kinds for path in folder.glob(kind))


def stop(members: Sequence[ArmedProcess]) -> int:
    """End what is being recorded in processes; return in how many there was a window."""
    answers = _ask_each([m for m in members if m.state in ("waiting", "recording")], "end")
    return sum("error" not in said for said in answers.values())


def _open(
    members: Sequence[ArmedProcess], window: Window, log: Callable[[str], object]
) -> dict[int, ArmedProcess]:
    """Open the window in all processes; return them by pid, as they were before.

    Of a window of steps, those without a step record until it ends. Raises UsageError if one does
    not answer, is recording already, or is too late.
    """
    whom = f"{len(members)} processes of job {members[0].job}"
    whom = whom if len(members) > 1 else f"process {members[0].pid}"
    for attempt in range(_TRIES):
        before = list(members)
        time.sleep(_PACE_S)
        members = [meet(member.socket) or replace(member, state="silent") for member in members]
        # As many steps ahead as the ranks make while all of them are asked, with a margin.
        made = max(b.step - a.step for a, b in zip(before, members, strict=True))
        soonest = max(member.step for member in members) + 2 + made * 2**attempt
        first = soonest if window.first is None else window.first
        train = [member for member in members if member.step] if window.steps else []
        answers = _ask_each(train, "record", first, first + window.steps, KEPT_NS)
        others = [member for member in members if member not in train]
        answers |= _ask_each(others, "begin", KEPT_NS if window.steps else window.duration_ns)
        problems = {said["error"]: pid for pid, said in answers.items() if "error" in said}
        if not problems:
            what = f"for {window.duration_ns / 1e9:g} s"
            if window.steps:
                what = f"steps {first} to {first + window.steps - 1}"
            log(f"recording {what}: {whom}")
            return {member.pid: member for member in members}
        for problem, pid in problems.items():
            if problem != "late" or window.first is not None:
                raise UsageError(f"process {pid} {_PROBLEMS.get(problem, 'did not understand')}")
        _ask_each(members, "end")
    raise UsageError("the steps are too short to begin at the same one; give --duration")


_PROBLEMS: Final = {
    "busy": "is recording already; `gputrace off` ends that",
    "gone": "has ended, or does not answer",
    "late": "is beyond that step, or about to begin it",
}


def _ask_each(
    members: Iterable[ArmedProcess], word: str, *numbers: int
) -> dict[int, dict[str, str]]:
    """Ask all processes; return the answers by pid, ``error=gone`` of those without one."""
    answers = {}
    for member in members:
        try:
            answers[member.pid] = ask(member.socket, word, *numbers)
        except OSError:
            answers[member.pid] = {"error": "gone"}
    return answers


def _await(opened: dict[int, ArmedProcess], log: Callable[[str], object]) -> None:
    """Wait until the window has ended in all processes that train, or they have.

    Without one that trains, in all. Leaves in ``opened`` how each was last seen.
    """
    left = {pid: member for pid, member in opened.items() if member.step} or dict(opened)
    while left:
        time.sleep(_POLL_S)
        for pid, before in list(left.items()):
            now = meet(before.socket)
            if now is None:
                log(f"process {pid} has ended")
            elif now.state != "silent":
                opened[pid] = now
            if now is None or now.windows != before.windows:
                del left[pid]
