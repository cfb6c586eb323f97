"""The recorders of one job on one machine: they write into one folder, and one makes the trace.

Each holds a lock on a file of its own in the folder while it records; the kernel drops the lock
however the recorder ends. The last one to end makes the trace. A recorder alone is a team of one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, Final

from gputrace.collectors.program.signals import wait_for
from gputrace.errors import InputError, UsageError

PATIENCE_S: Final = 10.0
"""After its own start, how long a recorder that is done waits for those that have not begun."""
_BUSY_S: Final = 2.0
"""How long to wait for others to enter or leave; longer, and they are making the trace."""
_POLL_S: Final = 0.05
_TOLD: Final = "team.json"
_LEFT: Final = ("spool", "host", "nvvp")
"""Of what processes leave in the folder, save nsys, which is never without a team.json."""
_ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CannotShare(Exception):
    """The others have ended, or the file system has no locks: the recorder must work alone."""


class Team:
    """A place among the recorders that share a folder.

    Attributes:
        folder: what their processes write into.
        shares: whether there may be others.
    """

    def __init__(
        self,
        folder: Path,
        job: str | None = None,
        rank: int = 0,
        size: int = 1,
        patience: float = PATIENCE_S,
    ) -> None:
        """Makes the folder, or joins those who did.

        Args:
            folder: where the recorders of this machine with the same output meet.
            job: what they are of, empty where that has no name of its own; None for a recorder
                that works alone.
            rank: tells them apart.
            size: how many there are to be, if that is known.
            patience: seconds, instead of PATIENCE_S.

        Raises UsageError where another recording left the folder or it cannot be made, CannotShare
        where a recorder that is not alone must become so.
        """
        self.folder, self.shares, self._size = folder, job is not None, size
        self._patient_until = time.monotonic() + patience
        made, owner = _make(folder, job or "")
        if not made and (job is None or not _is_open_to(folder, job, owner)):
            raise _in_the_way(folder)
        try:
            self._gate = _open(folder / "team.lock")
            with self._undisturbed():
                self._own = self._enter(rank)
        except OSError as error:
            if made:
                shutil.rmtree(folder, ignore_errors=True)
            if job is None:
                raise UsageError(f"{folder}: cannot be made ({error.strerror})") from None
            raise CannotShare(str(error)) from None

    def _enter(self, rank: int) -> int:
        same = os.fstat(self._gate).st_ino == (self.folder / "team.lock").stat().st_ino
        if not same:
            raise FileNotFoundError(self.folder)
        try:
            own = _open(self.folder / f"{rank}.task", os.O_EXCL)
        except FileExistsError:
            raise _in_the_way(self.folder) from None
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Who works alone needs no lock.
            if self.shares:
                raise
        return own

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """While no other recorder enters or leaves; TimeoutError where one is long at it."""
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
        """Ends the part of this recorder; True for the last, which makes the trace meanwhile.

        Waits for those that have not begun while patience lasts, so that what ends at once does
        not become a trace without the others; a signal to end ends patience.
        """
        self._await_beginners()
        with self._undisturbed():
            try:
                yield not self._has_company()
            finally:
                os.close(self._own)

    def forget(self) -> None:
        """Gives the place up to a process that was forked from this one, and records."""
        os.close(self._own)
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
        """Whether another recorder is at work; ask while undisturbed."""
        return self.shares and _any_alive(self.folder, but=self._own)

    def dissolve(self) -> None:
        """Removes the folder, once the trace is made."""
        gone = self.folder.with_name(f".{self.folder.name}.{os.getpid()}")
        self.folder.rename(gone)
        for _ in range(10):
            # On NFS, a file that somebody has open keeps its folder for a while.
            shutil.rmtree(gone, ignore_errors=True)
            if not gone.exists():
                break
            time.sleep(_POLL_S)

    def let_one(self, work: str, begin: Callable[[], object]) -> None:
        """Calls ``begin`` in one recorder of the team; when that one ends, in another."""
        if self.shares:
            with suppress(OSError):
                file = _open(self.folder / f"{work}.lock")
                if not _lock(file):
                    Thread(target=_when_free, args=(file, begin), daemon=True).start()
                    return
        begin()


def _when_free(file: int, begin: Callable[[], object]) -> None:
    # The program's signals are the main thread's to pass on.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
        begin()


def ranks_in(folder: Path) -> list[int]:
    """Of all recorders that have begun in a folder."""
    return sorted(int(path.stem) for path in folder.glob("*.task"))


def is_recording(folder: Path) -> bool:
    """Whether a recorder is still at work in a folder."""
    with suppress(OSError):
        return _any_alive(folder)
    return False


def holds_lock(folder: Path) -> bool:
    """As `is_recording`, for those who look often: no lock is tried, which a recorder may notice.

    Knows of recorders in this container alone.
    """
    with suppress(OSError):
        held = {line.split()[5] for line in Path("/proc/locks").read_text().splitlines()}
        return any(_as_listed(path.stat()) in held for path in folder.glob("*.task"))
    return False


def _as_listed(file: os.stat_result) -> str:
    """A file as /proc/locks has it."""
    device = file.st_dev
    return f"{os.major(device):02x}:{os.minor(device):02x}:{file.st_ino}"


def began(folder: Path) -> float:
    """When the folder was made, in seconds since 1970; now, where it does not say."""
    try:
        return float(json.loads((folder / _TOLD).read_text(encoding="utf-8"))["time"])
    except (OSError, ValueError, LookupError, TypeError):
        return time.time()


def assert_ours(folder: Path) -> None:
    """Raises InputError where no recorder made the folder: it must not be removed then."""
    if not folder.is_dir():
        raise InputError(folder, "no such folder of a recording")
    ours = [folder / _TOLD, *(p for end in _LEFT for p in folder.glob(f"*.{end}"))]
    if not any(path.is_file() for path in ours):
        raise InputError(folder, "not the NAME.spool of a recording")


def _make(folder: Path, job: str) -> tuple[bool, int]:
    """Makes the folder with what it is of, at once; False where it is there.

    And whose the folders are that we make there: on a network's disk, root may be somebody else.
    """
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        new.mkdir(mode=0o700)
        told = {"job": job, "host": os.uname().nodename, "time": time.time()}
        (new / _TOLD).write_text(json.dumps(told), encoding="utf-8")
        owner = new.lstat().st_uid
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made ({error.strerror})") from None
    try:
        new.rename(folder)
    except OSError:
        shutil.rmtree(new)
        if not folder.exists():
            raise UsageError(f"{folder}: cannot be made") from None
        return False, owner
    return True, owner


def _is_open_to(folder: Path, job: str, owner: int) -> bool:
    """Whether the folder is of the same job; of one without a name, whether it is a fresh one.

    One that another user made, or may write into, is not: what we write would be theirs.
    """
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner or found.st_mode & 0o022:
            return False
        told: dict[str, Any] = json.loads((folder / _TOLD).read_text(encoding="utf-8"))
        same = (told["job"], told["host"]) == (job, os.uname().nodename)
        return same and (
            bool(job) or time.time() - told["time"] < PATIENCE_S or is_recording(folder)
        )
    except FileNotFoundError:
        # Whoever ended meanwhile has removed it.
        return not folder.exists()
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _any_alive(folder: Path, but: int | None = None) -> bool:
    own = os.fstat(but).st_ino if but is not None else None
    for path in folder.glob("*.task"):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_ino != own and not _lock(file):
                return True
        finally:
            os.close(file)
    return False


def _lock(file: int) -> bool:
    """Whether nobody else has it."""
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
