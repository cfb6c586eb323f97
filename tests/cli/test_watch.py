"""`gputrace watch`: sketches of real processes while they run."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gputrace.cli.watch import families
from gputrace.collectors import armed
from gputrace.model.sketches import SketchReport
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
    ran = command.gputrace("watch", *words, env=environment | {"GPUTRACE_KERNELS": "1000"})
    assert ran.code == 0, ran.err
    assert re.search(
        rf"watching \d processes of job \S+ for 3 s; `gputrace analyze {folder}`", ran.err
    )
    assert ran.err.count("its first steps are seen") == 1
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
    (ring,) = folder.glob("late-rank-*.spool")
    assert f"`gputrace recover {ring}` makes a trace of the windows so far" in ran.err
    recovered = command.gputrace("recover", ring, "-o", tmp_path / "t.sqlite")
    assert (recovered.code, "steps" in recovered.err) == (0, True), recovered.err


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


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Listen as an OpenTelemetry collector does; yield its URL and the requests it gets."""
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    requests: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert (self.path, self.headers["x-key"]) == ("/v1/metrics", "secret")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append(service.ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


def test_metrics_are_sent_to_a_collector_of_opentelemetry_also_at_the_end(
    environment: dict[str, str], tmp_path: Path
) -> None:
    env = environment | {"OTEL_EXPORTER_OTLP_HEADERS": "x-key=secret"}
    with collector() as (url, requests):
        words = ("-o", tmp_path / "s", "--every", "1s", "--for", "3s", "--otlp", url)
        ran = command.gputrace("watch", *words, env=env)
    assert (ran.code, "--otlp" in ran.err) == (0, False), ran.err
    assert len(requests) > 1
    (resource,) = requests[-1].resource_metrics
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert named["service.name"] == "gputrace"
    (scope,) = resource.scope_metrics
    metrics = {metric.name: metric for metric in scope.metrics}
    assert metrics.keys() == {
        f"gputrace_{name}" for name, *_ in families(SketchReport(1, "sketches", (), ()))
    }
    assert metrics["gputrace_step_seconds"].unit == "s"
    parts = {}
    for point in metrics["gputrace_step_part_seconds"].gauge.data_points:
        labels = {each.key: each.value for each in point.attributes}
        if labels["part"].string_value == "data":
            parts[labels["rank"].int_value] = point.as_double
    assert parts.keys() == {0, 1, 2}
    assert parts[2] > 0.02 > parts[0]


def test_a_collector_that_is_not_there_is_said_once_and_the_watch_goes_on(
    environment: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    words = ("-o", tmp_path / "s", "--every", "1s", "--for", "3s", "--otlp", url)
    env = environment | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    ran = command.gputrace("watch", *words, env=env)
    assert (ran.code, ran.err.count(f"--otlp {url}: ")) == (0, 1), ran.err
    assert "kept in" in ran.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--every", "1ms"), "--every 1ms: half a second at least"),
        (("--for", "x"), "--for: "),
        (("--metrics", "99999"), "--metrics 99999: not a port, nor HOST:PORT"),
        (("--otlp", "collector:4318"), "collector:4318: not a URL such as http://collector:4318"),
        (("-o", "/dev/null"), "/dev/null: a file; name a folder"),
    ],
)
def test_wrong_options_are_said_in_one_line(
    environment: dict[str, str], words: tuple[str, ...], problem: str
) -> None:
    ran = command.gputrace("watch", *words, env=environment)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert problem in ran.err
