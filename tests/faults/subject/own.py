"""Programs that change what belongs to a process: files, rights, limits."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

from tests.faults.subject.common import ARGUMENTS, NOBODY, behaviour, say, the_ledger, work


@behaviour
def closes_files(seconds: float) -> None:
    """All that it did not open, and then has many of its own under the same numbers."""
    work(seconds / 2)
    os.closerange(3, 4096)
    files = [os.open(f"own-{n}", os.O_RDWR | os.O_CREAT, 0o600) for n in range(300)]
    work(seconds / 2 + 1.2)
    say(f"bytes that are not its own: {sum(os.fstat(file).st_size for file in files)}")


@behaviour
def closes_streams(seconds: float) -> None:
    work(seconds / 2)
    for stream in (0, 1, 2):
        os.close(stream)
    work(seconds / 2)
    the_ledger().end()
    os._exit(4)


@behaviour
def uses_all_files(seconds: float) -> None:
    """No descriptor is left, from the start or from the midst on."""
    if ARGUMENTS[0] == "midst":
        work(seconds / 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError as error:
        say(str(error.strerror))
    work(seconds)
    for file in held:
        os.close(file)


@behaviour
def changes_folder(seconds: float) -> None:
    work(seconds / 2)
    Path("below").mkdir()
    os.chdir("below")
    Path("mine.txt").write_text("mine\n")
    work(seconds / 2)


@behaviour
def changes_root(seconds: float) -> None:
    work(seconds / 2)
    Path("below").mkdir()
    os.chroot("below")
    os.chdir("/")
    work(seconds / 2)


@behaviour
def drops_privileges(seconds: float) -> None:
    if ARGUMENTS[0] == "midst":
        work(seconds / 2)
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    work(seconds)
    say(f"uid {os.getuid()}")


@behaviour
def masks_files(seconds: float) -> None:
    """No permission for anybody on what it makes."""
    before = os.umask(0o777)
    work(seconds)
    os.umask(before)


@behaviour
def limits_files(seconds: float) -> None:
    """To so many bytes; it heeds the signal."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(ARGUMENTS[0]), int(ARGUMENTS[0])))
    work(seconds)
    try:
        Path("large").write_bytes(bytes(1 << 20))
    except OSError as error:
        say(str(error.strerror))


@behaviour
def limits_files_unaware(seconds: float) -> None:
    """To so many bytes, with the signal's default, which is to end; of its own it writes none."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(ARGUMENTS[0]), int(ARGUMENTS[0])))
    work(seconds)
    say("alive")


@behaviour
def clears_environment(seconds: float) -> None:
    os.environ.clear()
    work(seconds)


@behaviour
def leaves_the_session(seconds: float) -> None:
    if os.getpid() != os.getpgrp():
        os.setpgid(0, 0)
    work(seconds)
