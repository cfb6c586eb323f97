"""The size of a recording, told while its program runs."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Final

import pytest

from gputrace.collectors.session import GrowthWatch, Size
from tests.helpers import command

SMALL: Final = """
import sys
from gputrace import cli
from gputrace.cli import record
from gputrace.collectors import launch as child, session
record.LARGE, record.LARGE_AT_A_TERMINAL = {large}, 1000
session._BETWEEN_LOOKS_NS = 0
child.run.__defaults__ = (*child.run.__defaults__[:-1], 0.05)
sys.exit(cli.run(sys.argv[1:]))
"""
"""The command, with a recording of 1 kB being a large one."""

PROGRAM: Final = """
import os, sys, time
sys.stderr.write("half a line")
sys.stderr.flush()
with open(os.path.join(os.environ["GPUTRACE_DIR"], "big"), "w") as file:
    file.truncate(2_100_000_000)
time.sleep(0.5)
sys.stderr.write(", and the rest\\n")
"""


def test_a_size_is_told_once_for_each_doubling(tmp_path: Path) -> None:
    told: list[Size] = []
    moments = iter(range(0, 10**12, 10**9))
    growth = GrowthWatch(tmp_path, 1000, told.append, lambda: next(moments))
    for held in (0, 999, 1000, 1500, 1999, 2000, 9000, 15999, 16000):
        with (tmp_path / "h.1.spool").open("w") as file:
            file.truncate(held)
        growth.look()
    # A second more at each, and 9000 passes two doublings at once.
    assert told == [Size(n, i * 10**9) for i, n in enumerate((1000, 2000, 9000, 16000), 1)]
    assert told[1].rate == 1000


def test_files_in_folders_count_and_a_folder_that_is_gone_is_nothing(tmp_path: Path) -> None:
    told: list[Size] = []
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(bytes(5_000_000))
    GrowthWatch(tmp_path, 5_000_000, told.append).look()
    GrowthWatch(tmp_path / "gone", 1, told.append).look()
    assert len(told) == 1


OFTEN: Final = """
import os, sys, time
from pathlib import Path
from gputrace.collectors.launch import run
over, calls = Path(sys.argv[1]), 0
def call():
    global calls
    calls += 1
    if calls == 5: over.touch()
began = time.monotonic()
waits = f"until [ -e '{over}' ]; do sleep 0.01; done; exit 3"
code = run(["sh", "-c", waits], os.environ, call, 0.02)
print(code, 5 <= calls <= (time.monotonic() - began) / 0.02)
"""
SELDOM: Final = """
import os
from gputrace.collectors.launch import run
print(run(["true"], os.environ, lambda: print("called"), 60))
"""


def test_what_is_done_meanwhile_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """In processes of one thread: pytest has more, which may take the signals."""
    assert command.python("-c", OFTEN, str(tmp_path / "over")).out == "3 True\n"
    began = time.monotonic()
    assert command.python("-c", SELDOM).out == "0\n"
    assert time.monotonic() - began < 50


def at_a_terminal(arguments: list[str]) -> tuple[int, str]:
    """The exit code, and all that the terminal got."""
    terminal, inside = os.openpty()
    program = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=command.environment(),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(inside)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # what Linux says at the end of a terminal
            part = b""
        if not part:
            break
        shown += part
    os.close(terminal)
    return program.wait(), shown.decode()


def test_at_a_terminal_the_size_has_a_line_of_its_own(tmp_path: Path) -> None:
    words = ["record", "--no-nvml", "-o", str(tmp_path / "t.sqlite"), sys.executable, "-c", PROGRAM]
    code, shown = at_a_terminal(["-c", SMALL.format(large=1000), *words])
    assert code == 0
    first, size, rest, *_ = shown.splitlines()
    assert (first, rest) == ("half a line", ", and the rest")
    assert size.startswith("gputrace: 2.1 GB recorded in ")
    assert size.endswith(" MB/s); --duration or --steps records less")


@pytest.mark.parametrize(("large", "lines"), [(1000, 1), (3_000_000_000, 0)])
def test_elsewhere_only_what_is_larger_is_worth_a_line(
    tmp_path: Path, large: int, lines: int
) -> None:
    words = ["record", "--no-nvml", "-o", str(tmp_path / "t.sqlite"), sys.executable, "-c", PROGRAM]
    ran = command.python("-c", SMALL.format(large=large), *words)
    assert ran.code == 0
    assert ran.err.count("recorded in") == lines
    assert ran.out == ""
