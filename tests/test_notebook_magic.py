"""``%%gputrace``: a cell is recorded and its report shown, in processes of their own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

import gputrace
from gputrace.collectors.backends.cupti import collector_library
from tests.helpers.notebooks import run_notebook
from tests.native.build import Machine

LOAD: Final = "%load_ext gputrace"
IMPORT: Final = """
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.optim import Optimizer
import time
def train(steps):
    optimizer = Optimizer()
    for item in _BaseDataLoaderIter(range(steps), 0.02):
        time.sleep(0.01)
        optimizer.step()
"""
GPU: Final = """
import ctypes, os, struct, time
from gputrace.collectors import in_process as inside, job_tasks
inside.has_driver = job_tasks.has_driver = lambda: True
def start_cuda():
    global cupti
    ctypes.CDLL("libcuda.so.1")
    if "CUDA_INJECTION64_PATH" in os.environ:
        ctypes.CDLL(os.environ["CUDA_INJECTION64_PATH"]).InitializeInjection()
        cupti = ctypes.CDLL(os.environ["GPUTRACE_CUPTI"])
name = ctypes.c_char_p(b"sgemm_128x64")
def kernels(count):
    for number in range(count):
        start = time.time_ns()
        record = bytearray(256)
        struct.pack_into("<I", record, 0, 10)
        struct.pack_into("<QQ", record, 16, start, start + 400000)
        struct.pack_into("<III", record, 40, 1, 7, 13)
        struct.pack_into("<I", record, 92, 1000 + number)
        struct.pack_into("<Q", record, 104, ctypes.cast(name, ctypes.c_void_p).value)
        time.sleep(0.001)
        cupti.fake_emit(bytes(record), ctypes.c_uint64(start + 400000))
"""


@pytest.fixture(params=["fake", "ipython"])
def shell(request: pytest.FixtureRequest) -> str:
    if request.param == "ipython" and find_spec("IPython") is None:
        pytest.skip("IPython is not installed")
    return str(request.param)


def gpu_environment(machine: Machine) -> dict[str, str]:
    """Libraries that stand for CUDA's."""
    if collector_library() is None:
        pytest.skip("the collector is not built")
    folder = machine.folder
    return {"LD_LIBRARY_PATH": str(folder), "GPUTRACE_CUPTI": str(folder / "libcupti.so.13")}


def kernels_in(trace: Path) -> int:
    with gputrace.open(trace) as opened:
        return sum(gpu.kernels for gpu in opened.analyze().gpus)


def test_the_report_of_what_ran_in_a_cell_is_shown_below_it(tmp_path: Path, shell: str) -> None:
    cells = [LOAD, IMPORT, "%%gputrace\ntrain(12)", "train(9)", "%%gputrace\ntrain(6)"]
    *_, cell, between, second = run_notebook(tmp_path, shell, cells)
    (text,), (html,) = cell.shown, cell.html
    assert "of 12 steps" in text
    assert "waits for data" in text
    assert "<table>" in html
    assert "of 12 steps" in html
    assert cell.error == cell.out.strip() == ""
    assert cell.messages == (
        "gputrace: there is no NVIDIA driver on this machine; "
        "only steps and waits for data are recorded, nothing of the GPUs\n"
    )
    assert not between.shown
    assert "of 6 steps" in second.shown[0]


def test_a_cell_does_what_it_does_without_the_magic(tmp_path: Path, shell: str) -> None:
    cells = [LOAD, "%%gputrace --backend host\na = 20\ndef f(): return a + 1\nf() * 2", "print(a)"]
    _, cell, after = run_notebook(tmp_path, shell, cells)
    assert cell.out.strip().endswith("42")
    assert after.out == "20\n"
    assert "nothing to report of this cell" in cell.messages


def test_a_failing_cell_fails_as_without_it_and_has_its_report(tmp_path: Path, shell: str) -> None:
    failing = "%%gputrace\ntrain(5)\nraise KeyError('mine')"
    *_, cell, after = run_notebook(tmp_path, shell, [LOAD, IMPORT, failing, "print('on')"])
    assert cell.error == "KeyError: 'mine'"
    assert "of 5 steps" in cell.shown[0]
    assert after.out == "on\n"
    if shell == "ipython":
        assert "raise KeyError" in cell.traceback
        assert "notebook_magic.py" not in cell.traceback
        assert "run_cell_magic" not in cell.traceback


def test_marks_of_the_user_count(tmp_path: Path, shell: str) -> None:
    step = "import gputrace, time\ngputrace.step()"
    loop = "%%gputrace\nfor _ in range(8):\n    time.sleep(0.005)\n    gputrace.step()"
    *_, cell = run_notebook(tmp_path, shell, [step, LOAD, loop])
    assert "'gputrace.step'" in " ".join(cell.shown[0].split())


def test_wrong_options_are_told_in_a_line_and_nothing_runs(tmp_path: Path) -> None:
    (tmp_path / "there.sqlite").touch()
    told = {
        "--steps 3:4": "No such option",
        "--backend nsys": "'nsys' is not one of 'auto', 'cupti', 'host'",
        "--backend cupti": "the GPUs cannot be recorded: there is no NVIDIA driver",
        "-o there.sqlite": "there.sqlite: exists",
        "'": "No closing quotation",
    }
    wrong = [f"%%gputrace {options}\nran = 1" for options in told]
    _, *cells, after = run_notebook(tmp_path, "fake", [LOAD, *wrong, "print('ran' in globals())"])
    for cell, words in zip(cells, told.values(), strict=True):
        (line,) = cell.traceback.splitlines()
        assert line.startswith("gputrace: ")
        assert words in line
    assert after.out == "False\n"


def test_the_trace_of_a_cell_can_be_kept(tmp_path: Path) -> None:
    run_notebook(tmp_path, "fake", [LOAD, IMPORT, "%%gputrace -o kept.sqlite\ntrain(7)"])
    with gputrace.open(tmp_path / "kept.sqlite") as trace:
        assert len(trace.analyze().step_list) == 7


@pytest.mark.parametrize("begins", ["in a cell that is recorded", "in one before"])
def test_the_gpus_are_recorded_where_cuda_starts_later(
    machine: Machine, tmp_path: Path, begins: str
) -> None:
    early = "start_cuda()\nkernels(3)" if begins == "in one before" else ""
    late = "" if early else "start_cuda()\n"
    cells = [
        *(GPU, LOAD, early),
        f"%%gputrace -o first.sqlite\n{late}kernels(20)",
        "kernels(9)",
        "%%gputrace --backend cupti -o second.sqlite\nkernels(5)",
        "%%gputrace --backend host -o third.sqlite\nkernels(4)",
        "import os\nprint([n for n in os.environ if 'INJECTION' in n or n == 'GPUTRACE_DIR'])",
    ]
    *_, first, _, second, third, after = run_notebook(
        tmp_path, "fake", cells, gpu_environment(machine)
    )
    assert kernels_in(tmp_path / "first.sqlite") == 20
    assert kernels_in(tmp_path / "second.sqlite") == 5
    assert "sgemm" in first.shown[0]
    assert "sgemm" in second.shown[0]
    assert "nothing to report" in third.messages
    assert after.out == "[]\n"


def test_cuda_that_was_started_before_is_told_of(machine: Machine, tmp_path: Path) -> None:
    *_, cell = run_notebook(
        tmp_path,
        "fake",
        [GPU, "start_cuda()", LOAD, IMPORT, "%%gputrace\ntrain(6)"],
        gpu_environment(machine),
    )
    assert "CUDA had been started before gputrace was loaded; restart the kernel" in cell.messages
    text = " ".join(cell.shown[0].split())
    assert "of 6 steps" in text
    assert "CUDA had been started before gputrace was loaded." in text


def test_a_notebook_under_record_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    _, cell = run_notebook(
        tmp_path,
        "fake",
        [LOAD, "%%gputrace\nprint(1 + 1)"],
        {"GPUTRACE_DIR": str(tmp_path / "spool")},
    )
    assert cell.out == "2\n"
    assert "by the `gputrace record` around it" in cell.messages
