"""`gputrace record --live`: the screen shows the recording, and the program notices nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gputrace.collectors.launch.pty_session import OutputBuffer
from tests.helpers import command
from tests.helpers.on_terminal import OnTerminal

OPTIONS = ("record", "--live", "--no-nvml", "--backend", "host", "-o", "t.sqlite")
STEPS = """
import os, sys, time, gputrace
for at in range({steps}):
    gputrace.step()
    time.sleep(0.005)
    if at % 50 == 0:
        print("at", at, flush=True)
while not os.path.exists("seen"):
    time.sleep(0.01)
print("done")
sys.exit(7)
"""


def record(folder: Path, *program: str, **streams: object) -> OnTerminal:
    return OnTerminal(*OPTIONS, "--", *program, cwd=folder, **streams)  # type: ignore[arg-type]


def test_the_screen_is_drawn_and_then_all_that_the_program_said(tmp_path: Path) -> None:
    ran = record(tmp_path, sys.executable, "-c", STEPS.format(steps=200))
    ran.until("rank 0")
    (tmp_path / "seen").touch()
    assert ran.end() == 7
    said = "".join(f"at {at}\n" for at in range(0, 200, 50)) + "done\n"
    assert ran.left.startswith(said)
    told = ran.left.removeprefix(said).lstrip(" \r").splitlines()
    assert told[0].startswith("gputrace: t.sqlite: 0 kernels, 200 steps")
    assert all(line.startswith("gputrace: ") for line in told)
    assert ran.text.count("\x1b[?1049h") == ran.text.count("\x1b[?1049l") == 1
    assert (tmp_path / "t.sqlite").exists()


def test_the_program_has_a_terminal_as_large_as_ours(tmp_path: Path) -> None:
    look = "import os; print([os.isatty(n) for n in range(3)], *os.get_terminal_size())"
    ran = record(tmp_path, sys.executable, "-c", look)
    assert ran.end() == 0
    assert "[True, True, True] 100 30\n" in ran.left


def test_streams_that_are_no_terminal_are_the_programs_own(tmp_path: Path) -> None:
    words = "import os, sys; print(os.isatty(2), sys.stdin.read()); print('e', file=sys.stderr)"
    out, told = tmp_path / "out", tmp_path / "in"
    told.write_text("typed")
    with out.open("wb") as stdout, told.open("rb") as stdin:
        ran = record(tmp_path, sys.executable, "-c", words, stdin=stdin, stdout=stdout)
        assert ran.end() == 0
    assert out.read_text() == "True typed\n"
    assert ran.left.startswith("e\n")


def test_all_streams_may_lead_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "all"
    with path.open("wb") as file:
        words = ("sh", "-c", "echo out; echo err >&2; exit 3")
        ran = record(tmp_path, *words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        assert ran.end() == 3
    lines = path.read_text().splitlines()
    assert lines[:2] == ["out", "err"]
    assert lines[2].startswith("gputrace: t.sqlite: ")
    assert ran.left == ""


CATCH = """
import signal, sys, time
def caught(number, frame):
    print("caught", number, flush=True)
    time.sleep(1.2)
    sys.exit(number)
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, caught)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("key", "number"),
    [("\x03", signal.SIGINT), ("\x1c", signal.SIGQUIT)],
    ids=["Ctrl+C", "Ctrl+\\"],
)
def test_keys_are_for_the_program_once(tmp_path: Path, key: str, number: signal.Signals) -> None:
    ran = record(tmp_path, sys.executable, "-c", CATCH)
    ran.until("ready")
    ran.type(key)
    assert ran.end() == number
    assert ran.left.count(f"caught {int(number)}\n") == 1


def send_to_recorder(pid: int, number: int) -> None:
    os.kill(pid, number)


def send_to_group(pid: int, number: int) -> None:
    os.killpg(pid, number)


def send_to_each(pid: int, number: int) -> None:
    """To all that descend from it, as a supervisor does."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            send_to_each(int(child), number)
    os.kill(pid, number)


@pytest.mark.parametrize(
    ("send", "number"),
    [
        (send_to_recorder, signal.SIGUSR1),
        (send_to_recorder, signal.SIGTERM),
        (send_to_group, signal.SIGTERM),
        (send_to_each, signal.SIGTERM),
    ],
)
def test_signals_are_for_the_program_once(
    tmp_path: Path, send: Callable[[int, int], None], number: signal.Signals
) -> None:
    ran = record(tmp_path, sys.executable, "-c", CATCH)
    ran.until("ready")
    send(ran.process.pid, number)
    assert ran.end() == number
    assert ran.left.count(f"caught {int(number)}\n") == 1


def test_a_program_that_a_signal_ends_gives_its_code(tmp_path: Path) -> None:
    assert record(tmp_path, "sh", "-c", "kill -9 $$").end() == -9


def test_who_leaves_the_screen_has_the_programs_terminal(tmp_path: Path) -> None:
    words = "print('first', flush=True); said = input('? '); print('got', said)"
    ran = record(tmp_path, sys.executable, "-c", words)
    ran.until("first")
    ran.type("q")
    ran.until("first\n? ", left=True)
    ran.type("an answer\r")
    assert ran.end() == 0
    assert ran.left.startswith("first\n? an answer\ngot an answer\n")


def test_a_screen_that_is_left_does_not_come_again_where_the_recorder_was_stopped(
    tmp_path: Path,
) -> None:
    ran = record(tmp_path, sys.executable, "-c", "print('first', flush=True); input('? ')")
    ran.until("first")
    ran.type("q")
    ran.until("first\n? ", left=True)
    ran.send(signal.SIGCONT)
    ran.type("\r")
    assert ran.end() == 0
    assert ran.text.count("\x1b[?1049h") == 1


def test_what_is_too_much_for_the_terminal_is_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.sqlite.log").write_text("another's")
    words = "import sys; sys.stdout.write('x' * 79 + '\\n'); sys.stdout.write('y' * (5 << 20))"
    ran = record(tmp_path, sys.executable, "-c", words)
    assert ran.end() == 0
    assert "gputrace: what the program wrote meanwhile is in t.sqlite-1.log" in ran.left
    log = (tmp_path / "t.sqlite-1.log").read_bytes()
    assert log.startswith(b"x" * 79 + b"\r\n" + b"y" * (5 << 20))
    assert b"0 kernels" in log
    assert "yyyy" not in ran.left
    assert (tmp_path / "t.sqlite.log").read_text() == "another's"


def test_what_a_program_writes_is_shown_without_its_escape_sequences(tmp_path: Path) -> None:
    held = OutputBuffer(tmp_path / "log")
    held.add(b"one\r\n\x1b[31mred\x1b[0m [bold]\r\n10%\r20%\r\n\x1b]0;title\x07two\xff\r\n")
    assert held.lines(8) == ["one", "red [bold]", "20%", "two\N{REPLACEMENT CHARACTER}"]
    assert held.lines(1) == ["two\N{REPLACEMENT CHARACTER}"]


def test_without_a_terminal_nothing_is_started(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "gputrace", *OPTIONS, "--", "touch", "started"],
        cwd=tmp_path,
        env=command.environment({"TERM": "xterm"}),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 125
    assert ran.stderr == "gputrace: --live needs a terminal, and there is none; record without it\n"
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_is_not_there_is_told_before_the_screen(tmp_path: Path) -> None:
    ran = record(tmp_path, "no-such-program")
    assert ran.end() == 127
    assert ran.left == "gputrace: no-such-program: no such program\n"
    assert "\x1b[?1049h" not in ran.text
