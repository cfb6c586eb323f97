"""`gputrace watch`: sketches of real processes while they run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gputrace.collectors import armed
from tests.helpers import command

TRAINS = """
import multiprocessing, os, time, gputrace

def load(rank, step):
    time.sleep(0.004 + 0.02 * (rank == 2))

def train(rank, barrier):
    os.environ["RANK"] = str(rank)
    for step in range(100000):
        with gputrace.step():
            with gputrace.annotate("load batch"):
                load(rank, step)
            barrier.wait()

fork = multiprocessing.get_context("fork")
barrier = fork.Barrier(3)
for process in [fork.Process(target=train, args=(rank, barrier)) for rank in range(3)]:
    process.start()
"""


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """The environment of three armed ranks that train, the last of which waits for its loader."""
    # The path of a socket has 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="gt", dir="/tmp"))
    env = {"GPUTRACE_ARM": str(folder)}
    words = [sys.executable, "-m", "gputrace", "arm", "--", sys.executable, "-c", TRAINS]
    program = subprocess.Popen(words, env=command.environment(env), start_new_session=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUTRACE_ARM", str(folder))
        until = time.monotonic() + 60
        while not [p for p in armed.find() if p.step > 60]:
            assert time.monotonic() < until
            time.sleep(0.1)
    yield env
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    shutil.rmtree(folder)


def test_a_late_rank_is_said_while_it_runs_and_read_from_the_folder_later(
    environment: dict[str, str], tmp_path: Path
) -> None:
    folder, said = tmp_path / "sketches", tmp_path / "said"
    alert = f'echo "$GPUTRACE_KIND: $GPUTRACE_ALERT" >> {said}; exit 3'
    words = ("-o", folder, "--every", "1s", "--for", "3s", "--alert", alert)
    ran = command.gputrace("watch", *words, env=environment)
    assert ran.code == 0, ran.err
    assert re.search(
        rf"watching \d processes of job \S+ for 3 s; `gputrace analyze {folder}`", ran.err
    )
    assert re.search(rf"\d+ steps of \d processes kept in {folder}\n", ran.err)
    assert "rank 2 is late by " in ran.err
    assert "waiting for data at <string>:5 load" in ran.err
    assert f"--alert: {alert} ended with 3" in ran.err
    assert said.read_text().startswith("late-rank: rank 2 is late by ")
    assert ran.err.count("rank 2 is late") == said.read_text().count("rank 2 is late")
    shown = command.gputrace("analyze", folder)
    assert "Rank 2 is late by " in shown.out
    report = json.loads(command.gputrace("analyze", folder, "--json").out)
    assert report["source"] == "sketches"
    assert [row["rank"] for row in report["ranks"]] == [0, 1, 2]
    (late,) = (change for change in report["changes"] if change["kind"] == "late-rank")
    assert (late["rank"], late["part"]) == (2, "data")
    assert late["ns"] == pytest.approx(20e6, rel=0.3)


def test_metrics_are_served_to_prometheus_beside_a_reader_that_stalls(
    environment: dict[str, str], tmp_path: Path
) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["watch", "-o", str(tmp_path / "s"), "--every", "1s", "--metrics", str(port)]
    watching = subprocess.Popen(
        [sys.executable, "-m", "gputrace", *words], env=command.environment(environment)
    )
    try:
        until, text = time.monotonic() + 60, ""
        while "gputrace_lost_seconds{" not in text:
            assert time.monotonic() < until
            time.sleep(0.2)
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as stalls:
                stalls.send(b"GET /met")
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
                    text = page.read().decode()
        families = {each.name: each for each in parser.text_string_to_metric_families(text)}
        steps = {s.labels["rank"]: s.value for s in families["gputrace_steps"].samples}
        assert steps.keys() == {"0", "1", "2"}
        data = {
            sample.labels["rank"]: sample.value
            for sample in families["gputrace_step_part_seconds"].samples
            if sample.labels["part"] == "data"
        }
        assert data["2"] > 0.02 > data["0"]
        lost = [sample.labels for sample in families["gputrace_lost_seconds"].samples]
        assert [each["rank"] for each in lost if each["kind"] == "late-rank"] == ["2"]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0
    finally:
        watching.kill()
        watching.wait()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--every", "1ms"), "--every 1ms: half a second at least"),
        (("--for", "x"), "--for: "),
        (("--metrics", "99999"), "--metrics 99999: not a port, nor HOST:PORT"),
        (("-o", "/dev/null"), "/dev/null: a file; name a folder"),
    ],
)
def test_wrong_options_are_said_in_one_line(
    environment: dict[str, str], words: tuple[str, ...], problem: str
) -> None:
    ran = command.gputrace("watch", *words, env=environment)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert problem in ran.err
