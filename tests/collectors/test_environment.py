"""`gputrace.environment`: programs that another process starts, as Ray does, belong to the job."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from gputrace.collectors import armed
from tests.helpers import command
from tests.helpers.lookups import rows
from tests.helpers.programs import torch_python

STARTER: Final = """
import json, os, subprocess, sys
bare = dict(os.environ)
for line in sys.stdin:
    env = bare | json.loads(line)
    workers = [subprocess.Popen([sys.executable, sys.argv[1]], env=env | {"RANK": r}) for r in "01"]
    print([worker.wait() for worker in workers], flush=True)
"""
"""Starts two workers for each line, with the variables in it, and is no child of the program."""
DRIVER: Final = """
import gputrace, json, os, sys
with open(sys.argv[1], "w") as requests, open(sys.argv[2]) as answers:
    print(json.dumps(gputrace.environment()), file=requests, flush=True)
    answers.readline()
"""
WORKER: Final = """
import gputrace, os, time
for number in range(int(os.environ.get("STEPS", 30))):
    time.sleep(0.02)
    gputrace.step()
if os.environ["RANK"] == "1":
    with gputrace.annotate("writes what is left"):
        time.sleep(0.5)
    os._exit(1)
"""


@pytest.fixture
def armed_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # The path of a socket has 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="gt", dir="/tmp"))
    monkeypatch.setenv("GPUTRACE_ARM", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[list[str]]:
    """The words of a program whose workers a starter that knows nothing of gputrace starts."""
    for name, source in (("starter", STARTER), ("driver", DRIVER), ("worker", WORKER)):
        (tmp_path / f"{name}.py").write_text(source)
    fifos = [tmp_path / "requests", tmp_path / "answers"]
    for fifo in fifos:
        os.mkfifo(fifo)
    shell = f"exec {sys.executable} starter.py worker.py < requests > answers"
    env = command.environment({"STEPS": os.environ.get("STEPS", "30")})
    env.pop("GPUTRACE_ARM", None)
    starter = subprocess.Popen(["sh", "-c", shell], cwd=tmp_path, env=env, start_new_session=True)
    yield [sys.executable, str(tmp_path / "driver.py"), *map(str, fifos)]
    with suppress(ProcessLookupError):
        os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()


def test_workers_that_another_process_starts_are_recorded_with_their_driver(
    driver: list[str], tmp_path: Path
) -> None:
    trace = tmp_path / "t.sqlite"
    ran = command.gputrace("record", "-o", trace, "--", *driver)
    assert ran.code == 0, ran.err
    ranks = rows(trace, "SELECT rank, count(*) FROM GPUTRACE_PROCESS GROUP BY rank")
    assert ranks == [(0, 1), (1, 1)]
    assert rows(trace, "SELECT count(*) FROM GPUTRACE_STEP") == [(60,)]
    # Its worker ended with exit code 1 at the end of its work; the program made nothing of that.
    assert "exit code" not in ran.err


def test_workers_that_another_process_starts_are_armed_as_one_job_with_their_driver(
    armed_folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("STEPS", "100000")
    words = request.getfixturevalue("driver")
    program = subprocess.Popen(words, env=command.environment(), start_new_session=True)
    try:
        until = time.monotonic() + 60
        while len(found := [each for each in armed.find() if each.step]) < 2:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert [(each.job, each.rank) for each in found] == [(str(program.pid), r) for r in (0, 1)]
        assert len(list(armed_folder.iterdir())) == 1
    finally:
        program.kill()
        program.wait()


def test_workers_on_another_machine_are_one_job_of_the_same_name_there(armed_folder: Path) -> None:
    env = {"GPUTRACE_ARM": str(armed_folder), "GPUTRACE_DIR": str(armed_folder / "4711-beef")}
    enters = "import _gputrace_hooks, os; print(os.environ['GPUTRACE_DIR'])"
    hooks = str(command.ROOT / "gputrace" / "collectors" / "hooks")
    env["PYTHONPATH"] = hooks
    entered = {command.python("-S", "-c", enters, env=env).out for _ in range(2)}
    assert entered == {f"{armed_folder}/4711-beef\n"}
    env["GPUTRACE_DIR"] = str(armed_folder.parent / "elsewhere" / "4711-beef")
    assert command.python("-S", "-c", enters, env=env).out.startswith(f"{armed_folder}/")


def test_a_program_that_is_recorded_gets_the_variables_of_its_recorder(tmp_path: Path) -> None:
    script = "import gputrace, json; print(json.dumps(gputrace.environment()))"
    words = ("--backend", "host", "-o", tmp_path / "t.sqlite", "--", sys.executable, "-c", script)
    given = json.loads(command.gputrace("record", *words, env={"SECRET": "x"}).out)
    assert given["GPUTRACE_DIR"] == str(tmp_path / "t.sqlite.spool")
    assert re.search("/hooks(:|$)", given["PYTHONPATH"])
    assert "SECRET" not in given


RAY: Final = """
import os, ray, sys, time, torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

def loop(config):
    model = prepare_model(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        optimizer.zero_grad()
        model(torch.rand(4, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
        if config["kill"] and train.get_context().get_world_rank() == 2 and step == 40:
            os.kill(os.getpid(), 9)

ray.init("local", num_cpus=4, include_dashboard=False)
scaling = ScalingConfig(num_workers=4, resources_per_worker={"CPU": 1})
TorchTrainer(loop, train_loop_config={"kill": "kill" in sys.argv}, scaling_config=scaling,
             run_config=RunConfig(storage_path=sys.argv[1])).fit()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_each_worker_of_ray_train_is_recorded_and_one_that_is_killed_is_told(
    tmp_path: Path, killed: bool
) -> None:
    python, trace = torch_python("torch, ray.train"), tmp_path / "t.sqlite"
    (tmp_path / "train.py").write_text(RAY)
    words: list[str | Path] = [
        python,
        tmp_path / "train.py",
        tmp_path / "storage",
        *["kill"] * killed,
    ]
    env = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    ran = command.gputrace("record", "-o", trace, "--", *words, env=env)
    assert bool(ran.code) == killed
    shown = command.gputrace("analyze", trace).out
    for rank in range(4):
        assert f"\n  rank {rank} " in shown
    assert ("by SIGKILL of rank 2 (" in ran.err) == killed
    assert ("by SIGKILL of rank 2 (" in " ".join(shown.split())) == killed
    assert "exit code" not in ran.err.replace("with exit code", "", int(killed))
    # Ray trains in a thread beside the one whose lines are sampled.
    assert "default_worker.py" not in shown
