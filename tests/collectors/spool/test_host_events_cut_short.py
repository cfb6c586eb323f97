"""Whatever a process writes, wherever it is cut off: nothing before is lost, nothing doubled."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from struct import pack
from typing import Final
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gputrace.collectors.finalize import merge
from gputrace.collectors.hooks._gputrace_hooks import host_file
from gputrace.collectors.spool import read_all
from gputrace.collectors.spool.host_events import HostEvents, join_hosts, read_host_file
from gputrace.errors import InputError

ANNOTATION, NOTE = 3, 4
BEGAN: Final = 1_700_000_000_000_000_000
EVENT_BYTES: Final = 32

Written = list[tuple[int, int]]
"""Numbers of events, and where in the file each ends."""


class Recorder(RuleBasedStateMachine):
    """The file of one process, in a ring of files, and what should be in each."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="gputrace-states-"))
        self.environment = patch.dict(os.environ, GPUTRACE_DIR=str(self.folder))
        self.environment.start()
        self.file = host_file.HostFile(4711, (BEGAN, 1))
        self.file.open()
        self.files: list[Written] = [[]]
        self.number = 0
        self.is_full = False

    def teardown(self) -> None:
        self.file.close()
        self.environment.stop()
        shutil.rmtree(self.folder)

    @property
    def path(self) -> Path:
        return max(self.folder.iterdir(), key=lambda path: (len(path.name), path.name))

    @precondition(lambda self: not self.is_full)
    @rule(count=st.integers(1, 4), kind=st.sampled_from((ANNOTATION, NOTE)))
    def write(self, count: int, kind: int) -> None:
        self.file.append(self._chunks(count, kind))
        size = self.path.stat().st_size
        self.files[-1] += [
            (self.number + place, size - EVENT_BYTES * (count - 1 - place))
            for place in range(count)
        ]
        self.number += count

    def _chunks(self, count: int, kind: int) -> bytes:
        numbers = range(self.number, self.number + count)
        rows = [
            pack("<QQIIHHI", BEGAN + 10 * n, BEGAN + 10 * n + 5, 7, 1, kind, 0, n) for n in numbers
        ]
        name = host_file.chunk(b"NAME", pack("<I", 1) + b"range")
        return name + host_file.clocks() + host_file.chunk(b"EVNT", b"".join(rows))

    @precondition(lambda self: not self.is_full)
    @rule(keep=st.integers(1, 3))
    def go_on_in_a_new_file(self, keep: int) -> None:
        names = sorted(self.folder.iterdir(), key=lambda path: (len(path.name), path.name))
        self.file.rotate(keep)
        self.files.append([])
        there = {path.name for path in self.folder.iterdir()}
        gone = [place for place, path in enumerate(names) if path.name not in there]
        self.files = [own for place, own in enumerate(self.files) if place not in gone]
        assert len(self.files) == len(there)

    @precondition(lambda self: not self.is_full)
    @rule(before=st.integers(0, 80), count=st.integers(1, 4))
    def fill_the_disk(self, before: int, count: int) -> None:
        """The disk takes a few bytes more, then none."""
        real, left = os.write, [before, 0]

        def write(file: int, data: bytes) -> int:
            room = left.pop(0) if left else 0
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(file, data[:room])

        with patch.object(os, "write", write), pytest.raises(OSError, match="No space"):
            self.file.append(self._chunks(count, ANNOTATION))
        self.file.write_stop(BEGAN + 10**9, count, errno.ENOSPC)
        self.is_full = True

    @rule(cut=st.integers(0, 200))
    def recover_what_a_kill_leaves(self, cut: int) -> None:
        """The last bytes did not reach the disk: whole events before them are there, once."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "files")
            shutil.copytree(self.folder, copy)
            last = copy / self.path.name
            size = max(last.stat().st_size - cut, 0)
            os.truncate(last, size)
            kept = [n for own in self.files[:-1] for n, _ in own]
            kept += [n for n, end in self.files[-1] if end <= size]
            assert self._read(copy) == kept
            self._assert_merged(copy, Path(folder, "run.sqlite"), kept)

    def _assert_merged(self, copy: Path, output: Path, kept: list[int]) -> None:
        try:
            merge(copy, output, {})
        except InputError:
            assert not kept
            return
        with closing(sqlite3.connect(output)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            found = sum(
                database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in tables & {"GPUTRACE_HOST_RANGE", "GPUTRACE_NOTE"}
            )
        assert found == len(kept)

    @invariant()
    def all_is_there(self) -> None:
        assert self._read(self.folder) == [n for own in self.files for n, _ in own]

    def _read(self, folder: Path) -> list[int]:
        problems: list[InputError] = []
        found: list[HostEvents] = read_all(folder, "*.host", read_host_file, join_hosts, problems)
        return [int(number) for host in found for number in host.events["number"]]


TestRecorder = Recorder.TestCase
TestRecorder.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
