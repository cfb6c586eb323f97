"""Sketches: written step by step, read by the folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gputrace.errors import InputError
from gputrace.store.sketches import (
    KERNELS,
    STEP,
    SketchWriter,
    Steps,
    latest_of_each_rank,
    read_sketches,
)

ABOUT = {"job": "train 7", "rank": 2, "host": "node1", "pid": 4711}


def steps(*numbers: int) -> Steps:
    rows = np.zeros(len(numbers), STEP)
    rows["step"], rows["end"], rows["length"] = numbers, np.array(numbers) * 1000 + 1, 1000
    return rows


def test_what_is_written_is_read_and_a_later_writer_goes_on(tmp_path: Path) -> None:
    writer = SketchWriter(tmp_path, ABOUT)
    assert writer.number("a.py:1 load") == 1
    writer.append(steps(0, 1, 2))
    later = SketchWriter(tmp_path, ABOUT)
    assert later.last == 2
    assert (later.number("b.py:2 log\nmore"), later.number("a.py:1 load")) == (2, 1)
    later.append(steps(3))
    (sketch,) = read_sketches(tmp_path)
    assert (sketch.job, sketch.rank, sketch.host, sketch.pid) == ("train 7", 2, "node1", 4711)
    assert (sketch.first, sketch.last) == (0, 3)
    assert sketch.load()["step"].tolist() == [0, 1, 2, 3]
    assert [sketch.line(n) for n in (0, 1, 2, 3)] == ["", "a.py:1 load", "b.py:2 log more", ""]


def test_a_record_that_was_cut_is_left_out(tmp_path: Path) -> None:
    SketchWriter(tmp_path, ABOUT).append(steps(0, 1))
    (path,) = tmp_path.glob("*.sketch")
    path.write_bytes(path.read_bytes()[:-5])
    (sketch,) = read_sketches(tmp_path)
    assert (sketch.last, len(sketch.load())) == (0, 1)


def test_kernels_are_read_with_their_card_and_a_broken_file_is_refused(tmp_path: Path) -> None:
    writer = SketchWriter(tmp_path, ABOUT)
    writer.append(steps(0, 1))
    rows = np.zeros(2, KERNELS)
    rows["name"], rows["total"] = writer.number("gemm"), 7
    for _ in range(2):
        writer.append_kernels(rows, "GPU-1", "H200")
    (sketch,) = read_sketches(tmp_path)
    assert (sketch.gpu, sketch.card) == ("GPU-1", "H200")
    assert sketch.load_kernels()["total"].tolist() == [7] * 4
    assert sketch.line(int(rows["name"][0])) == "gemm"
    (path,) = tmp_path.glob("*.kernels")
    path.write_bytes(b"[1]\n")
    with pytest.raises(InputError, match="not a sketch, or a broken one"):
        read_sketches(tmp_path)


def test_after_a_restart_the_process_that_trains_now_counts(tmp_path: Path) -> None:
    """It counts its steps from 0, and has come less far."""
    SketchWriter(tmp_path, ABOUT).append(steps(0, 1, 2, 3))
    again = steps(0, 1)
    again["end"] += 10_000
    SketchWriter(tmp_path, ABOUT | {"pid": 4711 - 1}).append(again)
    (latest,) = latest_of_each_rank(read_sketches(tmp_path))
    assert (latest.pid, latest.last) == (4710, 1)


@pytest.mark.parametrize(
    "head",
    [b"", b"{}\n", b"[1]\n", b"null\n", b"no JSON\n", b'{"gputrace_sketch": 2}\n', b"[" * 5000,
     b'{"gputrace_sketch": 1, "job": "j", "rank": "x", "host": "h", "pid": 1}\n',
     b'{"gputrace_sketch": 1, "job": "j", "rank": 1e999, "host": "h", "pid": 1}\n'],
    ids=["empty", "nothing", "a list", "null", "text", "version", "deep", "a rank", "infinite"],
)  # fmt: skip
def test_another_file_is_refused_in_one_line(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "h.1.sketch"
    path.write_bytes(head + steps(0).tobytes())
    with pytest.raises(InputError, match=r"h\.1\.sketch: .*sketch"):
        read_sketches(tmp_path)
