"""Recorders of one job: task and rank, output names, and sharing of a folder."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Final

from gputrace.collectors.backend import has_driver
from gputrace.collectors.launch import wait_for
from gputrace.errors import InputError, UsageError

PATIENCE_S: Final = 10.0
"""Seconds after its start for which a finished recorder waits for others to begin."""
_BUSY_S: Final = 2.0
"""Seconds to wait for others to enter or leave; after that, they are making the trace."""
_POLL_S: Final = 0.05
_TEAM: Final = "team.json"
_LEFT: Final = ("spool", "host", "nvvp")
"""Suffixes of the processes' files; nsys's may be missing, but it has a team.json."""
_ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CannotShare(Exception):
    """Error for a recorder that must work alone: others have ended, or locks do not work."""


class Team:
    """Membership in the recorders that share ``folder``; with ``shares``, there may be others."""

    def __init__(
        self,
        folder: Path,
        job: str | None = None,
        rank: int = 0,
        size: int = 1,
        patience: float = PATIENCE_S,
    ) -> None:
        """Make the folder, or join its recorders; ``size`` is the expected number, if known.

        ``job`` is empty for an unnamed job, None for a recorder that works alone. Raises UsageError
        if another recording left the folder or it cannot be created, CannotShare if a recorder of a
        job must work alone.
        """
        self.folder, self.shares, self._size = folder, job is not None, size
        self._patient_until = time.monotonic() + patience
        made, owner = _make(folder, job or "")
        if not made and (job is None or not _is_open_to(folder, job, owner)):
            raise _in_the_way(folder)
        try:
            self._gate = _open(folder / "team.lock")
            with self._undisturbed():
                self._task = self._enter(rank)
        except OSError as error:
            if made:
                shutil.rmtree(folder, ignore_errors=True)
            if job is None:
                raise UsageError(f"{folder}: cannot be created ({error.strerror})") from None
            raise CannotShare(str(error)) from None

    def _enter(self, rank: int) -> int:
        if os.fstat(self._gate).st_ino != (self.folder / "team.lock").stat().st_ino:
            raise FileNotFoundError(self.folder)
        try:
            task = _open(self.folder / f"{rank}.task", os.O_EXCL)
        except FileExistsError:
            raise _in_the_way(self.folder) from None
        try:
            fcntl.flock(task, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # A lone recorder needs no lock.
            if self.shares:
                raise
        return task

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Keep others from entering and leaving; raise TimeoutError if one takes long."""
        if self.shares:
            until = time.monotonic() + _BUSY_S
            while not _lock(self._gate):
                if time.monotonic() > until:
                    raise TimeoutError
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            if self.shares:
                fcntl.flock(self._gate, fcntl.LOCK_UN)

    @contextmanager
    def leave(self) -> Iterator[bool]:
        """Leave the recorders; yield True for the last one, which makes the trace meanwhile.

        First waits a while for those that have not begun, so that a short run does not become a
        trace without them; a signal to end ends the wait.
        """
        self._await_beginners()
        with self._undisturbed():
            try:
                yield not self._has_company()
            finally:
                os.close(self._task)

    def forget(self) -> None:
        """Leave the membership to a forked process, which records."""
        os.close(self._task)
        os.close(self._gate)

    def _await_beginners(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
        try:
            while (
                len(ranks_in(self.folder)) < self._size and time.monotonic() < self._patient_until
            ):
                with self._undisturbed():
                    if self._has_company():
                        return
                if wait_for(_ENDINGS, _POLL_S):
                    return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _has_company(self) -> bool:
        """Return True if another recorder is at work; call it while undisturbed."""
        return self.shares and _any_alive(self.folder, but=self._task)

    def dissolve(self) -> None:
        """Remove the folder, once the trace is made."""
        gone = self.folder.with_name(f".{self.folder.name}.{os.getpid()}")
        self.folder.rename(gone)
        for _ in range(10):
            # On NFS, an open file keeps its folder for a while.
            shutil.rmtree(gone, ignore_errors=True)
            if not gone.exists():
                break
            time.sleep(_POLL_S)

    def let_one(self, work: str, begin: Callable[[], object]) -> None:
        """Call ``begin`` in one recorder of the team; when that one ends, in another."""
        if self.shares:
            with suppress(OSError):
                file = _open(self.folder / f"{work}.lock")
                if not _lock(file):

                    def begin_later() -> None:
                        # Only the main thread forwards signals to the program.
                        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                        with suppress(OSError):
                            fcntl.flock(file, fcntl.LOCK_EX)
                            begin()

                    Thread(target=begin_later, daemon=True).start()
                    return
        begin()


def ranks_in(folder: Path) -> list[int]:
    """Return the ranks of all recorders that have begun in a folder."""
    return sorted(int(path.stem) for path in folder.glob("*.task"))


def is_recording(folder: Path) -> bool:
    """Return True if a recorder is still at work in a folder."""
    with suppress(OSError):
        return _any_alive(folder)
    return False


def holds_lock(folder: Path) -> bool:
    """Return `is_recording` without trying locks, for frequent polling; in this container alone."""
    with suppress(OSError):
        held = {line.split()[5] for line in Path("/proc/locks").read_text().splitlines()}
        for file in (path.stat() for path in folder.glob("*.task")):
            if f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}" in held:
                return True
    return False


def began(folder: Path) -> float:
    """Return when the folder was made, in seconds since 1970; the present time if unknown."""
    try:
        return float(json.loads((folder / _TEAM).read_text(encoding="utf-8"))["time"])
    except (OSError, ValueError, LookupError, TypeError):
        return time.time()


def is_ours(folder: Path) -> bool:
    """Return True if a recorder made the folder."""
    paths = [folder / _TEAM, *(p for end in _LEFT for p in folder.glob(f"*.{end}"))]
    return any(path.is_file() for path in paths)


def assert_ours(folder: Path) -> None:
    """Raise InputError if no recorder made the folder, which must not be removed then."""
    if not folder.is_dir():
        raise InputError(folder, "no such folder of a recording")
    if not is_ours(folder):
        raise InputError(folder, "not the NAME.spool of a recording")


def _make(folder: Path, job: str) -> tuple[bool, int]:
    """Make the folder with its team.json atomically; return whether it is new, and our user id."""
    # What recorders that were killed left as they made the folder, or removed it.
    for abandoned in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        pid = abandoned.name.rpartition(".")[2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(abandoned, ignore_errors=True)
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        new.mkdir(mode=0o700)
        team = {"job": job, "host": os.uname().nodename, "time": time.time()}
        (new / _TEAM).write_text(json.dumps(team), encoding="utf-8")
        # On a network file system, root may be mapped to another user.
        owner = new.lstat().st_uid
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise UsageError(f"{folder}: cannot be created ({error.strerror})") from None
    try:
        new.rename(folder)
    except OSError:
        shutil.rmtree(new)
        if not folder.exists():
            raise UsageError(f"{folder}: cannot be created") from None
        return False, owner
    return True, owner


def _is_open_to(folder: Path, job: str, owner: int) -> bool:
    """Return True if the folder is of the same job, or, for an unnamed job, recent.

    A folder that another user made or may write into is not trusted.
    """
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != owner or status.st_mode & 0o022:
            return False
        team: dict[str, Any] = json.loads((folder / _TEAM).read_text(encoding="utf-8"))
        if (team["job"], team["host"]) != (job, os.uname().nodename):
            return False
        return bool(job) or time.time() - team["time"] < PATIENCE_S or is_recording(folder)
    except FileNotFoundError:
        # The last recorder has removed it.
        return not folder.exists()
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _any_alive(folder: Path, but: int | None = None) -> bool:
    ours = os.fstat(but).st_ino if but is not None else None
    for path in folder.glob("*.task"):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_ino != ours and not _lock(file):
                return True
        finally:
            os.close(file)
    return False


def _lock(file: int) -> bool:
    """Lock a file; return False if another process has it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)


def _in_the_way(folder: Path) -> UsageError:
    if is_recording(folder):
        return UsageError(f"{folder}: another recording is under way; name another with -o")
    return UsageError(
        f"{folder}: left by another recording; make its trace with "
        f"`gputrace recover {folder}`, or remove it"
    )


_SPECIAL_STEPS: Final = 0xFFFFFFF0
"""Slurm steps from here on are batch scripts and shells of salloc, of a single process."""
_BATCH_JOBS: Final = "SLURM_JOB_ID PBS_JOBID LSB_JOBID"
_MOST_TASKS: Final = 1 << 20
"""Maximum plausible number of tasks."""


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a launcher, each of which has its own recorder."""

    job: str
    """The launcher's unique name of the run; empty if there is none."""
    rank: int
    tasks: int
    """Total number."""
    local_rank: int
    """Index among the tasks of this node."""
    local_tasks: int
    """Number on this node; 1 if unknown."""


_LAUNCHERS: Final = {
    # People set its other variables by hand.
    "TORCHELASTIC_RUN_ID": (
        *("torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
        *("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ),
    "OMPI_COMM_WORLD_RANK": (
        *("mpi", f"PMIX_NAMESPACE OMPI_MCA_ess_base_jobid {_BATCH_JOBS}"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    # srun sets PMI_RANK too, and knows more.
    "MPI_LOCALNRANKS PMI_LOCAL_SIZE": (
        *("mpi", _BATCH_JOBS, "PMI_RANK", "PMI_SIZE"),
        *("MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE"),
    ),
}
"""Launchers by variables of which each sets one: its name, and its variables of the job, rank,
tasks, local rank and local tasks, of each of which the first that is set counts."""


def find_task(environment: Mapping[str, str]) -> Task | None:
    """Return this process's task; None without a launcher, or if there is only one task."""
    for marks, (launcher, job, *numbers) in _LAUNCHERS.items():
        if any(name in environment for name in marks.split()):
            run = _text(environment, *job.split()) or "none"
            # torchrun's id of an unnamed run.
            run = "" if run == "none" else f"{launcher} {run}"
            task = _task(run, *(_number(environment, *names.split()) for names in numbers))
            if task is not None:
                break
    else:
        task = _of_slurm(environment)
    return task if task is not None and task.tasks > 1 else None


def _task(
    job: str, rank: int | None, tasks: int | None, local_rank: int | None, local_tasks: int | None
) -> Task | None:
    if rank is None or tasks is None or rank >= tasks:
        return None
    local_rank = rank if local_rank is None else local_rank
    return Task(job, rank, tasks, local_rank, min(local_tasks or 1, tasks))


def _of_slurm(environment: Mapping[str, str]) -> Task | None:
    """Return the task of srun; in an sbatch script, most variables are of the allocation."""
    step = _number(environment, "SLURM_STEP_ID", "SLURM_STEPID", most=1 << 32)
    if step is None or step >= _SPECIAL_STEPS:
        return None
    job = _text(environment, "SLURM_JOB_ID", "SLURM_JOBID")
    per_node = _text(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    return _task(
        f"slurm {job}.{step}" if job else "",
        _number(environment, "SLURM_PROCID"),
        _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        _number(environment, "SLURM_LOCALID"),
        tasks_on_node(per_node, _number(environment, "SLURM_NODEID") or 0),
    )


_TASKS: Final = re.compile(r"(\d{1,7})(?:\(x(\d{1,7})\))?")


def tasks_on_node(text: str, node: int) -> int | None:
    """Return the tasks on the nth node from Slurm's ``4(x2),3`` (4, 4 and 3); None if unknown."""
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


def _text(environment: Mapping[str, str], *names: str) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


def _number(environment: Mapping[str, str], *names: str, most: int = _MOST_TASKS) -> int | None:
    text = _text(environment, *names)
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None
    return None if number is None or number > most else number


_PLACEHOLDER: Final = re.compile(r"%(?:q\{(?P<variable>[^}]*)\}|(?P<letter>[hp%]))")

_TASKS_DIFFER_IN: Final = {
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "RANK", "LOCAL_RANK"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMIX_RANK"),
    *("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
}
_NODES_DIFFER_IN: Final = {
    *("SLURM_NODEID", "SLURMD_NODENAME", "HOSTNAME", "GROUP_RANK", "NODE_RANK"),
    *("SLURM_PROCID", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
}
_NODES_OPTION: Final = re.compile(r"--(nnodes|num[-_]machines)(=(?P<count>.*))?")


@dataclass(frozen=True, slots=True)
class Name:
    """Output of this recorder."""

    path: Path
    pattern: str
    """Shell pattern of the files of all nodes; the path itself of a single file."""
    is_tasks_own: bool
    """True if each task of a node has its own name."""


def name_output(
    text: str,
    task: Task | None,
    command: Sequence[str],
    environment: Mapping[str, str],
    host: str,
    pid: int,
) -> Name:
    """Replace ``%h`` (host), ``%p`` (pid), ``%q{VARIABLE}`` and ``%%`` in the argument of -o.

    If several hosts would write one file, the host is added to the name. Any other ``%`` stays,
    since names of folders may contain it.

    Raises UsageError for a variable that is not set.
    """

    def fill(letters: Mapping[str, str], variables: Mapping[str, str], otherwise: str = "") -> Path:
        def value(match: re.Match[str]) -> str:
            if match["variable"] is None:
                return letters[match["letter"]]
            value = variables.get(match["variable"], otherwise or None)
            if value is None:
                variable = match["variable"]
                raise UsageError(f"{text}: the environment variable {variable!r} is not set")
            return value.replace("/", "_")

        return Path(_PLACEHOLDER.sub(value, text))

    used = {match["variable"] or match["letter"] for match in _PLACEHOLDER.finditer(text)}
    path = fill({"h": host, "p": str(pid), "%": "%"}, environment)
    if not path.name:
        raise UsageError(f"{text}: does not name a file")
    if task is None and not spans_nodes(command, environment):
        return Name(path, str(path), False)
    differs = _TASKS_DIFFER_IN | _NODES_DIFFER_IN | {"h", "p"}
    same = {name: value for name, value in environment.items() if name not in differs}
    pattern = fill({"h": "*", "p": "*", "%": "%"}, same, "*")
    if not used & (_NODES_DIFFER_IN | {"h"}):
        path, pattern = _with(path, host), _with(pattern, "*")
    return Name(path, str(pattern), bool(used & (_TASKS_DIFFER_IN | {"p"})))


def _with(path: Path, part: str) -> Path:
    return path.with_name(f"{path.stem}.{part}{path.suffix}")


def of_task(path: Path, task: Task) -> Path:
    """Return the output of a task that cannot share one with the others of its node."""
    return _with(path, f"task{task.rank}")


def spans_nodes(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True if the program is a launcher (torchrun, accelerate) of more than one node."""
    counts = [environment.get("PET_NNODES", "")]
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if (match := _NODES_OPTION.fullmatch(word)) is not None:
            counts.append(following if match["count"] is None else match["count"])
    # Elastic runs give a minimum and a maximum, as 1:4.
    most = [count.rpartition(":")[2] for count in counts]
    return any(count.isdecimal() and int(count) > 1 for count in most)


def describe(words: Sequence[str], backend: str, task: Task | None = None) -> dict[str, str]:
    """Return what meta.json says of a recording from its start; ``words`` are the command's."""
    meta = {
        "command": json.dumps(words),
        "hostname": socket.gethostname(),
        "backend": backend,
        "driver": "yes" if has_driver() else "no",
    }
    return meta if task is None else meta | {"job": task.job, "world_size": str(task.tasks)}


def write_meta(folder: Path, meta: Mapping[str, str]) -> None:
    """Write meta.json atomically, since other recorders may write it too."""
    new = folder / f"meta.{os.getpid()}"
    new.write_text(json.dumps(meta), encoding="utf-8")
    new.replace(folder / "meta.json")


def read_meta(folder: Path) -> dict[str, str]:
    """Return the content of a recording's meta.json; empty if it is not there yet."""
    try:
        loaded = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in loaded.items()}
