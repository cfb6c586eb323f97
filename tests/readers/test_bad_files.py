"""Files that are no trace, or a broken one, get one line that says so, and nothing else happens."""

from __future__ import annotations

import gzip
import lzma
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

import gputrace
from gputrace.errors import InputError
from tests.helpers import command
from tests.helpers.command import UNREADABLE, assert_refused, assert_unreadable
from tests.helpers.exports import KERNEL, RUNTIME, Export, global_id


def sqlite_file(path: Path, script: str) -> Path:
    with closing(sqlite3.connect(path)) as database:
        database.executescript(script)
    return path


def good_export() -> Export:
    """Enough rows that tables have pages of their own."""
    export = Export()
    for index in range(2000):
        export.kernel(10 * index, 10 * index + 5, f"kernel_{index % 100}")
    return export


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_export().write(tmp_path_factory.mktemp("good") / "trace.sqlite")


def test_a_missing_file(tmp_path: Path) -> None:
    assert_unreadable(tmp_path / "trace.sqlite", "no such file")


def test_a_folder(tmp_path: Path) -> None:
    ran = command.gputrace("analyze", tmp_path)
    assert_refused(ran, UNREADABLE, str(tmp_path), "is a directory")


def test_a_file_that_cannot_be_read_is_named() -> None:
    """The memory of a process has none at its beginning; a broken disk answers alike."""
    ran = command.gputrace("analyze", "/proc/self/mem")
    assert_refused(ran, UNREADABLE, "/proc/self/mem: cannot be read: Input/output error")


def test_a_pipe_does_not_keep_us_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    ran = command.gputrace("analyze", tmp_path / "pipe")
    assert_refused(ran, UNREADABLE, "pipe", "not a regular file")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"a line of text\n", "not a trace"),
        (b'{"traceEvents": [', "not a trace"),
        (gzip.compress(b"SQLite format 3\0"), "the SQLite file in it is broken: truncated"),
        (lzma.compress(b"SQLite format 3\0"), "the SQLite file in it is broken: truncated"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "not a trace"),
        (b"SQLite format 2\0" + bytes(200), "not a trace"),
        (bytes(5000), "not a trace"),
        (b"SQLite format 3\0", "truncated"),
        (b"SQLite format 3\0" + b"\xff" * 200, "trace.sqlite"),
        (b"SQLite format 3\0" + bytes(5000), "trace.sqlite"),
    ],
    ids=[
        "empty",
        "text",
        "json",
        "gzip",
        "xz",
        "png",
        "sqlite2",
        "zeros",
        "magic",
        "ones",
        "no header",
    ],
)
def test_a_file_of_another_kind(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    path.write_bytes(content)
    assert_unreadable(path, words)


@pytest.mark.parametrize("left", [16, 99, 100, 1000, 4096, 0.25, 0.5, 0.999, -4096, -1])
def test_a_truncated_file(left: float, good: Path, tmp_path: Path) -> None:
    content = good.read_bytes()
    path = tmp_path / "trace.sqlite"
    path.write_bytes(content[: left if isinstance(left, int) else int(left * len(content))])
    assert_unreadable(path, "truncated")


def test_a_truncated_file_whose_header_does_not_tell_its_size(good: Path, tmp_path: Path) -> None:
    content = bytearray(good.read_bytes()[:-8192])
    content[92:96] = bytes(4)  # "the page count is valid for change 0": as old SQLite left it
    path = tmp_path / "trace.sqlite"
    path.write_bytes(content)
    assert_unreadable(path, "broken SQLite file", "copy or export it again")


def root_page(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as database:
        sql = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        return int(database.execute(sql, (table,)).fetchone()[0])


def overwritten(good: Path, path: Path, offset: int, junk: bytes) -> Path:
    content = bytearray(good.read_bytes())
    content[offset : offset + len(junk)] = junk
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("junk", [b"\0", b"\xff", b"\x5a"])
@pytest.mark.parametrize("table", [KERNEL, "StringIds"])
def test_a_table_s_first_page_overwritten(
    table: str, junk: bytes, good: Path, tmp_path: Path
) -> None:
    offset = (root_page(good, table) - 1) * 4096
    path = overwritten(good, tmp_path / "trace.sqlite", offset, junk * 4096)
    assert_unreadable(path, "broken SQLite file")


def test_the_list_of_tables_overwritten(good: Path, tmp_path: Path) -> None:
    path = overwritten(good, tmp_path / "trace.sqlite", 100, b"\xa5" * 3996)
    assert_unreadable(path, "broken SQLite file")


@pytest.mark.parametrize("junk", [b"\0", b"\xff", b"\x5a"])
def test_bytes_overwritten_anywhere_break_nothing_but_the_trace(
    junk: bytes, good: Path, tmp_path: Path
) -> None:
    """It is refused, or, where SQLite cannot tell, read as what it now says."""
    outcomes = []
    for offset in range(100, good.stat().st_size - 64, 3001):
        path = overwritten(good, tmp_path / f"{offset}.sqlite", offset, junk * 64)
        with suppress(InputError):
            with gputrace.open(path) as trace:
                gpus = trace.analyze().gpus
            for gpu in gpus:
                assert gpu.compute_ns + gpu.communication_ns + gpu.idle_ns == gpu.span_ns
            outcomes.append(offset)
    assert 0 < len(outcomes) < len(list(tmp_path.iterdir()))


def test_a_browser_s_history(tmp_path: Path) -> None:
    script = """
        CREATE TABLE moz_places (id INTEGER PRIMARY KEY, url TEXT);
        CREATE TABLE moz_historyvisits (id INTEGER PRIMARY KEY, place_id INTEGER);
        CREATE TABLE moz_bookmarks (id INTEGER PRIMARY KEY, title TEXT);
        CREATE TABLE moz_keywords (id INTEGER PRIMARY KEY);
    """
    path = sqlite_file(tmp_path / "places.sqlite", script)
    assert_unreadable(path, "an SQLite file, but not a trace", "moz_bookmarks", "…")


def test_an_sqlite_file_without_tables(tmp_path: Path) -> None:
    path = sqlite_file(tmp_path / "empty.sqlite", "CREATE TABLE t (x); DROP TABLE t;")
    assert_unreadable(path, "an SQLite file, but not a trace", "none")


def test_a_dlprof_database(tmp_path: Path) -> None:
    script = """
        CREATE TABLE op_nodes (id INTEGER PRIMARY KEY, name TEXT);
        CREATE TABLE iterations (id INTEGER PRIMARY KEY, start INTEGER, stop INTEGER);
        CREATE VIEW view_op_nodes AS SELECT * FROM op_nodes;
        CREATE VIEW view_iterations_profiled AS SELECT * FROM iterations;
    """
    path = sqlite_file(tmp_path / "dlprof_dldb.sqlite", script)
    assert_unreadable(path, "DLProf", "analyze the nsys export")


def test_a_database_of_rocm_profile_data(tmp_path: Path) -> None:
    script = "CREATE TABLE rocpd_api (id, pid); CREATE TABLE rocpd_op (id, gpuId);"
    path = sqlite_file(tmp_path / "trace.rpd", script)
    assert_unreadable(path, "rocmProfileData", "rocprofv3 --runtime-trace --output-format rocpd")


def test_an_export_without_cuda_tables(tmp_path: Path) -> None:
    export = Export().add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.20.3")
    export.string("python")
    export.add("OSRT_API", start=0, end=9, globalTid=global_id(1), nameId=export.string("poll"))
    assert_unreadable(export.write(tmp_path / "trace.sqlite"), "only the host's", "-t cuda")


def test_an_export_whose_window_is_empty_says_so(tmp_path: Path) -> None:
    export = Export().add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.20.3")
    export.string("python")
    path = export.write(tmp_path / "trace.sqlite")
    assert_unreadable(path, "nothing was recorded", "--capture-range")
    assert "-t cuda" not in command.gputrace("analyze", path).err


@pytest.mark.parametrize("kernels", [False, True])
def test_an_export_of_a_program_that_failed_shows_its_error(kernels: bool, tmp_path: Path) -> None:
    export = Export().add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.20.3")
    export.give("ProcessStreams", "globalPid", "contentId")
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    output = f"step 1\nTraceback (most recent call last):\n  File x\n{error}\n"
    for text in ("ValueError: old" + "." * 9000, output):
        export.add("ProcessStreams", globalPid=global_id(1), contentId=export.string(text))
    path = (export.kernel(0, 10) if kernels else export).write(tmp_path / "trace.sqlite")
    said = f"program's output ends with an error: {error}"
    if kernels:
        assert said in " ".join(command.gputrace("analyze", path).out.split())
    else:
        assert_unreadable(path, said, "nothing was recorded")


def test_an_export_of_the_host_alone(tmp_path: Path) -> None:
    export = Export().call(0, 10, "cudaMalloc")
    export.add("OSRT_API", start=0, end=9, globalTid=global_id(1), nameId=export.string("poll"))
    assert_unreadable(export.write(tmp_path / "trace.sqlite"), "no GPU activity", "gives a GPU")


def test_gpu_tables_without_rows(tmp_path: Path) -> None:
    path = Export().kernel(0, 10).call(0, 10, "cudaMalloc").write(tmp_path / "trace.sqlite")
    sqlite_file(path, f"DELETE FROM {KERNEL};")
    assert_unreadable(path, "no GPU activity")


def test_a_runtime_table_alone_that_has_no_times(tmp_path: Path) -> None:
    export = Export().call(0, 10, "cudaMalloc").strip(RUNTIME, "start")
    assert_unreadable(export.write(tmp_path / "trace.sqlite"), "not a trace")


def test_every_error_of_the_library_is_one_of_ours(tmp_path: Path) -> None:
    with pytest.raises(gputrace.GputraceError, match=r"trace\.sqlite: no such file") as caught:
        gputrace.open(tmp_path / "trace.sqlite")
    assert isinstance(caught.value, InputError)
    assert caught.value.path == tmp_path / "trace.sqlite"
    assert "\n" not in str(caught.value)
