"""Files that are known, and hold no timeline of a GPU, are told from those that are not known."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.command import assert_unreadable
from tests.helpers.recordings import DATA


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("chainer_timerhook.json", ("TimerHook of Chainer", "not when", "gputrace record")),
        ("tf_cnn_benchmarks_step.trace.json.gz", ("RunMetadata", ".xplane.pb", "gputrace record")),
    ],
)
def test_a_file_that_holds_no_timeline_of_a_gpu(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    assert_unreadable(Path(shutil.copy(DATA / name, tmp_path)), *words)


def test_a_timeline_of_one_run_on_a_gpu_is_no_trace_of_tensorflows_profiler(tmp_path: Path) -> None:
    names = ("Allocators", "/device:GPU:0/stream:15 Compute", "/device:GPU:0/stream:15 Tensors")
    rows = [
        {"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}}
        for number, name in enumerate(names)
    ]
    path = tmp_path / "timeline.ctf.json"
    path.write_text(json.dumps({"traceEvents": rows}, indent=4))
    assert_unreadable(path, "RunMetadata", ".xplane.pb")


def test_a_link_hook_of_chainer_is_the_same_kind(tmp_path: Path) -> None:
    path = tmp_path / "hook.json"
    path.write_text('{"call_history": [["Linear", 0.25]], "_running_stack": []}')
    assert_unreadable(path, "TimerHook of Chainer")


@pytest.mark.parametrize(
    ("name", "content", "run"),
    [
        ("train.py", "import torch", "python"),
        ("train.sh", "python train.py", "sh"),
        ("train", "#!/bin/sh", ""),
    ],
)
def test_a_program_is_to_be_recorded_first(
    name: str, content: str, run: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    how = " ".join(["gputrace record --", *filter(None, [run]), str(path)])
    assert_unreadable(path, f"a program, not a trace; record it first: {how}")


@pytest.mark.parametrize(
    "content",
    [
        *(b'[{"name": "x"}]', b'{"call": 1}', b'{"traceEvents": []}', b"\x0a\x05"),
        # The time of day is no part of the test's name.
        gzip.compress(b"[]", mtime=0),
    ],
)
def test_other_files_are_not_taken_for_them(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    assert_unreadable(path, "not a trace that gputrace knows")
