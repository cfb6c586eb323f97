"""Studies that are interrupted or killed: nothing that is over is lost, nothing is run twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gputrace.errors import InputError
from gputrace.studies.database import Run
from tests.helpers import command
from tests.helpers.on_terminal import OnTerminal
from tests.helpers.study_scripts import Bench, is_running

SLOW = '[matrix]\nframework = ["slow"]\n'
NAP_S = 0.05
_PATIENCE_S = 60


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A study whose script writes its process into a file and sleeps for a minute."""
    pid = tmp_path / "pid"
    body = f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    return Bench(tmp_path).framework("slow", body).write(SLOW)


def begin(bench: Bench, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gputrace", *bench.words(*options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=command.environment({"RUNS": str(bench.ran)}),
        text=True,
    )


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pid_of_script(bench: Bench) -> int:
    path = bench.folder / "pid"
    wait_for(lambda: path.exists() and path.read_text())
    return int(path.read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_interrupts_ends_the_run_and_is_told_how_to_go_on(
    number: signal.Signals, bench: Bench
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored by whatever started the tests, as nohup does")
    with begin(bench) as running:
        script = pid_of_script(bench)
        running.send_signal(number)
        out, err = running.communicate(timeout=_PATIENCE_S)
    assert (running.returncode, out) == (130, "")
    told = f"interrupted; finished runs are kept in {bench.results}; the same command continues"
    assert err == f"gputrace: {told}\n"
    assert not is_running(script)
    assert bench.runs() == []


def test_ctrl_c_is_answered_at_a_terminal(bench: Bench) -> None:
    terminal = OnTerminal(*bench.words(), env={"RUNS": str(bench.ran)})
    script = pid_of_script(bench)
    terminal.type("\x03")
    assert terminal.end() == 130
    assert "the same command continues" in terminal.text
    assert not is_running(script)


def test_the_program_of_a_recording_is_interrupted_too(bench: Bench) -> None:
    bench.write(f"record = true\n{SLOW}")
    with begin(bench, "--backend", "host") as running:
        script = pid_of_script(bench)
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=_PATIENCE_S)
    assert running.returncode == 130
    assert not is_running(script)


def test_two_cannot_run_into_one_folder(bench: Bench) -> None:
    with begin(bench) as running:
        pid_of_script(bench)
        second = bench.run()
        assert second.code == 2
        assert second.err.count("\n") == 1
        assert f"another gputrace bench (process {running.pid}) runs there" in second.err
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=_PATIENCE_S)


def test_a_run_that_outlives_its_killed_study_is_ended_by_the_next(bench: Bench) -> None:
    with begin(bench) as running:
        script = pid_of_script(bench)
        running.kill()
        running.communicate()
    assert is_running(script)
    bench.framework("quick").write('[matrix]\nframework = ["quick"]\n')
    assert bench.run().code == 0
    assert not is_running(script)


def test_a_study_killed_again_and_again_makes_every_run_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path).framework("napping", f"time.sleep({NAP_S})")
    bench.write('repeats = 2\n[matrix]\nframework = ["napping"]\nseed = [0, 1, 2]\n')
    chance = random.Random(0)
    kept: list[Run] = []
    kills = 0
    while len(kept) < 6:
        with begin(bench) as running:
            wait_for(partial(is_over_or_has_more, running, bench, len(kept)))
            time.sleep(chance.uniform(0, 3 * NAP_S))
            kills += running.poll() is None
            os.kill(running.pid, signal.SIGKILL)
            running.communicate()
        # What was over stays as it was, and what is new comes after it.
        now = bench.runs()
        assert now[: len(kept)] == kept
        kept = now
    assert bench.run().code == 0
    assert bench.runs() == kept
    assert {run.state for run in kept} == {"done"}
    assert kills > 1
    # A run is made again only if it was under way when the study was killed.
    assert 6 <= len(bench.started()) <= 6 + kills


def is_over_or_has_more(running: subprocess.Popen[str], bench: Bench, than: int) -> bool:
    """Return true if the study has ended or finished another run; it may not even have begun."""
    try:
        return running.poll() is not None or len(bench.runs()) > than
    except InputError:
        return False
