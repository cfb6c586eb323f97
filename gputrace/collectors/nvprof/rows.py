"""The rows of one process that nvprof recorded, in the tables of the trace file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gputrace.collectors.rows.clock import global_pid
from gputrace.errors import InputError
from gputrace.traces import guard
from gputrace.traces.demangling import demangle_all
from gputrace.traces.enums import OVERHEADS, UNKNOWN_OVERHEAD
from gputrace.traces.names import short
from gputrace.traces.nvprof.calls import DRIVER, RUNTIME, call_name
from gputrace.traces.nvprof.file import CALLS, KERNELS, ON_GPU, PREFIX, NvprofFile
from gputrace.traces.nvprof.rows import (
    HAS_TIMES,
    OBJECT_THREAD,
    TEMPORARY,
    Rows,
    all_rows,
    strings_named,
)
from gputrace.traces.nvprof.skew import find_skew
from gputrace.traces.writer import TraceWriter

_FIRST_UNKNOWN: Final = 1 << 23
"""Above every thread id of Linux, and within the 24 bits that a globalTid has for one."""


class NvprofRows:
    """Writes the rows of one process.

    Attributes:
        late: by how many nanoseconds the GPU's clock was ahead of the host's; it is taken out.
    """

    def __init__(
        self,
        writer: TraceWriter,
        file: NvprofFile,
        pid: int,
        origin: int,
        threads: Mapping[int, int],
    ) -> None:
        """``origin`` is the session's start, ``threads`` system ids by 32 bits of pthread ids."""
        self._writer, self._file, self._origin = writer, file, origin
        self._process = global_pid(pid)
        self._threads = threads
        self.late = 0

    def write(self) -> None:
        """Raises InputError where the file is broken."""
        try:
            with self._writer.attached(self._file.path, "nvprof") as database:
                for name, columns in TEMPORARY.items():
                    database.execute(f"CREATE TEMP TABLE {name} ({columns})")
                self._fill(database)
                self.late = find_skew(database, self._file.columns)
                for rows in all_rows(self._file.columns):
                    self._insert(database, rows)
                self._tell_losses(database)
                for name in TEMPORARY:
                    database.execute(f"DROP TABLE temp.{name}")
        except guard.ERRORS as error:
            raise InputError(self._file.path, f"broken ({error})") from None

    def _insert(self, database: sqlite3.Connection, rows: Rows) -> None:
        values = {
            "origin": self._origin,
            "late": self.late,
            "process": self._process,
            "unknown": self._writer.string("(no name)"),
        }
        self._writer.make(rows.table)
        database.execute(rows.insert, values)

    def _fill(self, database: sqlite3.Connection) -> None:
        self._fill_names(database)
        self._fill_threads(database)
        self._fill_calls(database)
        kinds = self._distinct(database, ("OVERHEAD",), "r.overheadKind")
        known = [OVERHEADS.get(kind, UNKNOWN_OVERHEAD) for kind in kinds]
        kept = self._writer.strings([name for _, name in known])
        numbers = [number for number, _ in known]
        _insert(database, "overheads", zip(kinds, numbers, kept, strict=True), 3)

    def _fill_names(self, database: sqlite3.Connection) -> None:
        """Only of what is named in rows to be written: others hold the command line."""
        database.text_factory = lambda raw: raw.decode("utf-8", "replace")
        named = {
            id
            for table, expression in strings_named(self._file.columns)
            for id in self._distinct(database, [table], expression)
        }
        strings = database.execute("SELECT _id_, value FROM nvprof.StringTable")
        texts = {id: text for id, text in strings if id in named and id}
        kept = dict(zip(texts, self._writer.strings(list(texts.values())), strict=True))
        kernels = [id for id in self._distinct(database, KERNELS, "r.name") if id in texts]
        known = demangle_all({texts[id] for id in kernels})
        clear = [known[texts[id]] for id in kernels]
        whole = dict(zip(kernels, self._writer.strings(clear), strict=True))
        own = dict(zip(kernels, self._writer.strings([short(n) for n in clear]), strict=True))
        rows = ((id, kept[id], whole.get(id), own.get(id)) for id in texts)
        _insert(database, "names", rows, 4)

    def _fill_threads(self, database: sqlite3.Connection) -> None:
        """Threads whose system id is unknown get numbers of their own, and a name that says so."""
        numbers = set(self._distinct(database, CALLS, "r.threadId & 0xffffffff"))
        objects = self._distinct(database, ("MARKER", "OVERHEAD", "NAME"), OBJECT_THREAD)
        numbers |= {int.from_bytes(raw, "little") for raw in objects}
        unknown = sorted(number for number in numbers - {0} if number not in self._threads)
        ids = {number: _FIRST_UNKNOWN + at for at, number in enumerate(unknown)}
        ids |= {**self._threads, 0: 0}
        rows = [
            (number, number.to_bytes(4, "little"), self._process + ids[number])
            for number in sorted(numbers | {0})
        ]
        _insert(database, "threads", rows, 3)
        names = self._writer.strings([f"pthread {number:#x}" for number in unknown])
        columns = {"nameId": names, "globalTid": [self._process + ids[n] for n in unknown]}
        self._writer.add("ThreadNames", columns)

    def _fill_calls(self, database: sqlite3.Connection) -> None:
        for event_class, table in ((RUNTIME, "RUNTIME"), (DRIVER, "DRIVER")):
            numbers = self._distinct(database, (table,), "r.cbid")
            kept = self._writer.strings([call_name(event_class, number) for number in numbers])
            classes = [event_class] * len(numbers)
            _insert(database, "calls", zip(classes, numbers, kept, strict=True), 3)

    def _distinct(
        self, database: sqlite3.Connection, tables: Iterable[str], expression: str
    ) -> list[Any]:
        """Different values in those of the tables that hold rows."""
        found = {
            value
            for table in tables
            if table in self._file.columns
            for (value,) in database.execute(
                f"SELECT DISTINCT {expression} FROM nvprof.{PREFIX}{table} AS r"
            )
        }
        return sorted(found - {None})

    def _tell_losses(self, database: sqlite3.Connection) -> None:
        for table in (*ON_GPU, *CALLS):
            if table in self._file.columns:
                sql = f"SELECT count(*) FROM nvprof.{PREFIX}{table} AS r WHERE NOT ({HAS_TIMES})"
                count = database.execute(sql).fetchone()[0]
                if count:
                    reason = f"nvprof gave rows of {table} no times: its buffers were full"
                    row = (self._process, None, count, reason)
                    columns = ["globalPid", "timeNs", "records", "reason"]
                    self._writer.add_rows("GPUTRACE_LOSS", columns, [row])


def _insert(
    database: sqlite3.Connection, table: str, rows: Iterable[tuple[Any, ...]], columns: int
) -> None:
    marks = ", ".join("?" * columns)
    database.executemany(f"INSERT INTO temp.{table} VALUES ({marks})", rows)
