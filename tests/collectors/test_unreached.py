"""What a recording does not reach: containers, batch systems, sudo, `env -i`, isolated Pythons."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gputrace.collectors.unreached import HOOKS, ReachWatch, isolating_option
from tests.helpers import command

PYTHON = sys.executable
RUNS = "import time; time.sleep(1)"
CONTAINER = """#!/bin/sh
shift
while [ "${1#-}" != "$1" ]; do shift; done
shift
env -i "$@"
"""
FAKES = {
    "docker": CONTAINER,
    "podman": CONTAINER,
    "sudo": '#!/bin/sh\nshift 2\nexec env -i "$@"\n',
    "sbatch": "#!/bin/sh\necho Submitted batch job 17\n",
    "srun": "#!/bin/sh\nexit 0\n",
}
"""Executables that do to their programs what the real ones do."""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the fakes on PATH, and a script that takes a second; return the script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, source in FAKES.items():
        (folder / name).write_text(source)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    script = tmp_path / "train.py"
    script.write_text(RUNS)
    return script


def said(folder: Path, *program: str | Path) -> list[str]:
    ran = command.gputrace("record", "-o", folder / "t.sqlite", "--", *program)
    return [line for line in ran.err.splitlines() if line.startswith("gputrace: ")][2:]


@pytest.mark.parametrize(
    ("wrapper", "because", "recorded"),
    [
        (("docker", "run", "--gpus=all", "image"), "environment of its own", "gputrace"),
        (("podman", "run", "image"), "environment of its own", "gputrace"),
        (("nohup", "timeout", "60", "docker", "run", "python"), "of its own", "gputrace"),
        (("sudo", "-u", "me"), "in a new environment", "/gputrace"),
        (("env", "-i", "A=1"), "in an empty environment", "/gputrace"),
        (("env", "-"), "in an empty environment", "/gputrace"),
        (("sbatch", "--wait"), "submits a job and returns", "gputrace"),
        (("srun", "-n1"), "not processes of this recorder", "gputrace"),
    ],
)
def test_a_wrapper_is_named_with_the_place_of_the_recorder_on_its_command_line(
    path: Path, wrapper: tuple[str, ...], because: str, recorded: str
) -> None:
    (line,) = said(path.parent, *wrapper, PYTHON, path)
    assert because in line
    head, words, tail = line.partition(f"{recorded} record -- ")
    assert words
    assert head.rpartition(": ")[2].split()[: len(wrapper)] == list(wrapper)
    assert tail == f"{PYTHON} {path}"


def test_a_wrapper_within_a_script_is_seen_while_it_runs(path: Path) -> None:
    script = path.with_name("run.sh")
    script.write_text(f"docker run --env=API_KEY=abcdefgh12345678 image {PYTHON} {path}\n")
    (line,) = said(path.parent, "sh", script)
    assert line.startswith("gputrace: nothing of docker run was recorded")
    assert f"image gputrace record -- {PYTHON} {path}" in line
    assert "abcdefgh" not in line


def test_the_trace_says_why_it_has_nothing(path: Path) -> None:
    said(path.parent, "docker", "run", "image", PYTHON, path)
    ran = command.gputrace("analyze", path.with_name("t.sqlite"))
    assert "nothing of docker run was recorded" in ran.err
    assert f"docker run image gputrace record -- {PYTHON} {path}" in ran.err


def test_who_took_the_environment_away_is_named(path: Path) -> None:
    script = path.with_name("run.sh")
    script.write_text(f"unset GPUTRACE_DIR PYTHONPATH\n{PYTHON} {path}\ntrue\n")
    (line,) = said(path.parent, "sh", script)
    assert "was recorded: sh (process " in line
    assert line.endswith(f"record there: {Path(PYTHON).with_name('gputrace')} record -- "
                         f"{PYTHON} {path}")  # fmt: skip


@pytest.mark.parametrize("options", [["-I"], ["-W", "ignore", "-uE"], ["-S"]])
def test_an_isolated_python_is_named_with_the_command_line_to_type(
    path: Path, options: list[str]
) -> None:
    (line,) = said(path.parent, PYTHON, *options, path)
    assert f"ran without the hooks, so no steps of it are known: it was started with {options[-1]}"
    kept = [word for word in options if word not in ("-I", "-S")]
    kept = ["-u" if word == "-uE" else word for word in kept]
    assert line.endswith("gputrace record -- " + " ".join([PYTHON, *kept, str(path)]))


@pytest.mark.parametrize(
    "program", [("python", "train.py"), ("docker", "ps"), ("env", "A=1", "sh", "-c", "sleep 0.3")]
)
def test_nothing_is_said_where_nothing_is_known(path: Path, program: tuple[str, ...]) -> None:
    assert not any("nothing of" in line for line in said(path.parent, *program))


def test_steps_that_were_seen_outweigh_a_process_that_was_not(path: Path) -> None:
    path.write_text(
        "import gputrace, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-I', '-c', {RUNS!r}])\n"
        "for _ in range(5): gputrace.step()\n"
    )
    lines = said(path.parent, PYTHON, path)
    assert not any("without the hooks" in line for line in lines)
    assert lines[-1].startswith("gputrace: next:")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("-I -c pass", "-I"),
        ("-uE train.py", "-uE"),
        ("-X dev -S train.py", "-S"),
        ("-Werror::ImportWarning train.py -I", ""),
        ("-c pass -E", ""),
        ("-m site -S", ""),
        ("- -I", ""),
        ("", ""),
    ],
)
def test_options_of_python_are_told_from_arguments_of_the_program(words: str, option: str) -> None:
    assert isolating_option(["python", *words.split()]) == option


@pytest.mark.parametrize(
    ("variables", "options", "line"),
    [
        ({"PYTHONPATH": "/mine"}, [], "its PYTHONPATH was replaced"),
        ({}, [], "its PYTHONPATH was replaced"),
        ({"PYTHONPATH": f"{HOOKS}:/mine"}, ["-u", "-I"], "it was started with -I"),
        ({"PYTHONPATH": f"{HOOKS}:/mine"}, ["-u"], ""),
    ],
)
def test_a_python_that_keeps_the_folder_but_not_the_hooks_is_named(
    tmp_path: Path, variables: dict[str, str], options: list[str], line: str
) -> None:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    words = [PYTHON, *options, "-c", "import sys; print(); sys.stdin.read()", "-E"]
    with subprocess.Popen(
        words,
        env={**inherited, **variables, "GPUTRACE_DIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as python:
        assert python.stdout is not None
        python.stdout.readline()
        watch = ReachWatch(tmp_path, ["sh", "run.sh"])
        watch.look_now_and_then()
        python.communicate()
    assert line in watch.notice()
    assert bool(line) == bool(watch.notice())
