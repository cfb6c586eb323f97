"""`gputrace demo`: the bundled recording, and one made on this machine."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

from gputrace import data
from gputrace.cli.demo import why_not
from tests.helpers import command

DONE, DONE_IN_PART = 0, 5
MS: Final = 1_000_000

Demo = Callable[..., command.Ran]


def with_torch(folder: Path, source: str) -> dict[str, str]:
    """What makes a source the module ``torch`` of all programs."""
    modules = folder / "modules"
    modules.mkdir(exist_ok=True)
    (modules / "torch.py").write_text(source)
    return {"PYTHONPATH": os.pathsep.join([str(modules), str(command.ROOT)])}


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    """Runs the command with a folder of its own for temporary files, which it must leave empty.

    Where PyTorch is installed, a module ``torch`` that cannot be imported takes its place.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    hidden = with_torch(tmp_path, "raise ImportError('not here')\n") if find_spec("torch") else {}

    def run(*arguments: str, **env: str) -> command.Ran:
        ran = command.gputrace("demo", *arguments, env={"TMPDIR": str(temporary)} | hidden | env)
        assert list(temporary.iterdir()) == []
        return ran

    return run


def test_it_analyzes_the_bundled_recording_and_one_made_here_and_shows_how(demo: Demo) -> None:
    ran = demo()
    assert ran.code == DONE
    bundled = "The GPUs wait for data 51% of the time (25.1 of 49.0 ms a step)."
    assert ran.out.startswith(bundled)
    recorded = " ".join(ran.out.split())
    # Not first on a machine whose cores others want.
    assert re.search(r"[Tt]he program waits for data \d+% of each step", recorded)
    assert re.search(r"rank 0 +[\d.]+ m?s +[\d.]+ m?s", recorded)
    assert "\n\nThe recording made here:\n" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    told = ran.err
    assert "two H200 GPUs" in told
    assert "\n$ gputrace record -- python train.py\n60 steps with numpy" in told
    assert "\ngputrace: trace.sqlite: 0 kernels, 60 steps, processes: 1," in told
    assert "\n$ gputrace analyze trace.sqlite\n" in told
    assert told.splitlines()[-1].startswith("Your own: gputrace record -- python train.py")


def test_it_writes_the_bundled_recording_to_a_file_that_is_not_there_and_prints_its_verdict(
    demo: Demo, tmp_path: Path
) -> None:
    target = tmp_path / "demo.sqlite"
    ran = demo("-o", str(target))
    told = f"gputrace: wrote {target}\ngputrace: next: gputrace analyze {target}\n"
    verdict = "The GPUs wait for data 51% of the time (25.1 of 49.0 ms a step).\n"
    assert (ran.code, ran.out, ran.err) == (DONE, verdict, told)
    with data.unpacked("demo.sqlite.xz") as bundled:
        assert target.read_bytes() == bundled.read_bytes()
    command.assert_refused(demo("-o", str(target)), 2, "exists", "--force")
    assert demo("-o", str(target), "--force").code == DONE


def test_a_program_gets_one_object_with_both_analyses(demo: Demo) -> None:
    ran = demo("--json")
    assert (ran.code, ran.err) == (DONE, "")
    found = json.loads(ran.out)
    cards = [(gpu["gpu"], gpu["name"]) for gpu in found["gpus"]]
    assert cards == [(number, "NVIDIA H200") for number in range(2)]
    assert found["findings"][0]["id"] == "data-feeding"
    assert found["not_recorded"] is None
    recorded = found["recorded"]
    assert recorded.keys() == found.keys() - {"recorded", "not_recorded"}
    assert (recorded["source"], recorded["steps"]["source"]) == ("gputrace", "markers")
    assert recorded["steps"]["count"] == 60
    [row] = recorded["breakdown"]
    assert row["host_data_ns"] >= 20 * MS * row["steps"]


def test_other_forms_are_one_after_the_other(demo: Demo) -> None:
    ran = demo("--format", "csv")
    assert (ran.code, ran.err) == (DONE, "")
    assert len([line for line in ran.out.splitlines() if line.startswith("gpu,gpu_known,")]) == 2


def test_the_bundled_recording_alone(demo: Demo) -> None:
    ran = demo("--no-record")
    assert ran.code == DONE
    assert "The program waits" not in ran.out
    assert "$ gputrace record" not in ran.err
    found = json.loads(demo("--no-record", "--json").out)
    assert (found["recorded"], found["not_recorded"]) == (None, "not asked for")


@pytest.mark.parametrize("form", ["text", "json"])
def test_where_training_fails_the_bundled_one_is_shown_and_one_line_says_why(
    form: str, demo: Demo, tmp_path: Path
) -> None:
    ran = demo("--format", form, **with_torch(tmp_path, "raise RuntimeError('out of luck')\n"))
    assert ran.code == DONE_IN_PART
    why = "the training failed: RuntimeError: out of luck"
    assert ran.err.splitlines()[-1] == f"gputrace: nothing was recorded here: {why}"
    if form == "json":
        found = json.loads(ran.out)
        assert (found["recorded"], found["not_recorded"]) == (None, why)
    else:
        assert ran.out.startswith("The GPUs wait for data 51% of")


@pytest.mark.parametrize(
    ("code", "err", "why"),
    [
        (125, "gputrace: this shell runs under nsys\n", "this shell runs under nsys"),
        (1, "Oops: no\ngputrace: trace.sqlite: 0 kernels\n", "the training failed: Oops: no"),
        (137, "", "the training failed: no message, exit code 137"),
        (1, "/usr/bin/python: No module named gputrace\n", "the training failed: /usr/bin/python"),
    ],
)
def test_the_reason_is_the_last_line_of_what_failed(code: int, err: str, why: str) -> None:
    assert why_not(subprocess.CompletedProcess([], code, "", err)).startswith(why)


@pytest.fixture
def train() -> dict[str, Any]:
    """The functions of the bundled script."""
    with data.unpacked("train.py") as script:
        return runpy.run_path(str(script))


def test_the_bundled_training_learns() -> None:
    """In a process of its own, in which numpy has one thread."""
    with data.unpacked("train.py") as script:
        call = f"import runpy; print(*runpy.run_path({str(script)!r})['train_with_numpy']())"
        ran = command.python("-c", call)
    first, last = map(float, ran.out.split())
    assert last < 0.8 * first


def test_the_bundled_training_learns_with_pytorch_too(train: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    first, last = train["train_with_torch"](torch)
    assert last < 0.8 * first


def test_the_bundled_training_stands_alone() -> None:
    with data.unpacked("train.py") as script:
        ran = command.python(str(script))
        assert [path.name for path in script.parent.iterdir()] == ["train.py"]
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("60 steps with ")
