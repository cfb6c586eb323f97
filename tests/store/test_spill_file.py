"""Traces that are larger than what is held are analyzed from disk, with the same answer."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import gputrace
from gputrace.errors import MissingError
from gputrace.model.events import Events, Kind
from gputrace.model.struct import Struct
from gputrace.readers.registry import open_trace
from gputrace.store import spill_file, sqlite_reader
from gputrace.store.spill_file import LazySequence, SpillFile
from tests.helpers.exports import Export
from tests.helpers.rank_files import Node, write_parts, write_whole
from tests.helpers.recordings import unpack
from tests.synthetic import Plan, simulate

Writing = Callable[[Path], list[Path]]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything goes to disk, a few rows at a time, through many mappings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sqlite_reader, "ROWS_AT_ONCE", 1 << 12)
    monkeypatch.setattr(spill_file, "_LEAST_SPILLED", 1)
    monkeypatch.setattr(spill_file, "_EXTENT", 1 << 16)


# ---- what is kept ----


@given(
    st.lists(
        st.tuples(st.sampled_from(["i1", "i2", "i4", "i8", "?", "f8"]), st.integers(0, 30_000)),
        max_size=12,
    )
)
def test_columns_are_what_they_were_and_cannot_be_written(kinds: list[tuple[str, int]]) -> None:
    draw = np.random.default_rng(1)
    given = [draw.integers(-100, 100, length).astype(kind) for kind, length in kinds]
    aside = SpillFile()
    kept = [aside.spill(column) for column in given]
    aside.let_go()
    for before, after in zip(given, kept, strict=True):
        assert after.dtype == before.dtype
        assert np.array_equal(after, before)
        assert not (len(after) and after.flags.writeable)


@given(st.lists(st.integers(0, 9_000), max_size=8))
def test_a_column_may_come_in_parts(lengths: list[int]) -> None:
    parts = [np.arange(length, dtype=np.int64) for length in lengths]
    room = SpillFile().room(np.int64, sum(lengths))
    for part in parts:
        room.append(part)
    assert room.column.tolist() == [value for part in parts for value in part.tolist()]


class Doubled(Struct, frozen=True, dict=True):
    """Something with a column, and one that is worked out once."""

    column: NDArray[np.int64]
    more: tuple[dict[str, Any], ...]

    @cached_property
    def twice(self) -> NDArray[np.int64]:
        return 2 * self.column


def test_all_columns_of_a_thing_are_kept_and_those_that_it_works_out() -> None:
    values = np.arange(1_000)
    thing = Doubled(values, ({"events": Events({"start": values}), "text": "as it is"},))
    aside = SpillFile()
    kept = aside.spill(thing)
    found = [kept.column, kept.more[0]["events"].start, vars(kept)["twice"]]
    assert [column.tolist() for column in found] == [
        values.tolist(), values.tolist(), (2 * values).tolist()
    ]  # fmt: skip
    assert not any(column.flags.writeable for column in found)
    assert kept.more[0]["text"] == "as it is"
    assert thing.column.flags.writeable, "what was given stays as it is"
    assert aside.spill(kept).column is kept.column, "nothing is spilled twice"


def test_nothing_is_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither parts of kept columns, nor what a kept thing has worked out, nor one value again."""
    aside = SpillFile()
    kept = aside.spill(Doubled(np.arange(5_000), ()))
    monkeypatch.setattr(aside, "write", lambda *_: pytest.fail("written again"))
    again = aside.spill(kept)
    assert np.array_equal(again.twice, np.arange(5_000) * 2)
    assert np.array_equal(aside.spill(kept.column[10:20]), np.arange(10, 20))
    assert aside.spill(np.broadcast_to(np.int64(7), 5_000)).tolist() == [7] * 5_000


def test_the_file_has_no_name_and_ends_with_the_process(tmp_path: Path) -> None:
    aside = SpillFile()
    aside.spill(np.arange(100_000))
    assert list((tmp_path / "cache" / "gputrace").iterdir()) == []


def test_memory_is_given_back_when_another_thing_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spill_file, "_KEPT", 1 << 20)
    aside = SpillFile()
    columns = [aside.spill(np.full(1 << 20, number)) for number in range(4)]
    things = LazySequence(columns, aside)
    before = _mapped_kib()
    sums = [int(thing.sum()) for thing in things]
    assert sums == [number << 20 for number in range(4)]
    assert _mapped_kib() - before < 2 * columns[0].nbytes >> 10
    assert len(things) == 4
    assert [len(thing) for thing in things[1:3]] == [1 << 20, 1 << 20]


def _mapped_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssFile", "RssShmem")))


# ---- the same answer ----


def recording_of_one_host(folder: Path) -> list[Path]:
    """Steps that were marked, with late hosts, two streams and CUDA graphs."""
    plan = Plan(
        steps=12, ranks=4, allreduces=3, late_host_rank=2, late_host_ns=2_000_000, streams=2,
        sync_every_step=True,
    )  # fmt: skip
    return [write_whole(simulate(plan), folder / "run.sqlite")]


def recording_of_two_hosts(folder: Path) -> list[Path]:
    """A file a host, whose clocks differ."""
    plan = Plan(steps=10, ranks=4, allreduces=3, data_wait_ns=3_000_000, isolated=True)
    nodes = [Node("node0", (0, 1)), Node("node1", (2, 3), began_ns=5_000_000)]
    return write_parts(simulate(plan), folder, nodes)


def real_data_parallel(folder: Path) -> list[Path]:
    """One process and four GPUs, with peer copies."""
    return [unpack("h200x4-dataparallel-7-9.sqlite", folder)]


def real_nvprof(folder: Path) -> list[Path]:
    return [unpack("profiling-lm-da6bcc3f.nvprof", folder)]


def without_calls(folder: Path) -> list[Path]:
    export = Export()
    for number in range(6_000):
        export.kernel(1_000 + 40 * number, 1_020 + 40 * number, name=f"k{number % 7}")
    return [export.write(folder / "kernels.sqlite")]


@pytest.mark.parametrize(
    "write",
    [
        recording_of_one_host,
        recording_of_two_hosts,
        real_data_parallel,
        real_nvprof,
        without_calls,
    ],
)
def test_the_answer_is_the_same_byte_for_byte(
    write: Writing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    paths = write(folder)
    monkeypatch.setattr(spill_file, "LARGE", 1 << 40)
    held = gputrace.open(*paths).analyze().render("json")
    monkeypatch.setattr(spill_file, "LARGE", -1)
    assert gputrace.open(*paths).analyze().render("json") == held


def test_rows_that_cannot_be_used_are_counted_once(tmp_path: Path) -> None:
    export = Export()
    for number in range(9_000):
        start = 1_000 + 40 * number
        export.kernel(start, start - 5 if number % 1_000 == 0 else start + 20)
    trace = open_trace(export.write(tmp_path / "broken.sqlite"))
    parts = list(trace.parts([Kind.KERNEL], ["start", "end"]))
    assert [len(part) for part in parts] == [4_096 - 5, 4_096 - 4, 808]
    whole = trace.events([Kind.KERNEL], ["start", "end"])
    assert np.concatenate([part.start for part in parts]).tolist() == whole.start.tolist()
    assert trace.quality.dropped == {"end before start": 9}


# ---- what can go wrong ----


def test_a_full_disk_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    aside = SpillFile()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(MissingError, match="no room for a trace that is larger"):
            aside.spill(np.zeros(1 << 18))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_cache_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    trace = recording_of_one_host(tmp_path)[0]
    program = (
        "import gputrace.store.spill_file as s; s.LARGE = -1; "
        f"from gputrace.cli import end, run; end(run(['analyze', {str(trace)!r}]))"
    )
    env = os.environ | {"XDG_CACHE_HOME": str(file)}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == MissingError.exit_code
    assert ran.stderr.count("\n") == 1
    assert str(file) in ran.stderr
