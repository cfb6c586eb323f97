"""A part cut out of a file of nvprof."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Final

import pytest

from gputrace.model.options import Window
from gputrace.readers.nvprof_schema import nvprof_tables, read_file
from gputrace.store.redact import redaction_for
from gputrace.store.slice import slice_trace
from gputrace.store.sqlite_reader import Database
from tests.helpers.lookups import rows
from tests.helpers.recordings import DATA

KERNEL: Final = "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL"
RUNTIME: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
MARKER: Final = "CUPTI_ACTIVITY_KIND_MARKER"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nvprof") / "whole.nvvp"
    path.write_bytes(lzma.decompress((DATA / "profiling-lm-da6bcc3f.nvprof.xz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def window(whole: Path) -> Window:
    """The second quarter of the time that kernels take."""
    [(first, last)] = rows(whole, f"SELECT min(start), max(end) FROM {KERNEL}")
    return Window(first + (last - first) // 4, first + (last - first) // 2)


@pytest.fixture(scope="module")
def part(whole: Path, window: Window) -> Path:
    target, database = whole.with_name("part.nvvp"), Database(whole)
    slice_trace(nvprof_tables(database), target, window)
    database.close()
    return target


def test_it_is_a_file_of_nvprof_and_smaller(whole: Path, part: Path) -> None:
    assert read_file(part).pid == read_file(whole).pid
    assert part.stat().st_size < whole.stat().st_size / 2


@pytest.mark.parametrize("table", [KERNEL, RUNTIME, "CUPTI_ACTIVITY_KIND_MEMCPY"])
def test_every_row_that_touches_the_window_is_in_it(
    table: str, whole: Path, part: Path, window: Window
) -> None:
    touching = f"SELECT * FROM {table} WHERE start < {window.end} AND end >= {window.start}"
    assert sorted(rows(part, touching)) == sorted(rows(whole, touching))
    assert len(rows(part, f"SELECT * FROM {table}")) < len(rows(whole, f"SELECT * FROM {table}"))


def test_kernels_have_their_calls_and_names(part: Path) -> None:
    kernels = rows(part, f"SELECT count(*) FROM {KERNEL}")
    assert rows(part, f"SELECT count(*) FROM {KERNEL} JOIN {RUNTIME} USING (correlationId)") == (
        kernels
    )
    named = f"SELECT count(*) FROM {KERNEL} k JOIN StringTable s ON s._id_ = k.name"
    assert rows(part, named) == kernels


def test_markers_keep_both_their_ends(whole: Path, part: Path) -> None:
    sql = f"SELECT id, count(*) FROM {MARKER} GROUP BY id"
    before, after = dict(rows(whole, sql)), dict(rows(part, sql))
    assert 0 < len(after) < len(before)
    assert all(before[id] == count for id, count in after.items())


def test_it_can_be_redacted(whole: Path, window: Window) -> None:
    target, database = whole.with_name("redacted.nvvp"), Database(whole)
    slice_trace(nvprof_tables(database), target, window, redaction_for(database))
    database.close()
    named = f"SELECT value FROM {KERNEL} k JOIN StringTable s ON s._id_ = k.name ORDER BY start"
    inside = f" WHERE start >= {window.start} AND end < {window.end} ORDER"
    named = named.replace(" ORDER", inside)
    assert rows(target, named) == rows(whole, named) != []
