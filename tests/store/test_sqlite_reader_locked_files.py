"""A trace that another program is writing, or that we may not read, is left alone and told so."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.helpers import command
from tests.helpers.command import UNREADABLE, assert_refused, assert_unreadable, state
from tests.helpers.exports import KERNEL, Export

NOBODY: Final = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Export().kernel(0, 10).kernel(20, 30).write(tmp_path / "trace.sqlite")


@contextmanager
def other_program(path: Path, *statements: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has run the statements and keeps the database open."""
    program = (
        "import sqlite3, sys\n"
        "database = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "for statement in sys.argv[2:]: database.execute(statement).fetchall()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", program, str(path), *statements],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        yield running
        running.kill()


@pytest.mark.parametrize("lock", ["BEGIN EXCLUSIVE", "BEGIN IMMEDIATE"])
def test_a_file_that_another_program_is_writing(lock: str, path: Path) -> None:
    with other_program(path, lock):
        assert_unreadable(path, "another program is writing to it")
    assert command.gputrace("analyze", path).code == 0


def test_a_file_with_writes_that_are_not_in_it_yet(path: Path) -> None:
    with other_program(path, "PRAGMA journal_mode=WAL", f"DELETE FROM {KERNEL} WHERE start = 0"):
        assert_unreadable(path, "trace.sqlite-wal", "unfinished writes")
    assert_unreadable(path, "trace.sqlite-wal", "unfinished writes")  # the program was killed


def test_a_file_whose_writer_died_in_a_change(path: Path) -> None:
    path.with_name("trace.sqlite-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7")
    assert_unreadable(path, "trace.sqlite-journal", "unfinished writes")


def test_a_file_that_another_program_reads_is_read(path: Path) -> None:
    with other_program(path, "BEGIN", f"SELECT count(*) FROM {KERNEL}"):
        assert command.gputrace("analyze", path).code == 0


def test_a_file_that_was_written_ahead_and_closed_is_read(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode=WAL")
    path.with_name("trace.sqlite-wal").touch()
    before = state(path.parent)
    assert command.gputrace("analyze", path).code == 0
    assert state(path.parent) == before


@pytest.fixture
def guarded(path: Path) -> Iterator[Path]:
    """A trace that only root may read, in a folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = path.rename(Path(folder) / path.name)
        path.chmod(0)
        yield path


def test_a_file_that_we_may_not_read(guarded: Path) -> None:
    # Root may read anything, so it becomes somebody else, with what is needed imported before.
    become_nobody = f"os.getuid() or os.setuid({NOBODY})"
    program = f"""
        import os, sys
        import gputrace.api, gputrace.analyzers.pipeline
        import gputrace.cli.analyze, gputrace.readers.open
        {become_nobody}
        sys.exit(gputrace.cli.run(["analyze", sys.argv[1]]))
    """
    lines = "\n".join(line.strip() for line in program.splitlines())
    ran = command.python("-c", lines, str(guarded))
    assert_refused(ran, UNREADABLE, str(guarded), "no permission")
